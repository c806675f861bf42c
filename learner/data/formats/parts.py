"""Parts of a split: `data/[:90%]` and `data/[90%:]` are the first 90 and the last 10 percent of the same annotations.

A hash of a record's id decides its part. So the two parts never share a record, the order of the files does not matter,
and adding a photograph moves no other photograph to another part.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from shared.errors import DataError

_PART = re.compile(r"(?P<path>.+)\[(?P<first>\d{1,3}%)?:(?P<last>\d{1,3}%)?\]")
_ALMOST = re.compile(r"(?P<path>.+)\[(?P<part>[\d%.]*:[\d%.]*)\]")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the records, in percent: from `first`, up to but not including `last`."""

    first: int = 0
    last: int = 100

    def has(self, sample_id: str) -> bool:
        # An id may be a file name that is not UTF-8.
        digest = hashlib.blake2b(sample_id.encode(errors="backslashreplace"), digest_size=8).digest()
        return self.first <= int.from_bytes(digest, "big") * 100 // (1 << 64) < self.last


def part_of(path: str) -> tuple[str, Part]:
    """Return the path without its part, and the part. Raises DataError."""
    found = _PART.fullmatch(path)
    if found is None and (almost := _ALMOST.fullmatch(path)) is not None:
        raise DataError(
            f"{path}: no part",
            found=f"[{almost['part']}]",
            wanted="percent, such as [:90%]",
            remedy=f"write {almost['path']}[:90%] or {almost['path']}[90%:]",
        )
    if found is None:
        return path, Part()
    first, last = (int(found[name][:-1]) if found[name] else default for name, default in (("first", 0), ("last", 100)))
    if not 0 <= first < last <= 100:
        raise DataError(
            f"{path}: an empty part",
            found=f"from {first}% to {last}%",
            wanted="two shares between 0% and 100%, the first one lower",
            remedy=f"write {found['path']}[:90%] and {found['path']}[90%:]",
        )
    return found["path"], Part(first, last)
