"""The changes of a bucket since the last update, and the bucket made from them again (R09).

In: a bucket's bytes and those of the update before, as many. Out: the places and the new values of the 16-bit words
that differ, as bytes; or nothing, if these bytes would be no fewer than the bucket's. `patch` turns the old bytes into
the new ones, bit for bit: words are compared and copied as integers, so NaN and -0.0 are values like all others.

A small step of training changes few of the bfloat16 values that travel: 0.4% at a learning rate of 1e-6. A bucket
is cut into segments of SEGMENT_WORDS. Each is written in the shortest of these forms:

- gaps: for each changed word a byte, the number of unchanged words before it. 255 stands for 255 unchanged words and no
  changed one. About 1.6 bytes a word where 0.4% change.
- bits: one bit for each word of the segment. Shorter from one changed word in eight on.
- whole: all words as they are now.

The bytes begin with a table, int32 `[segments, 3]`: form, number of values, bytes of places. Then come each segment's
places, filled up to an even number of bytes, and its values. Zeros fill the whole up to a multiple of 16 bytes.

On the wire two seals follow (`sealed`): that of the new bucket, and one over everything before it. So changed bytes are
never applied, and changes of the wrong bytes are found. Everything runs on the device where the buckets are.

On CPU the segments are shared by as many threads as torch may use, in numpy: torch shares each operation instead, and a
segment's operations are too short for that. Segments with many changes are left to torch. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from shared.errors import SyncError
from shared.sync.buckets import ALIGNMENT_BYTES, SEAL_BYTES, seal

SEGMENT_WORDS = 1 << 20
SEALS_BYTES = 2 * SEAL_BYTES  # seals that follow the changes
FORM = b"changes"  # the form of the seal over them: no seal of a bucket has it
_GAPS, _BITS, _WHOLE = range(3)
_LONG = 255  # a byte of the gaps that ends at no changed word
_WORD_BYTES, _COLUMNS = 2, 3
T = TypeVar("T")
R = TypeVar("R")
Changes = tuple[int, torch.Tensor, torch.Tensor]  # form, places (uint8) and values (int16) of a segment
_LANES = 4  # words that are compared at once
_GATHER = sum(1 << 7 * i for i in range(1, 9))
_SPREAD = sum(1 << 8 * i for i in range(8))
_ONE_EACH = sum(1 << 9 * i for i in range(8)) - (1 << 64)  # written as a signed number


def encode(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """The changes from `old` to `new`: uint8 `[bytes]` on their device. None if they are no shorter than `new`.

    Both are uint8 `[n]`, contiguous, n a multiple of 16, without seals.
    """
    _check_pair(new, old)
    device, rows, parts = new.device, [], list[torch.Tensor]()
    num_bytes = 0
    pairs = list(zip(_segments(new), _segments(old), strict=True))
    few = _in_threads(_few_changes, pairs) if device.type == "cpu" else [None] * len(pairs)
    for pair, found in zip(pairs, few, strict=True):
        form, places, values = found or _changes(*pair)
        rows.append((form, values.numel(), places.numel()))
        if places.numel() % _WORD_BYTES:
            places = torch.nn.functional.pad(places, (0, 1))
        parts += [places, values.view(torch.uint8)]
        num_bytes += places.numel() + values.nbytes
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, _COLUMNS)
    num_bytes += table.nbytes
    filling = -num_bytes % ALIGNMENT_BYTES
    if num_bytes + filling >= new.numel():
        return None
    parts.append(new.new_zeros(filling))
    return torch.cat([table.view(-1).view(torch.uint8).to(device), *parts])


def sealed(changes: torch.Tensor, bucket_seal: torch.Tensor, *, key: bytes, ver: int, index: int) -> torch.Tensor:
    """The changes as they travel, with both seals. `bucket_seal`: uint8 `[SEAL_BYTES]`, that of the new bucket."""
    travels = torch.cat([changes, bucket_seal, bucket_seal])
    seal(travels, key=key, ver=ver, index=index, form=FORM)
    return travels


def patch(old: torch.Tensor, changes: torch.Tensor) -> None:
    """Turn `old` into what `encode` was given as `new`, in place.

    Raises SyncError if these are no changes of as many bytes; `old` may be changed in part then.
    """
    segments = list(_segments(old))
    table, left = _table(changes, len(segments))
    work = list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]]()
    for segment, (form, num_values, num_places) in zip(segments, table, strict=True):
        end = num_places + num_places % _WORD_BYTES
        values_end = end + num_values * _WORD_BYTES
        if min(num_values, num_places) < 0 or values_end > left.numel():
            raise _malformed(f"{left.numel()} bytes for a segment of {values_end}")
        values = left[end:values_end].view(torch.int16)
        work.append((segment, form, left[:num_places], values))
        left = left[values_end:]
    if left.numel() >= ALIGNMENT_BYTES:
        raise _malformed(f"{left.numel()} bytes after the last segment")
    if old.device.type == "cpu":
        _in_threads(_patch_gaps, [(segment, places, values) for segment, form, places, values in work if form == _GAPS])
        work = [part for part in work if part[1] != _GAPS]
    for part in work:
        _patch_segment(*part)


# ---- a segment -----------------------------------------------------------------------------------------------------


def _changes(now: torch.Tensor, before: torch.Tensor) -> Changes:
    """Return the changes of a segment, int16 `[n]` each."""
    # Most words are equal, so four are compared at once, and only groups with a change are looked into.
    groups = (now.view(torch.int64) != before.view(torch.int64)).nonzero().view(-1)
    num_bits, nothing = now.numel() // 8, now.new_empty(0, dtype=torch.uint8)
    if groups.numel() > num_bits // 2:  # many: then bits or all words may be the shortest
        differs = now != before
        num_values = int(differs.sum())
        if num_bits + _WORD_BYTES * num_values >= now.nbytes:
            return _WHOLE, nothing, now
        if num_values >= num_bits:  # gaps take a byte each, at least
            return _BITS, _bits(differs), now[differs]
    found = now.view(-1, _LANES).index_select(0, groups)
    differs = found != before.view(-1, _LANES).index_select(0, groups)
    places = (groups.unsqueeze(1) * _LANES + torch.arange(_LANES, device=now.device))[differs]
    gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
    ends = (gaps // _LONG + 1).cumsum(0)
    num_gaps = int(ends[-1]) if ends.numel() else 0
    if num_gaps > num_bits:
        return _BITS, _bits(now != before), found[differs]
    coded = now.new_full((num_gaps,), _LONG, dtype=torch.uint8)
    coded[ends - 1] = (gaps % _LONG).to(torch.uint8)
    return _GAPS, coded, found[differs]


def _few_changes(now: torch.Tensor, before: torch.Tensor) -> Changes | None:
    """Return what `_changes` does, on CPU; None if many words differ."""
    groups_now, groups_before = now.numpy().view(np.int64), before.numpy().view(np.int64)
    groups = np.flatnonzero(groups_now != groups_before)
    num_bits = now.numel() // 8
    if groups.size > num_bits // 2:
        return None
    found = groups_now[groups].view(np.int16)
    at = np.flatnonzero(found != groups_before[groups].view(np.int16))
    places = groups[at // _LANES] * _LANES + at % _LANES
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _LONG + 1)
    num_gaps = int(ends[-1]) if ends.size else 0
    if num_gaps > num_bits:
        return None
    # Made by torch: of an empty array of numpy's, torch would take the strides, and refuse to view it as bytes.
    coded = now.new_full((num_gaps,), _LONG, dtype=torch.uint8)
    coded.numpy()[ends - 1] = gaps % _LONG
    values = now.new_empty(at.size)
    np.take(found, at, out=values.numpy())
    return _GAPS, coded, values


def _patch_gaps(segment: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Does what `_patch_segment` does with gaps, on CPU."""
    gaps = places.numpy()
    ends_at_change = np.flatnonzero(gaps != _LONG)
    at = np.cumsum(gaps, dtype=np.int64)[ends_at_change] + np.arange(ends_at_change.size)
    _check_places(at.size, int(at[-1]) if at.size else -1, values, segment)
    segment.numpy()[at] = values.numpy()


