"""Small stand-ins for the tests of steps: a segment, and a producer over a server that notices when it is misused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from learner.data.batches import MicroBatch
from learner.records import EncodedPrompt, Sample, Segment
from learner.steps.producer import CallStages, Producer
from learner.steps.shares import Bounds, Call, ServedVersion, ShareQueue

DEADLINE_S = 60.0  # limit of waits that are expected to end


def segment(sample_id: str, ver: int | None) -> Segment:
    ids = np.zeros(4, dtype=np.int64)
    return Segment(
        sample_id=sample_id, input_ids=ids, labels=ids, loss_weights=ids.astype(np.float32), prompt_length=1, ver=ver
    )


def read(share: int, places: range) -> MicroBatch:
    """Sample `share.place`."""
    samples = [Sample(sample_id=f"{share}.{i}", messages=(), images=(), objects=(), width=8, height=8) for i in places]
    prompts = [EncodedPrompt(token_ids=(1,), vision=None) for _ in places]
    return MicroBatch(
        samples=tuple(samples),
        prompts=tuple(prompts),
        epoch=0,
        micro_batch=share,
        first_req_idx=places.start,
        ends_epoch=False,
    )


class FakeServer:
    """Rollouts for one rank. It refuses to move weights under a call, and notes every call that it served.

    `before(call)` runs in the middle of each call: to wait, to fail, to look around.
    """

    def __init__(self, before: Callable[[Call], None] = lambda call: None) -> None:
        self.ver, self._before = 1, before
        self.calls: list[Call] = []
        self._in_flight = 0

    def roll_out(self, call: Call, part: MicroBatch) -> list[Segment]:
        self.calls.append(call)
        ver = self.ver
        self._in_flight += 1
        try:
            self._before(call)
            return [segment(sample.sample_id, ver) for sample in part.samples]
        finally:
            self._in_flight -= 1

    def move_weights(self) -> int:
        assert self._in_flight == 0, "weights moved under a call in flight"
        self.ver += 1
        return self.ver


class Held:
    """A `before` that holds each call until it is released, then raises `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered, self.release, self._error = threading.Event(), threading.Event(), error

    def __call__(self, call: Call) -> None:
        self.entered.set()
        assert self.release.wait(DEADLINE_S), "never released"
        if self._error is not None:
            raise self._error

    def until_entered(self) -> None:
        assert self.entered.wait(DEADLINE_S), "no call began"


def producer(server: FakeServer, *, share_size: int = 3, call_size: int = 3, **changes: Any) -> Producer:
    """Packs of one sample, two shares of them wanted."""
    bounds = Bounds(start_below=2 * share_size, keep_at_most=2 * share_size, version_window=1)
    queue = ShareQueue(
        bounds,
        served=ServedVersion(ver=server.ver, updates=0),
        size=lambda share: share_size,
        samples_per_pack=1,
        call_size=call_size,
    )
    stages = CallStages(read=read, roll_out=server.roll_out)
    made = Producer(
        queue, stages, **{"deadline_key": "training.collective_timeout_s", "close_s": DEADLINE_S, **changes}
    )
    made.want([0, 1])
    return made
