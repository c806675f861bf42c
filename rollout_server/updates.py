"""Weight updates on the server: each call of `/update_weights/` is one update (R09, R10).

In: the bodies of `/init_communicator/`, `/update_weights/`, `/expect_scores/` and `/close_communicator/`. Out: replies.
An update is answered after two checks: the workers have loaded and checked all weights, and the canary's scores
(log-probabilities of fixed answers) were compared with the learner's.

Invariants:
- one sync call runs at a time; a new learner's group ends the old learner's running call;
- a call lasts MOST_SYNC_S at most, whatever the learner asks for;
- if an update fails, times out or loses its caller, the gate is poisoned (calls are refused) and the group closed;
- nothing is served before the canary's scores were compared;
- no call into the workers lasts longer than `_SLICE_S`, so the engine never waits long for other members of the group;
- caches are empty, and nothing else runs, when the canary is scored;
- NaN that earlier weights left in the KV cache never reaches an answer of later weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_server.config import ServerConfig
from rollout_server.engine import Engine, WorkerReply, score
from rollout_server.gate import Outcome, WaitingGate
from shared.aio import gather, reason
from shared.canary import compare, shape_error
from shared.errors import (
    CommunicatorError,
    DeadlineError,
    NotFiniteError,
    ProjectError,
    RequestError,
    SyncError,
)
from shared.sync.buckets import WeightsDigest, num_bucket_bytes
from shared.waits import Deadline, time_limit
from shared.wire import (
    BUCKETS,
    Bucket,
    CloseCommunicatorCall,
    ExpectScoresCall,
    InitCommunicatorCall,
    ScoreReply,
    UpdateWeightsCall,
    UpdateWeightsReply,
)

SyncCall = TypeVar("SyncCall", InitCommunicatorCall, UpdateWeightsCall)
MOST_SYNC_S = 600.0
_SLICE_S = 0.25  # max seconds that a worker waits in one call during an update

# A worker is asked again and again whether it has joined the group. The numbers: seconds that one call waits, and
# seconds between two calls. The wait is 0, because a waiting call would stop the engine's generation.
_LOOK_S, _BETWEEN_LOOKS_S = 0.0, 0.02


@dataclass
class SyncTotals:
    """Counters and times of the syncs since the server started, for `/metrics/`."""

    completed: int = 0  # updates that were completed since the start
    failed: int = 0  # updates that failed since the start
    num_bytes: int = 0  # bytes received
    seconds: float = 0.0  # seconds of all completed updates together
    last_seconds: float = 0.0  # seconds of the last completed update
    pause_seconds: float = 0.0  # seconds in which no call was in flight and no call was let in
    last_pause_seconds: float = 0.0
    last_load_seconds: float = 0.0  # seconds from the start of the last pause until the workers had loaded the weights
    last_canary_seconds: float = 0.0  # seconds from the end of the last load until the canary was scored
    num_strangers: int = 0  # number of connections to the group's port from callers without its secret

    def count(self, reply: UpdateWeightsReply) -> UpdateWeightsReply:
        """Add a completed update, and return its reply."""
        self.completed += 1
        self.num_bytes += reply.num_bytes
        self.seconds += reply.seconds
        self.last_seconds = reply.seconds
        self.pause_seconds += reply.pause_s
        self.last_pause_seconds = reply.pause_s
        self.last_load_seconds, self.last_canary_seconds = reply.load_s, reply.canary_s
        return reply


class WeightUpdates:
    def __init__(self, engine: Engine, gate: WaitingGate, config: ServerConfig) -> None:
        self.totals = SyncTotals()
        self._engine = engine
        self._waiting_gate, self._gate = gate, gate.gate
        self._config = config
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Task[object] | None = None
        self._expected: ExpectScoresCall | None = None
        self._expected_came = asyncio.Event()
        self._digest = WeightsDigest(engine.weights)

    async def open_group(self, call: InitCommunicatorCall) -> None:
        """Join the learner's group; returns when all have joined. Ends a running sync call of another group.

        Raises CommunicatorError or DeadlineError; no group is open then.
        """
        self._check_ranks(call)
        call = self._bounded(call)
        # A call of a crashed learner may still run here, waiting for that learner. That call is ended here, because the
        # new learner must not wait for it.
        self._break_off(f"incarnation {call.incarnation} opened a new group")
        async with self._alone():
            self._gate.close_group()
            try:
                await self._engine.on_workers("sync_join", call.model_dump_json(), self._config.group_host)
                while not _all_done(await self._look_at_join()):
                    await asyncio.sleep(_BETWEEN_LOOKS_S)
            except BaseException:
                await self._leave("the group could not be joined")
                raise
            self._gate.open_group(call.incarnation)

    async def replace_weights(self, call: UpdateWeightsCall) -> UpdateWeightsReply:
        """Receive, check and serve new weights. Raises SyncError, CommunicatorError, DigestError, CoverageError,
        CanaryError or DeadlineError. After an error the gate is poisoned, unless the update was refused at once."""
        _check_verdict(call)
        _check_sizes(call.buckets)
        call = self._bounded(call)
        # The update is checked before the gate is taken, so that a refused update does not poison the server.
        self._check_allowed(call)
        async with self._alone():
            start = time.monotonic()
            # Weights that were not compared with the learner's may hold NaN. NaN stays in KV blocks, which answers of
            # later weights read.
            clear_cache = self._gate.state == "poisoned" or not self._gate.served.incarnation
            try:
                async with self._waiting_gate.exclusive(
                    call.incarnation, call.ver, call.mode, base_of_adapter=call.base_of_adapter
                ) as outcome:
                    drained = time.monotonic()
                    try:
                        loaded, scores, (loaded_at, scored_at) = await self._load(
                            call, outcome, clear_cache=clear_cache
                        )
                    except BaseException as error:
                        # The other workers and the learner may still wait for each other, so the group is left.
                        await self._leave(reason(error))
                        raise
            except BaseException:
                self.totals.failed += 1
                raise
            finally:
                self._expected = None
            end = time.monotonic()
        return self.totals.count(
            UpdateWeightsReply(
                ver=call.ver,
                num_bytes=sum(bucket.num_bytes for bucket in call.buckets),
                num_tensors=loaded.num_tensors,
                seconds=end - start,
                drain_s=drained - start,
                pause_s=end - drained,
                load_s=loaded_at - drained,
                canary_s=scored_at - loaded_at,
                scores=scores,
            )
        )

    async def _load(
        self, call: UpdateWeightsCall, outcome: Outcome, *, clear_cache: bool
    ) -> tuple[WorkerReply, ScoreReply, tuple[float, float]]:
        """Load the update, and check its canary. Returns a worker's reply, the canary's scores, and when the load and
        the scoring ended, by the monotonic clock. Raises the errors of `replace_weights`."""
        deadline = Deadline(call.timeout_s)
        loaded, scores, loaded_at = await load_and_score(self._engine, call, clear_cache=clear_cache)
        scored_at = time.monotonic()
        outcome.weights = self._digest.after(call.mode, loaded.weights)
        if not call.base_of_adapter:
            # The scores are compared inside the gate, so that no call is served before the result.
            check_canary(await self._expectation(call, deadline), scores)
        return loaded, scores, (loaded_at, scored_at)

    async def expect(self, call: ExpectScoresCall) -> None:
        """Note the scores that the learner expects for the canary's answers. Raises CommunicatorError if the group is
        not this learner's."""
        if call.incarnation != self._gate.incarnation:
            raise CommunicatorError(
                "the expected scores were refused",
                found=f"incarnation {call.incarnation!r}",
                wanted="the incarnation that opened the group",
                remedy="open the group again with this learner",
            ).as_status(409)
        self._expected = call
        self._expected_came.set()

    async def close_group(self, call: CloseCommunicatorCall) -> None:
        """Leave the group if it is this learner's. For another learner's group do nothing, so that a late call does no
        harm."""
        # A late call of an ended learner may arrive after the next learner has opened its group.
        if call.incarnation == self._gate.incarnation:
            self._break_off("the learner closed the group")
            async with self._alone():
                self._gate.close_group()
                await self._leave("the learner closed the group")

    async def _look_at_join(self) -> list[WorkerReply]:
        replies = await self._engine.on_workers("sync_poll_join", _LOOK_S)
        self.totals.num_strangers = sum(reply.num_strangers for reply in replies)
        return replies

    def _check_ranks(self, call: InitCommunicatorCall) -> None:
        num_workers = self._config.world_size
        # The last rank of the group is the learner's.
        if call.first_rank + num_workers > call.world_size - 1:
            raise CommunicatorError(
                "the group has no ranks for all workers of this server",
                found=f"first rank {call.first_rank} of {call.world_size}; the last rank is the learner's",
                wanted=f"{num_workers} ranks between the first one and the learner's",
                remedy="let the learner ask /get_world_size/ again: restart it",
            ).as_status(400)

    def _check_allowed(self, call: UpdateWeightsCall) -> None:
        """Raises SyncError if this learner may not send these weights now."""
        self._gate.check_update(call.incarnation, call.ver, call.mode)
        if call.mode == "adapter" and not self._config.enable_lora:
            raise SyncError(
                "this server takes no adapters",
                found="enable_lora: false",
                wanted="enable_lora: true in the server's configuration, or full syncs",
                remedy="set it and restart the server, or set sync.mode: full",
            ).as_status(409)

    def _bounded(self, call: SyncCall) -> SyncCall:
        return call.model_copy(update={"timeout_s": min(call.timeout_s, MOST_SYNC_S)})

    async def _expectation(self, call: UpdateWeightsCall, deadline: Deadline) -> ExpectScoresCall:
        update = (call.incarnation, call.ver)
        try:
            async with time_limit(deadline.left_s()):
                while (expected := self._expected) is None or (expected.incarnation, expected.ver) != update:
                    self._expected_came.clear()
                    await self._expected_came.wait()
        except TimeoutError:
            raise DeadlineError(
                "the learner did not say in time what the canary must score",
                found=f"no /expect_scores/ for version {call.ver} within {call.timeout_s:g} s",
                wanted="the learner's own log-probabilities, to compare the served model with",
                remedy="see the learner's log, or raise its sync timeout",
            ) from None
        return expected

    async def _leave(self, because: str) -> None:
        # The engine's call is shielded: the workers must leave the group even if the update is cancelled again.
        with contextlib.suppress(ProjectError):  # a dead engine has left every group
            await asyncio.shield(self._engine.on_workers("sync_leave", because))

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._lock:
            self._under_way = asyncio.current_task()
            try:
                yield
            except asyncio.CancelledError as error:
                # Either another sync call ended this call, and gave the reason, or the client has hung up.
                raise CommunicatorError("the sync was broken off", found=reason(error), remedy="sync again") from error
            finally:
                self._under_way = None

    def _break_off(self, because: str) -> None:
        if self._under_way is not None:
            self._under_way.cancel(because)