def _patch_segment(segment: torch.Tensor, form: int, places: torch.Tensor, values: torch.Tensor) -> None:
    if form == _GAPS:
        at = _places_of_gaps(places)
        _check_places(at.numel(), int(at[-1]) if at.numel() else -1, values, segment)
        segment.index_copy_(0, at, values)
    elif form == _BITS and places.numel() * 8 == segment.numel():
        is_changed = _words_of(places)
        if int(is_changed.sum()) != values.numel():
            raise _malformed(f"{int(is_changed.sum())} places for {values.numel()} values")
        segment.masked_scatter_(is_changed, values)
    elif form == _WHOLE and values.numel() == segment.numel():
        segment.copy_(values)
    else:
        raise _malformed(f"form {form} with {values.numel()} values for {segment.numel()} words")


def _check_places(num_places: int, last: int, values: torch.Tensor, segment: torch.Tensor) -> None:
    # Places rise, so the last one is the largest.
    if num_places != values.numel() or last >= segment.numel():
        raise _malformed(f"{num_places} places for {values.numel()} values in {segment.numel()} words")


def _places_of_gaps(gaps: torch.Tensor) -> torch.Tensor:
    ends_at_change = gaps != _LONG
    return (gaps + ends_at_change.to(torch.int64)).cumsum(0)[ends_at_change] - 1


