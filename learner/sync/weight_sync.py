"""Full weight sync from the learner to every rollout server, in memory and checked (R09, R10, R24; D1).

In: the policy's weights. Out: a `SyncReceipt` on every rank. Invariants:
- only rank 0 talks to servers; all ranks do `barrier -> sync -> barrier`, and all learn rank 0's outcome, good or bad;
- `ver` rises by one with a completed sync and never otherwise; the backend accepts rollouts of that version only;
- complete means: every server has checked bytes and coverage, and its canary gap is within the tolerance;
- after a failed sync the first cause is raised with the server named, every group is aborted, and the next `sync` opens
  new ones under a new incarnation.
A bucket is packed and sealed while those before it travel. Called by the trainer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch

from learner.config.schema import VllmConfig
from learner.records import SyncReceipt
from learner.rollout.client import REPLY_GRACE_S
from learner.rollout.server import ServerBackend
from learner.sync.canary import CanaryGap, CanaryItem, compare, score_items
from learner.sync.link import Group, Join, ServerLink
from learner.sync.source import WeightSource, check_specs, sealed_buckets
from learner.sync.waiting import Futures, await_all, cancel
from shared import communicator
from shared.errors import ConfigError, ProjectError, SyncError
from shared.weights import DTYPES, num_bucket_bytes, plan_buckets
from shared.wire import Bucket, UpdateWeightsCall, UpdateWeightsReply

T = TypeVar("T")
log = logging.getLogger("learner.sync")

Logprobs = Callable[[], Sequence[Sequence[float]]]
AHEAD = 2  # buckets under way beside the one that is sent: fewer, and the wire waits; more, and memory is spent


class Fence(Protocol):
    """What the ranks agree through; `learner.policy.parallel.Ranks` is one."""

    @property
    def is_main(self) -> bool: ...

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any) -> Any: ...


class WeightSync:
    """`canary` and `learner_logprobs` (of the canary's answers, as the learner has them now) are used on rank 0 only;
    `device` is where the policy's weights are."""

    def __init__(
        self,
        backend: ServerBackend,
        weights: WeightSource,
        *,
        config: VllmConfig,
        canary: Sequence[CanaryItem],
        learner_logprobs: Logprobs,
        fence: Fence,
        device: torch.device,
        join: Join = communicator.join,
    ) -> None:
        _require_full(config)
        assert canary or not fence.is_main, "a sync without a canary is not checked"
        self.ver = 0
        self.receipts: list[SyncReceipt] = []
        self._backend, self._weights, self._config = backend, weights, config
        self._canary, self._learner_logprobs = tuple(canary), learner_logprobs
        self._fence, self._device, self._join = fence, device, join
        self._links: tuple[ServerLink, ...] = ()  # empty: not connected
        self._incarnation = ""
        self._dtype: torch.dtype | None = None
        self._buckets: list[Bucket] = []

    def connect(self) -> None:
        """Join a group with every server; on all ranks, after the backend's `connect`. `sync` does it where needed.

        Raises CommunicatorError, DeadlineError or the server's own error.
        """
        self.ver = self._on_main(self._connect)

    def sync(self) -> SyncReceipt:
        """Bring every server to the policy's weights; on all ranks, which all return when all servers serve them.

        Raises SyncError (Communicator, Digest, Coverage, Canary), ServerError, DeadlineError: rank 0's, on every rank.
        """
        receipt = self._on_main(self._sync)
        self.ver = self._backend.expected_ver = receipt.ver
        self.receipts.append(receipt)
        return receipt

    def close(self) -> None:
        """Leave the groups; bounded in time. A server that no longer answers is only logged."""
        self._leave(abort=False)

    def _on_main(self, work: Callable[[], T]) -> T:
        self._fence.barrier()
        outcome: T | ProjectError | None = None
        if self._fence.is_main:
            try:
                outcome = work()
            except ProjectError as error:  # raised below, on every rank
                outcome = error
        shared = self._fence.broadcast_object(outcome)
        self._fence.barrier()
        if isinstance(outcome, ProjectError):
            raise outcome  # with its traceback
        if isinstance(shared, ProjectError):
            raise shared
        return shared

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _connect(self) -> int:
        """The version to count from: above all that the servers have seen, so that no old rollout passes for new."""
        statuses = self._backend.statuses()
        dtypes = {status.dtype for status in statuses}
        self._dtype = DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
        specs = self._weights.weight_specs(self._dtype)
        check_specs(specs)
        self._buckets = [
            Bucket(tensors=part, num_bytes=num_bucket_bytes(part))
            for part in plan_buckets(specs, self._config.sync.bucket_bytes)
        ]
        self._incarnation = uuid.uuid4().hex
        links = self._make_links()
        posts = {link: link.post_init(self._incarnation) for link in links}
        joins = {link: link.join() for link in links}
        try:
            await_all(joins, posts)
            await_all(posts, {})
        except BaseException:
            for future in joins.values():
                future.add_done_callback(_abort_late)
            cancel(posts)
            raise
        for link in links:
            link.adopt(joins[link].result())
        self._links = tuple(links)
        log.info("joined %d servers, sync mode full, weights travel in %s", len(links), self._dtype or "their own type")
        return max(self.ver, *(status.ver for status in statuses))

    def _make_links(self) -> list[ServerLink]:
        backend = self._backend
        return [
            ServerLink(
                client,
                loop=backend.loop,
                group_port=entry.group_port,
                world_size=world_size,
                device=self._device,
                timeout_s=self._config.server.timeout_s,
                join=self._join,
            )
            for client, entry, world_size in zip(backend.clients, backend.servers, backend.world_sizes, strict=True)
        ]

    def _sync(self) -> SyncReceipt:
        if not self._links:
            self.ver = self._connect()
        begin = time.monotonic()
        try:
            gap = self._send()
        except BaseException:
            self._leave(abort=True)
            raise
        receipt = SyncReceipt(
            ver=self.ver + 1,
            mode="full",
            seconds=time.monotonic() - begin,
            num_bytes=sum(bucket.num_bytes for bucket in self._buckets),
            num_tensors=sum(len(bucket.tensors) for bucket in self._buckets),
            canary_gap=gap.mean,
            canary_gap_max=gap.max,
        )
        log.info("weights synced: %s", receipt)
        return receipt

    def _send(self) -> CanaryGap:
        """Done when all servers serve the weights; how far their canary's answers are from the learner's at most."""
        call = UpdateWeightsCall(
            incarnation=self._incarnation,
            ver=self.ver + 1,
            buckets=self._buckets,
            canary=score_items(self._canary),
            timeout_s=self._config.server.timeout_s,
        )
        posts = {link: link.post_update(call) for link in self._links}
        try:
            learner = self._broadcast(call.ver, posts)
            await_all(posts, {})
        except BaseException:
            cancel(posts)
            raise
        for link, post in posts.items():
            _check_reply(call, post.result(), link.base_url)
        return self._check_canary(learner, {link: post.result() for link, post in posts.items()})

    def _broadcast(self, ver: int, posts: Futures) -> Sequence[Sequence[float]]:
        """Every bucket to every server; the learner's own canary answers, made while the last buckets travel."""
        plan = [bucket.tensors for bucket in self._buckets]
        under_way: deque[Futures] = deque()
        for buffer in sealed_buckets(self._weights, plan, ver=ver, dtype=self._dtype, device=self._device):
            if len(under_way) > AHEAD:
                await_all(under_way.popleft(), posts, may_reply=False)
            under_way.append({link: link.broadcast(buffer) for link in self._links})
        learner = self._learner_logprobs()
        for sent in under_way:
            await_all(sent, posts)
        return learner

    def _leave(self, *, abort: bool) -> None:
        links, self._links = self._links, ()
        for link in links:
            link.leave(abort=abort)
        goodbyes = {link: link.post_close(self._incarnation) for link in links}
        wait(goodbyes.values(), timeout=REPLY_GRACE_S)
        for link, goodbye in goodbyes.items():
            if not goodbye.done() or goodbye.exception() is not None:
                log.warning("%s did not hear that the learner left: %s", link.base_url, goodbye)
            goodbye.cancel()

    def _check_canary(
        self, learner: Sequence[Sequence[float]], replies: Mapping[ServerLink, UpdateWeightsReply]
    ) -> CanaryGap:
        """The worst gap over servers; `learner` holds this side's log-probabilities."""
        gaps = [
            compare(
                self._canary,
                learner,
                reply.scores,
                tolerance=self._config.sync.canary_tolerance,
                base_url=link.base_url,
            )
            for link, reply in replies.items()
        ]
        return CanaryGap(mean=max(gap.mean for gap in gaps), max=max(gap.max for gap in gaps))


def _check_reply(call: UpdateWeightsCall, reply: UpdateWeightsReply, base_url: str) -> None:
    wanted = (call.ver, sum(b.num_bytes for b in call.buckets), sum(len(b.tensors) for b in call.buckets))
    found = (reply.ver, reply.num_bytes, reply.num_tensors)
    if found != wanted:
        raise SyncError(
            f"{base_url}: the server confirmed another update than the one that was sent",
            found=f"(ver, bytes, tensors) {found}",
            wanted=str(wanted),
            remedy="run the same version of this project on both sides",
        )


def _abort_late(joined: Future[Group]) -> None:
    if joined.exception() is None:
        joined.result().abort()


def _require_full(config: VllmConfig) -> None:
    if config.sync.mode == "adapter" or (config.sync.mode == "auto" and config.enable_lora):
        raise ConfigError(
            "custom.extra.rollout_matching.vllm.sync.mode: adapters can't be synced to a rollout server",
            found=f"mode {config.sync.mode!r}, enable_lora {config.enable_lora}",
            wanted="full (merged weights)",
            remedy="set sync.mode: full",
        )
