"""Weight syncs as the server conducts them: one call is one update (R09, R10).

In: the bodies of `/init_communicator/`, `/update_weights/`, `/close_communicator/`. Out: replies, once the workers have
done and checked everything and the canary was scored. Invariants: one sync call runs at a time; a new learner's group
ends whatever the old one had under way; an update that fails, times out or loses its caller leaves the gate poisoned
and the group closed; no call into the workers lasts longer than a short slice, so the engine never waits for a peer.
Called by `app.py`.

One update's way through the engine: begin to receive, forget what was cached, load, score the canary.

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
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from rollout_server.config import ServerConfig
from rollout_server.engine import Engine, score
from rollout_server.gate import Turnstile
from shared.aio import gather
from shared.errors import CommunicatorError, ProjectError, SyncError
from shared.wire import (
    BUCKETS,
    CloseCommunicatorCall,
    InitCommunicatorCall,
    ScoreReply,
    UpdateWeightsCall,
    UpdateWeightsReply,
)

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


# The engine generates while a group is joined: workers only glance.
_JOIN_SLICE_S, _JOIN_PAUSE_S = 0.0, 0.02


@dataclass
class SyncTotals:
    """Since the server started, for `/metrics/`."""

    completed: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    last: UpdateWeightsReply | None = field(default=None)


class WeightSync:
    def __init__(self, engine: Engine, turnstile: Turnstile, config: ServerConfig) -> None:
        self.totals = SyncTotals()
        self._engine = engine
        self._turnstile = turnstile
        self._config = config
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Task[Any] | None = None

    async def open_group(self, call: InitCommunicatorCall) -> None:
        """Join the learner's group; returns when all have joined. Ends what another group had under way.

        Raises CommunicatorError or DeadlineError; no group is open then.
        """
        self._check_ranks(call)
        await self._break_off(f"incarnation {call.incarnation} opened a new group")
        async with self._alone():
            self._turnstile.gate.close_group()
            place = (self._config.group_host, call.group_port, call.first_rank, call.world_size)
            try:
                await self._engine.on_workers("sync_join", call.incarnation, call.backend, *place, call.timeout_s)
                while not all_done(await self._engine.on_workers("sync_poll_join", _JOIN_SLICE_S)):
                    await asyncio.sleep(_JOIN_PAUSE_S)
            except BaseException:
                await self._leave("the group could not be joined")
                raise
            self._turnstile.gate.open_group(call.incarnation)

    async def update(self, call: UpdateWeightsCall) -> UpdateWeightsReply:
        """Receive, check and serve new weights. Raises SyncError, CommunicatorError, DigestError, CoverageError or
        DeadlineError; the gate is poisoned then, unless it had refused the update to begin with."""
        self._turnstile.gate.check_update(call.incarnation, call.ver, call.mode)
        if call.mode == "adapter" and not self._config.enable_lora:
            raise SyncError(
                "this server takes no adapters",
                found="enable_lora: false",
                wanted="enable_lora: true in the server's configuration, or full syncs",
                remedy="set it and restart the server, or set sync.mode: full",
            )
        async with self._alone():
            start = time.monotonic()
            try:
                async with self._turnstile.update(call.incarnation, call.ver, call.mode):
                    drained = time.monotonic()
                    result, scores = await self._transfer(call)
            except BaseException:
                self.totals.failed += 1
                raise
            end = time.monotonic()
            reply = UpdateWeightsReply(
                ver=call.ver,
                num_bytes=sum(bucket.num_bytes for bucket in call.buckets),
                num_tensors=result["num_tensors"],
                seconds=end - start,
                drain_s=drained - start,
                transfer_s=end - drained,
                scores=scores,
            )
            self._count(reply)
            return reply

    async def close_group(self, call: CloseCommunicatorCall) -> None:
        """Leave the group, if it is this learner's; nothing otherwise, so that a late call does no harm."""
        if call.incarnation == self._turnstile.gate.incarnation:
            await self._break_off("the learner closed the group")
            async with self._alone():
                self._turnstile.gate.close_group()
                await self._leave("the learner closed the group")

    def _check_ranks(self, call: InitCommunicatorCall) -> None:
        num_workers = self._config.world_size
        if call.first_rank + num_workers > call.world_size - 1:  # the last rank is the learner's
            raise CommunicatorError(
                "the group has no ranks for all workers of this server",
                found=f"first rank {call.first_rank} of {call.world_size}, the last one the learner's",
                wanted=f"{num_workers} from the first rank on, before the learner's",
                remedy="let the learner ask /get_world_size/ anew: start it again",
            )

    async def _transfer(self, call: UpdateWeightsCall) -> tuple[dict[str, Any], ScoreReply]:
        try:
            return await update_weights(self._engine, call)
        except BaseException as error:
            # The other workers, and the learner, may still wait for each other.
            await self._leave(str(error) or type(error).__name__)
            raise

    async def _leave(self, because: str) -> None:
        with contextlib.suppress(ProjectError):  # a dead engine has left every group
            await asyncio.shield(self._engine.on_workers("sync_leave", because))

    @contextlib.asynccontextmanager
    async def _alone(self) -> Any:
        async with self._lock:
            self._under_way = asyncio.current_task()
            try:
                yield
            except asyncio.CancelledError as error:
                # Ended by another sync call, whose words explain it; or by the client's going, who hears nothing.
                because = str(error.args[0]) if error.args else "the learner went away"
                raise CommunicatorError("the sync was broken off", found=because, remedy="sync again") from error
            finally:
                self._under_way = None

    async def _break_off(self, because: str) -> None:
        if self._under_way is not None:
            self._under_way.cancel(because)

    def _count(self, reply: UpdateWeightsReply) -> None:
        self.totals.completed += 1
        self.totals.num_bytes += reply.num_bytes
        self.totals.seconds += reply.seconds
        self.totals.last = reply
