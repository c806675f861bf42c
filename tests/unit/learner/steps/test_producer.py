"""R12, R25: one call's samples, segments and rows add up, or the call fails with a word on what did not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from learner.config.schema import AsyncActorLearnerConfig
from learner.records import PackedRow, Segment
from learner.steps.pipeline import CallSamples, ProducerStages, make_rows
from learner.steps.protocol import Bounds, Call
from shared.errors import ConfigError, RolloutError
from tests.unit.learner.steps.fakes import load, pack_by, segment

CALL = Call(index=4, positions=(7, 2, 9), ver=5)


def segments_of(item: CallSamples) -> list[Segment]:
    return [segment(s.sample_id, 5) for s in item.samples]


def reversed_pairs(segments: list[Segment]) -> list[PackedRow]:
    return pack_by(2)(segments[::-1])


def test_rows_know_their_stream_positions() -> None:
    """Also where the packer reorders, and where two positions hold the same sample."""
    made = make_rows(CALL, ProducerStages(load=load, make_segments=segments_of, pack=reversed_pairs))
    assert [row.positions for row in made] == [(9, 2), (7,)]
    same = ProducerStages(load=lambda p: load([0] * len(p)), make_segments=segments_of, pack=reversed_pairs)
    assert [row.positions for row in make_rows(CALL, same)] == [(9, 2), (7,)]


@pytest.mark.parametrize(
    ("make_segments", "words"),
    [
        (lambda item: segments_of(item)[:-1], "are not those of its samples"),
        (lambda item: segments_of(item)[::-1], "are not those of its samples"),
        (lambda item: [*segments_of(item)[:-1], segment("s9", 6)], r"other weights.*\[5, 6\].*ver 5 throughout"),
        (lambda item: [segment(s.sample_id, 6) for s in item.samples], "other weights"),
        (lambda item: [segment(s.sample_id, None) for s in item.samples], "other weights"),
    ],
    ids=["missing", "reordered", "two versions", "another version", "no version"],
)
def test_segments_that_do_not_answer_the_call(
    make_segments: Callable[[CallSamples], list[Segment]], words: str
) -> None:
    """R25: version-pure and of the permitted version; R12: no sample skipped."""
    with pytest.raises(RolloutError, match=words):
        make_rows(CALL, ProducerStages(load=load, make_segments=make_segments, pack=pack_by(2)))


@pytest.mark.parametrize(
    "pack",
    [
        lambda segments: pack_by(2)(segments[1:]),
        lambda segments: pack_by(2)([*segments, segments[0]]),
        lambda segments: pack_by(2)([*segments[:-1], segments[0]]),
        lambda segments: [*pack_by(2)(segments), PackedRow(segments=(), capacity=64)],
    ],
    ids=["lost", "doubled", "swapped", "empty row"],
)
def test_a_packer_that_changes_the_segments(pack: Callable[[list[Segment]], list[PackedRow]]) -> None:
    """R12, R36: every segment in exactly one row."""
    with pytest.raises(RolloutError, match="packing changed the segments"):
        make_rows(CALL, ProducerStages(load=load, make_segments=segments_of, pack=pack))


def test_bounds_of_the_configuration() -> None:
    """R25, R27: the defaults, a step that takes more than the prefetch target, and a prefetch target beyond the queue,
    which would produce only to drop."""
    bounds = Bounds.run_ahead(AsyncActorLearnerConfig(), packs_per_step=1)
    assert (bounds.start_below, bounds.keep_at_most, bounds.version_window) == (4, 8, 1)
    assert Bounds.run_ahead(AsyncActorLearnerConfig(), packs_per_step=6).start_below == 6
    with pytest.raises(ConfigError, match=r"prefetch_target_packs exceeds queue_limit.*queue_limit 3"):
        Bounds.run_ahead(AsyncActorLearnerConfig(queue_limit=3), packs_per_step=1)