def _bits(is_changed: torch.Tensor) -> torch.Tensor:
    """Word i is bit i % 8 of byte i // 8. The product moves the lowest bits of eight bytes into its highest byte."""
    return (is_changed.view(torch.int64) * _GATHER >> 56).to(torch.uint8)


def _words_of(bits: torch.Tensor) -> torch.Tensor:
    """Invert `_bits`; returns bool `[8 x bytes]`. The product has the byte eight times, and one bit of each stays."""
    return (bits.to(torch.int64) * _SPREAD & _ONE_EACH).view(torch.uint8) != 0


def _in_threads(work: Callable[..., R], arguments: Sequence[tuple[T, ...]]) -> list[R]:
    """Return what `work` gives for each, in order. Raises the first error."""
    num_threads = min(torch.get_num_threads(), len(arguments))
    if num_threads <= 1:
        return [work(*one) for one in arguments]
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(lambda one: work(*one), arguments))


# ---- the bytes -----------------------------------------------------------------------------------------------------


def _segments(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of the words, int16 `[up to SEGMENT_WORDS]` each."""
    return iter(data.view(torch.int16).split(SEGMENT_WORDS)) if data.numel() else iter(())


def _table(changes: torch.Tensor, num_segments: int) -> tuple[list[list[int]], torch.Tensor]:
    """Return form, number of values and bytes of places for each segment; and the bytes after the table."""
    size = num_segments * _COLUMNS * 4
    if changes.numel() < size or changes.numel() % _WORD_BYTES:
        raise _malformed(f"{changes.numel()} bytes for a table of {size}")
    rows = changes[:size].clone().view(torch.int32).view(-1, _COLUMNS).tolist()
    return rows, changes[size:]


def _check_pair(new: torch.Tensor, old: torch.Tensor) -> None:
    assert new.dtype == old.dtype == torch.uint8, "buckets are bytes"
    assert new.shape == old.shape, "changes are between buckets of one plan"
    assert new.numel() % 16 == 0, "a bucket ends at a multiple of 16 bytes"


def _malformed(found: str) -> SyncError:
    return SyncError(
        "the changes of a bucket can't be applied",
        found=found,
        wanted="places and values for each segment of the bucket, as shared.sync.delta writes them",
        remedy="run the same version of this project on both sides",
    )
