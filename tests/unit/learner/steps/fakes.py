"""Small stand-ins for the pipeline's tests: samples, segments and a server that knows when it is misused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from learner.records import EncodedPrompt, PackedRow, Sample, Segment
from learner.steps.pipeline import CallSamples, ProducerStages, RolloutPipeline
from learner.steps.protocol import Bounds

DEADLINE_S = 10.0  # of waits that are expected to end


def sample(position: int) -> Sample:
    return Sample(sample_id=f"s{position}", messages=(), images=(), objects=(), width=8, height=8)


def segment(sample_id: str, ver: int | None) -> Segment:
    ids = np.zeros(4, dtype=np.int64)
    return Segment(
        sample_id=sample_id, input_ids=ids, labels=ids, loss_weights=ids.astype(np.float32), prompt_length=1, ver=ver
    )


def load(positions: Sequence[int]) -> tuple[list[Sample], list[EncodedPrompt]]:
    return [sample(p) for p in positions], [EncodedPrompt(token_ids=(1,), vision=None) for _ in positions]


def pack_by(size: int) -> Callable[[list[Segment]], list[PackedRow]]:
    """A packer of `size` segments per row."""
    return lambda segments: [
        PackedRow(segments=tuple(segments[i : i + size]), capacity=64) for i in range(0, len(segments), size)
    ]


class FakeServer:
    """Rollouts for any number of ranks. Refuses to move weights under a call, and notes every call that it served.

    `before(item)` runs in the middle of each call: to wait, to fail, to look around.
    """

    def __init__(self, ver: int = 1, before: Callable[[CallSamples], None] = lambda item: None) -> None:
        self.ver, self._before = ver, before
        self.calls: list[CallSamples] = []
        self._in_flight = 0
        self._lock = threading.Lock()

    def make_segments(self, item: CallSamples) -> list[Segment]:
        with self._lock:
            self._in_flight += 1
            self.calls.append(item)
            ver = self.ver
        try:
            self._before(item)
            return [segment(s.sample_id, ver) for s in item.samples]
        finally:
            with self._lock:
                self._in_flight -= 1

    def move_weights(self) -> int:
        with self._lock:
            assert self._in_flight == 0, "weights moved under a call in flight"
            self.ver += 1
            return self.ver


class Held:
    """A `before` that holds each call until it is released, then raises `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered, self.release, self._error = threading.Event(), threading.Event(), error

    def __call__(self, item: CallSamples) -> None:
        self.entered.set()
        assert self.release.wait(DEADLINE_S), "never released"
        if self._error is not None:
            raise self._error

    def until_entered(self) -> None:
        assert self.entered.wait(DEADLINE_S), "no call began"


def pipeline(server: FakeServer, bounds: Bounds | None = None, *, row_size: int = 1, **changes: Any) -> RolloutPipeline:
    settings: dict[str, Any] = {
        "ver": server.ver,
        "call_size": 1,
        "end": None,
        "deadline_key": "training.collective_timeout_s",
        "close_deadline_s": DEADLINE_S,
    }
    stages = ProducerStages(load=load, make_segments=server.make_segments, pack=pack_by(row_size))
    return RolloutPipeline(stages, bounds or Bounds.in_step(), **{**settings, **changes})


def ids(row: PackedRow) -> list[str]:
    return [s.sample_id for s in row.segments]
