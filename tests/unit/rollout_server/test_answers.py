"""Exactly once: a repeated uuid gets the same rollout, whenever it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout_server.service import RecentAnswers, _fingerprint
from shared.errors import RequestError
from shared.wire import ContentPart, Message, RequestConfig, RolloutInferRequest
from tests.waits import let_others_run


class Maker:
    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def make(self) -> int:
        self.started += 1
        mine = self.started
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return mine


def run(call: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(call, 10))


def test_repeats_share_one_computation_before_and_after_it_ends() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        both = [asyncio.create_task(answers.get("u", "same", maker.make)) for _ in range(2)]
        await let_others_run()
        maker.go.set()
        assert await asyncio.gather(*both) == [1, 1]
        assert await answers.get("u", "same", maker.make) == 1
        assert await answers.get("v", "same", maker.make) == 2

    run(check())


def test_a_uuid_used_for_something_else_is_refused() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        maker.go.set()
        await answers.get("u", "one", maker.make)
        with pytest.raises(RequestError, match="'u' was used for another request"):
            await answers.get("u", "other", maker.make)
        assert maker.started == 1

    run(check())


def test_failures_are_not_kept() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        maker.go.set()

        async def fail() -> int:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await answers.get("u", "same", fail)
        assert await answers.get("u", "same", maker.make) == 1

    run(check())


def test_only_the_last_to_go_cancels_and_a_retry_starts_anew() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        first, second = (asyncio.create_task(answers.get("u", "same", maker.make)) for _ in range(2))
        await let_others_run()
        first.cancel()
        await let_others_run()
        assert (maker.started, maker.cancelled) == (1, 0)
        second.cancel()
        await let_others_run()
        assert (maker.started, maker.cancelled) == (1, 1)
        maker.go.set()
        assert await answers.get("u", "same", maker.make) == 2

    run(check())


def test_the_least_recently_used_is_forgotten_first() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](2), Maker()
        maker.go.set()
        for uuid in ("a", "b", "a", "c"):
            await answers.get(uuid, "same", maker.make)
        assert await answers.get("a", "same", maker.make) == 1
        assert await answers.get("b", "same", maker.make) == 4

    run(check())


def test_a_fingerprint_is_of_all_that_decides_an_answer() -> None:
    messages = [Message(role="user", content="a")]
    base = RolloutInferRequest(messages=messages, uuid="u", images=["ab", "c"])
    others = [
        base.model_copy(update=update)
        for update in (
            {"images": ["a", "bc"]},
            {"images": ["abc"]},
            {"messages": [*messages, *messages]},
            {"messages": [Message(role="user", content=[ContentPart(type="text", text="a")])]},
            {"chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"a": True}},
            {"chat_template_kwargs": {"a": "1"}},
        )
    ]
    configs = [RequestConfig(), RequestConfig(temperature=0.5), RequestConfig(n=2)]
    found = [_fingerprint(request, configs[0], 1) for request in (base, *others)]
    found += [_fingerprint(base, config, seed) for config in configs for seed in (None, 2)]
    assert len({*found}) == len(found)
    assert _fingerprint(base.model_copy(update={"data_dict": {"a": 1}}), configs[0], 1) == found[0]
