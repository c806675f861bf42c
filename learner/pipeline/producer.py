"""The producing side of the pipeline: one generation call after another, each turned into packed rows.

In: permitted calls (positions of this rank's sample stream, and the served version). Out: rows that hold exactly those
samples, each once, all made by that version; anything else is a RolloutError. Invariant: the producer never waits. It
works while it is permitted to and then leaves its thread; whoever makes room (a pack taken, a fence opened) starts it
again. Called by `queue.py`, in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from learner.pipeline.protocol import Call
from learner.records import EncodedPrompt, PackedRow, Sample, Segment
from shared.errors import RolloutError


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """What one call rolls out. `call.positions[i]` is the stream position of `samples[i]`."""

    call: Call
    samples: tuple[Sample, ...]
    prompts: tuple[EncodedPrompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the trainer lends to the producer. All three run in the producer's thread, never two at once.

    `load(positions)` reads samples and prompts of the rank's own stream, one each per position, in order, the same at
    every reading: a position comes back when its pack was dropped, and after a resume. `make_segments(item)` rolls out,
    parses, matches and encodes: one segment per sample, in order. `pack(segments)` lays all of them in rows.
    """

    load: Callable[[Sequence[int]], tuple[Sequence[Sample], Sequence[EncodedPrompt]]]
    make_segments: Callable[[WorkItem], list[Segment]]
    pack: Callable[[list[Segment]], list[PackedRow]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MadeRow:
    """A packed row and the stream positions of its segments, in the row's order."""

    row: PackedRow
    positions: tuple[int, ...]


class CallPort(Protocol):
    """What the producer needs of the pipeline; every call ends in exactly one of the last two."""

    def begin_call(self) -> Call | None:
        """A permission, or None: leave, you will be started again."""
        ...

    def finish_call(self, rows: Sequence[MadeRow]) -> None: ...

    def fail_call(self, error: BaseException) -> None: ...


def produce(port: CallPort, work: Work) -> None:
    """Make calls while they are permitted. The body of the producer's thread; whatever is raised goes to the port."""
    while (call := port.begin_call()) is not None:
        try:
            rows = make_rows(call, work)
        except BaseException as error:  # the thread's edge: the consumer raises it, with its type
            port.fail_call(error)
        else:
            port.finish_call(rows)


def make_rows(call: Call, work: Work) -> list[MadeRow]:
    """One call from stream positions to packed rows. Raises RolloutError where samples or versions do not add up."""
    samples, prompts = work.load(call.positions)
    item = WorkItem(call=call, samples=tuple(samples), prompts=tuple(prompts))
    segments = work.make_segments(item)
    check_segments(item, segments)
    rows = work.pack(segments)
    positions = dict(zip(segments, call.positions, strict=True))  # segments compare by identity
    laid = [segment for row in rows for segment in row.segments]
    if len(laid) != len(segments) or set(laid) != set(segments) or not all(row.segments for row in rows):
        raise RolloutError(
            "packing changed the segments of a call",
            found=f"{len(laid)} segments in {len(rows)} rows, made of {len(segments)}",
            wanted="every segment in exactly one row, and no empty row",
            remedy="this is a bug of the packer",
        )
    return [MadeRow(row=row, positions=tuple(positions[s] for s in row.segments)) for row in rows]


def check_segments(item: WorkItem, segments: Sequence[Segment]) -> None:
    """One segment per sample, in order, all of the version that the call was permitted under; else RolloutError."""
    wanted_ids = [sample.sample_id for sample in item.samples]
    found_ids = [segment.sample_id for segment in segments]
    if found_ids != wanted_ids or len(wanted_ids) != len(item.call.positions):
        raise RolloutError(
            "a call's segments are not those of its samples",
            found=f"{found_ids} for {len(item.call.positions)} stream positions",
            wanted=f"{wanted_ids}",
            remedy="no sample may be skipped; this is a bug of the segment source",
        )
    versions = {segment.ver for segment in segments}
    if versions != {item.call.ver}:
        raise RolloutError(
            "a call was answered by other weights than it was sent to",
            found=f"ver {sorted(versions, key=str)} for samples {', '.join(found_ids)}",
            wanted=f"ver {item.call.ver} throughout, because no sync may run while a call is in flight",
            remedy="is another learner syncing the same servers? every learner needs servers of its own",
        )
