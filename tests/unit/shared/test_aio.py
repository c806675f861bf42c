"""`gather`: order, the first error, and nothing left running."""

from __future__ import annotations

import asyncio

import pytest

from shared.aio import gather


def test_results_come_in_order() -> None:
    async def after(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert asyncio.run(gather(after(s) for s in (0.02, 0.0, 0.01))) == [0.02, 0.0, 0.01]


def test_an_error_comes_once_the_others_have_ended() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("wait")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine") from KeyError("its cause")

    with pytest.raises(ValueError, match="mine") as caught:
        asyncio.run(gather([wait(), fail(), wait()]))
    assert ended == ["wait", "wait"]
    assert isinstance(caught.value.__cause__, KeyError)
