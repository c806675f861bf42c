"""An update's way through the engine (R09, R10): in which order, and whose scores count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollout_server.engine import Scores, WorkerReply, score
from rollout_server.updates import check_canary, load_and_score
from shared.errors import CanaryError, DigestError, SyncError
from shared.wire import ExpectScoresCall, RolloutInferRequest, ScoreItem, UpdateWeightsCall
from tests.unit.rollout_server.fakes import FakeEngine

REQUEST = RolloutInferRequest(messages=[{"role": "user", "content": "canary"}])  # type: ignore[list-item]
CALL = UpdateWeightsCall(
    incarnation="a", ver=3, buckets=[], canary=[ScoreItem(request=REQUEST, response_token_ids=[1])], timeout_s=5.0
)


class Engine(FakeEngine):
    """Done after `num_slices` polls; a score tells how many polls had begun when it was asked for."""

    def __init__(self, *, runs_meanwhile: bool, num_slices: int) -> None:
        super().__init__()
        self.log: list[str] = []
        self._left = num_slices
        self.replies = {
            "sync_start": lambda: WorkerReply(done=False, runs_meanwhile=runs_meanwhile),
            "sync_poll": self._poll,
        }

    def _poll(self) -> WorkerReply:
        self._left -= 1
        return WorkerReply(done=self._left == 0)

    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
        self.log.append(method)
        return await super().on_workers(method, *args)

    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores:
        self.log.append("score")
        await asyncio.sleep(0.01)
        return Scores(prompt_token_ids=[1], logprobs=[-float(len(self.log))])

    async def reset_caches(self) -> None:
        self.log.append("reset")


WANTED = [
    (True, 1, ["sync_start", "reset", "sync_poll", "score"]),
    (True, 2, ["sync_start", "reset", "sync_poll", "score", "sync_poll", "reset", "score"]),
    (False, 2, ["sync_start", "reset", "sync_poll", "sync_poll", "reset", "score"]),
]


@pytest.mark.parametrize(("runs_meanwhile", "num_slices", "log"), WANTED)
def test_the_scores_are_those_after_the_load(runs_meanwhile: bool, num_slices: int, log: list[str]) -> None:
    engine = Engine(runs_meanwhile=runs_meanwhile, num_slices=num_slices)
    _, scores, _ = asyncio.run(load_and_score(engine, CALL))
    assert engine.log == log
    assert (scores.ver, scores.logprobs) == (3, [[-float(len(log))]])
    assert engine.held == [1] * log.count("score")


def test_caches_that_cannot_be_reset_end_the_update() -> None:
    class Busy(Engine):
        async def reset_caches(self) -> None:
            raise SyncError("the prefix cache cannot be reset")

    engine = Busy(runs_meanwhile=True, num_slices=1)

    async def run() -> int:
        with pytest.raises(SyncError, match="cannot be reset"):
            await load_and_score(engine, CALL)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert "score" not in engine.log


@pytest.mark.parametrize("turns", range(1, 8))
def test_an_update_that_is_broken_off_leaves_no_call_under_way(turns: int) -> None:
    """R10: otherwise it could reach the workers after they have left the group."""

    class Slow(Engine):
        async def reset_caches(self) -> None:
            await asyncio.sleep(60.0)

        async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
            await asyncio.sleep(60.0)
            return await super().on_workers(method, *args)

    async def run() -> int:
        update = asyncio.create_task(load_and_score(Slow(runs_meanwhile=True, num_slices=1), CALL))
        for _ in range(turns):
            await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_the_canary_reads_the_prefix_cache_and_other_calls_do_not() -> None:
    """vLLM scores without it, and rollouts use it."""
    asked: list[bool] = []

    class Asked(Engine):
        async def score(self, request: Any, response_token_ids: list[int], *, through_cache: bool = False) -> Scores:
            asked.append(through_cache)
            scores = await super().score(request, response_token_ids)
            return replace(scores, cached_logprobs=[-9.0] if through_cache else [])

    engine = Asked(runs_meanwhile=True, num_slices=1)
    _, scores, _ = asyncio.run(load_and_score(engine, CALL))
    assert scores.cached_logprobs == [[-9.0]]
    assert asyncio.run(score(engine, CALL.canary, 3)).cached_logprobs == []
    assert asked == [True, False]
    expected = ExpectScoresCall(incarnation="a", ver=3, logprobs=scores.logprobs, tolerance=1.0)
    with pytest.raises(CanaryError, match="prefix cache"):
        check_canary(expected, scores)


def test_a_load_that_fails_takes_the_canary_with_it() -> None:
    engine = Engine(runs_meanwhile=True, num_slices=1)

    def fail() -> WorkerReply:
        raise DigestError("other bytes")

    engine.replies["sync_poll"] = fail

    async def run() -> int:
        with pytest.raises(DigestError):
            await load_and_score(engine, CALL)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_caches_are_emptied_while_the_receiving_begins() -> None:
    """The engine does one after the other; whoever asks need not wait in between."""
    emptied = asyncio.Event()

    class Slow(Engine):
        async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
            if method == "sync_start":
                await asyncio.wait_for(emptied.wait(), 5.0)
            return await super().on_workers(method, *args)

        async def reset_caches(self) -> None:
            emptied.set()
            await super().reset_caches()

    engine = Slow(runs_meanwhile=True, num_slices=1)
    asyncio.run(load_and_score(engine, CALL))
    assert engine.log == ["reset", "sync_start", "sync_poll", "score"]