async def load_and_score(
    engine: Engine, call: UpdateWeightsCall, *, clear_cache: bool = False
) -> tuple[WorkerReply, ScoreReply, float]:
    """Receive and load the weights, and score the canary (fixed answers). Returns a worker's last reply, the canary's
    scores, and the time at which the load ended (monotonic clock).

    The caller must be inside the gate, and leaves the group if this function raises. Raises the errors of the workers,
    the media rules and the engine.

    Caches are reset right after the receiving has begun. If the model can run while weights are loaded, the canary's
    requests are queued before the load ends.

    Weights that are not finite leave NaN in the KV cache. NaN in the cache spoils answers of later weights, because
    attention also reads cache entries to which it gives weight 0. So if a canary's scores are not finite, the cache is
    cleared, and the scores are computed once more. With `clear_cache`, the cache is cleared before the canary is
    scored, which takes as long as writing all of the cache.
    """
    # The adapter gets a new name each time, because vLLM finds cached prefixes by the adapter's name.
    engine.serve_adapter(f"policy-{call.ver}" if call.mode == "adapter" else None)
    rest = call.model_copy(update={"buckets": [], "canary": []})
    # The engine runs calls in order, so each is sent before the previous one has answered. Waiting for each answer left
    # the network idle for 4 ms of a sync (4B, two H200).
    begin: list[Coroutine[object, None, list[WorkerReply] | None]] = [
        engine.on_workers("sync_start", rest.model_dump_json(), BUCKETS.dump_json(call.buckets).decode()),
        engine.reset_caches(),
        *([engine.on_workers("sync_clear_cache")] if clear_cache else []),
    ]
    started, *_ = await gather(begin)
    assert started is not None, "workers answer"
    # The canary's requests are queued right after the load, so that they share one forward pass. If the load takes
    # longer than `_SLICE_S`, the canary is scored with partly loaded weights, and must be scored again.
    if all(reply.runs_meanwhile for reply in started) and (quick := await _score_behind(engine, call)) is not None:
        return quick
    while not _all_done(replies := await engine.on_workers("sync_poll", _SLICE_S)):
        pass
    loaded_at = time.monotonic()
    # If `_score_behind` tried to score the canary, the prefix cache may have blocks computed with partly loaded
    # weights.
    await engine.reset_caches()
    return replies[0], await _score(engine, call), loaded_at


