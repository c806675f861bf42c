"""One update's way through the engine: begin to receive, forget what was cached, load, score the canary.

In: the update's call. Out: what the workers loaded, and the canary's scores under the new weights. Invariants: no call
into the workers lasts longer than a slice; caches are empty, and nothing else runs, when the scores are made. Called by
`sync.py`, which holds the gate, and leaves the group where this raises.

The engine does one thing after the other, so what comes next is asked for before it has answered: caches are emptied
right after the receiving has begun, and where weights are loaded in place the canary's requests lie ready, and share
one forward pass, when the load is done. Where it was not done within the first slice, those answers are of some weights
in between: they are thrown away and made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollout_server.engine import Engine
from rollout_server.gathering import gather
from rollout_server.scoring import score
from shared.wire import BUCKETS, ScoreReply, UpdateWeightsCall

SLICE_S = 0.25  # nothing else runs during an update: workers may wait


async def update_weights(engine: Engine, call: UpdateWeightsCall) -> tuple[dict[str, Any], ScoreReply]:
    """Raises what the workers, the media rules and the engine raise."""
    rest = call.model_copy(update={"buckets": [], "canary": []})
    engine.serve_adapter(f"policy-{call.ver}" if call.mode == "adapter" else None)
    calls: list[Coroutine[Any, Any, Any]] = [
        engine.on_workers("sync_start", rest.model_dump_json(), BUCKETS.dump_json(call.buckets).decode()),
        engine.reset_caches(),
    ]
    started, _ = await gather(calls)
    if all(reply["runs_meanwhile"] for reply in started):
        result, scores = await _load_and_score(engine, call)
        if result is not None and scores is not None:
            return result, scores
    while not all_done(replies := await engine.on_workers("sync_poll", SLICE_S)):
        pass
    await engine.reset_caches()
    return replies[0], await score(engine, call.canary, call.ver)


async def _load_and_score(engine: Engine, call: UpdateWeightsCall) -> tuple[dict[str, Any] | None, ScoreReply | None]:
    """Both, or neither where loading takes longer than a slice."""
    loading = asyncio.create_task(engine.on_workers("sync_poll", SLICE_S))
    await asyncio.sleep(0)  # the load is the engine's next, the canary the one after
    scoring = asyncio.create_task(score(engine, call.canary, call.ver))
    try:
        replies = await loading
        return (replies[0], await scoring) if all_done(replies) else (None, None)
    finally:
        loading.cancel()
        scoring.cancel()
        await asyncio.gather(loading, scoring, return_exceptions=True)


def all_done(replies: list[dict[str, Any]]) -> bool:
    return all(reply["done"] for reply in replies)
