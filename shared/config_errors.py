"""What is wrong with a configuration file: one `Mistake` per key, all of them in one `ConfigErrors`.

A mistake prints as `path.to.key: found ... (file:line); wanted ...; what to do`. Paths are dotted, list items are
`[0]`. Raised by `config_io.py`; printed, one line each, at the edge of both programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError, ProjectError

MAX_FOUND_CHARS = 80
ROOT = "(root)"
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_\-]+")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong. `path` is dotted (or a file name, where no key is to blame); `at` is `file:line`."""

    path: str
    found: str
    wanted: str
    remedy: str
    at: str = ""

    @classmethod
    def of(cls, error: ProjectError, path: str, *, wanted: str = "", remedy: str = "") -> Mistake:
        """What an error says of the key at `path`; `wanted` and `remedy` where it does not say them itself."""
        found = f"{error.what}: {error.found}" if error.found else error.what
        return cls(path=path, found=found, wanted=error.wanted or wanted, remedy=error.remedy or remedy)

    def __str__(self) -> str:
        place = f" ({self.at})" if self.at else ""
        return f"{self.path}: found {self.found}{place}; wanted {self.wanted}; {self.remedy}"


class ConfigErrors(ConfigError):  # noqa: N818  (it is several)
    """Every mistake of a configuration. `str()` gives one line per mistake."""

    def __init__(
        self,
        what: str = "the configuration is wrong",
        *,
        found: str = "",
        wanted: str = "",
        remedy: str = "",
        mistakes: Sequence[Mistake] = (),
    ) -> None:
        super().__init__(what, found=found, wanted=wanted, remedy=remedy)
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        return "\n".join(str(mistake) for mistake in self.mistakes) or super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.what, self.found, self.wanted, self.remedy, self.mistakes))


def _rebuild(what: str, found: str, wanted: str, remedy: str, mistakes: Sequence[Mistake]) -> ConfigErrors:
    return ConfigErrors(what, found=found, wanted=wanted, remedy=remedy, mistakes=mistakes)


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0, "c")` as `a.b[0].c`; keys that are not plain words are quoted. The empty path is `ROOT`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if _PLAIN_KEY.fullmatch(part) else ascii(part)
            text += f".{word}" if text else word
    return text or ROOT


def show(value: object) -> str:
    """A value as a message quotes it: its kind and its text, cut to a readable length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, dict):
        return f"a mapping with {len(value)} key(s)"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    kind = {str: "the string ", int: "the integer ", float: "the number "}.get(type(value), "")
    return kind + _cut(repr(value) if not isinstance(value, int) else _int_text(value))


def _int_text(value: int) -> str:
    return str(value) if value.bit_length() < 256 else f"of {value.bit_length()} bits"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_FOUND_CHARS else text[: MAX_FOUND_CHARS - 3] + "..."