async def _score(engine: Engine, call: UpdateWeightsCall) -> ScoreReply:
    """Return the canary's scores. Raises NotFiniteError if the scores are not finite even with a cleared cache."""
    async with engine.together(call.canary):
        try:
            return await score(engine, call.canary, call.ver, through_cache=True)
        except NotFiniteError:
            await gather([engine.on_workers("sync_clear_cache"), engine.reset_caches()])
            return await score(engine, call.canary, call.ver, through_cache=True)


async def _score_behind(engine: Engine, call: UpdateWeightsCall) -> tuple[WorkerReply, ScoreReply, float] | None:
    """Score the canary right after a load that is still running. Return what `load_and_score` returns; None: the load
    takes longer than `_SLICE_S`."""
    tasks: list[asyncio.Future[Any]] = []
    try:
        tasks.append(loading := asyncio.create_task(engine.on_workers("sync_poll", _SLICE_S)))
        # The engine runs calls in the order in which they come: this line lets the load be sent before the canary's
        # requests.
        await asyncio.sleep(0)
        tasks.append(scoring := asyncio.create_task(_score(engine, call)))
        replies, loaded_at = await loading, time.monotonic()
        return (replies[0], await scoring, loaded_at) if _all_done(replies) else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_verdict(call: UpdateWeightsCall) -> None:
    """Raises RequestError if an update has no canary (items to score, for comparing with the learner), or if an update
    of an adapter's base weights has one."""
    found = wanted = ""
    if call.base_of_adapter and (call.mode != "full" or call.canary):
        found, wanted = f"mode {call.mode} and {len(call.canary)} canary items", "mode full and no canary"
    elif not call.canary and not call.base_of_adapter:
        found, wanted = "canary: no items", "at least one, to compare with the learner's scores"
    if found:
        remedy = "send a canary with every update but that of the weights below an adapter"
        raise RequestError("this update cannot be judged", found=found, wanted=wanted, remedy=remedy)


def _check_sizes(buckets: Sequence[Bucket]) -> None:
    """Raises SyncError if a bucket's `num_bytes` differs from the size of its tensors."""
    for i, bucket in enumerate(buckets):
        wanted = num_bucket_bytes(bucket.tensors)
        if bucket.num_bytes != wanted:
            raise SyncError(
                f"bucket {i} does not have the size of its tensors",
                found=f"{bucket.num_bytes} bytes",
                wanted=f"{wanted} bytes for {len(bucket.tensors)} tensors",
                remedy="run the same version of this project on both sides",
            ).as_status(400)


def check_canary(expected: ExpectScoresCall, scores: ScoreReply) -> None:
    """Raises CanaryError if a gap is above the tolerance, SyncError if the scores' shapes differ."""
    if wrong := shape_error(expected.logprobs, scores):
        raise SyncError(
            "the expected scores do not fit the canary",
            found=wrong,
            wanted="one log-probability per token of each answer",
            remedy="run the same version of this project on both sides",
        )
    compare(
        expected.logprobs,
        scores,
        tolerance=expected.tolerance,
        what=f"with the weights of version {expected.ver} the served model is not the learner's",
        name_of=lambda i: f"item {i}",
    )


def _all_done(replies: list[WorkerReply]) -> bool:
    return all(reply.done for reply in replies)
