"""All rollout servers of a run as the sync sees them: one group with each, and one update sent to all (R09).

In: weights, by a `WeightSource`. Out: all servers serve them and have checked them, or the first cause of a failure,
with the server named. Invariants: complete means that every server has checked bytes and coverage; after `leave`, or a
failed `connect`, there is no group. Buckets are packed twice, first for the digests and then to be sent: the first pass
costs the servers no pause, and no more than one bucket is in memory. Called by `weight_sync.py`, on rank 0.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Literal, TypeVar

import torch

from learner.config.schema import VllmConfig
from learner.rollout.client import REPLY_GRACE_S
from learner.rollout.server import ServerBackend
from learner.sync.canary import CanaryGap, CanaryItem, compare, score_call
from learner.sync.link import Group, Join, ServerLink
from learner.sync.source import WeightSource, check_specs, packed_buckets
from learner.sync.waiting import await_all, cancel
from shared.errors import SyncError
from shared.weights import DTYPES, plan_buckets, seal
from shared.wire import Bucket, ServerStatus, TensorSpec, UpdateWeightsCall, UpdateWeightsReply

T = TypeVar("T")
Mode = Literal["full", "adapter"]
log = logging.getLogger("learner.sync")


class Fleet:
    """`device` is where the weights are."""

    def __init__(self, backend: ServerBackend, config: VllmConfig, device: torch.device, join: Join) -> None:
        self.statuses: dict[str, ServerStatus] = {}  # by URL, when it was joined
        self._backend, self._config, self._device, self._join = backend, config, device, join
        self._links: tuple[ServerLink, ...] = ()  # empty: not connected
        self._incarnation = ""
        self._dtype: torch.dtype | None = None

    @property
    def connected(self) -> bool:
        return bool(self._links)

    def connect(self) -> int:
        """Join a group with every server; the highest version that one of them has seen.

        Raises CommunicatorError, DeadlineError or the server's own error.
        """
        backend = self._backend
        self.statuses = {
            client.base_url: status for client, status in zip(backend.clients, backend.statuses(), strict=True)
        }
        dtypes = {status.dtype for status in self.statuses.values()}
        self._dtype = DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
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
        log.info("joined %d servers, weights travel in %s", len(links), self._dtype or "their own type")
        return max(status.ver for status in self.statuses.values())

    def send(self, source: WeightSource, *, mode: Mode, ver: int, meanwhile: Callable[[], T]) -> tuple[list[Bucket], T]:
        """Done when all servers serve the weights as version `ver`: what was sent, and the result of `meanwhile`, which
        is called while they load."""
        specs = source.weight_specs(self._dtype)
        check_specs(specs)
        plan = plan_buckets(specs, self._config.sync.bucket_bytes)
        buckets = [seal(specs, buffer) for specs, buffer in zip(plan, self._packed(source, plan), strict=True)]
        call = UpdateWeightsCall(
            incarnation=self._incarnation,
            ver=ver,
            mode=mode,
            buckets=buckets,
            timeout_s=self._config.server.timeout_s,
        )
        return buckets, self._broadcast(source, call, meanwhile)

    def check_canary(self, items: Sequence[CanaryItem], learner: Sequence[Sequence[float]]) -> CanaryGap:
        """The worst gap over servers; `learner` holds this side's log-probabilities. Raises CanaryError."""
        call = score_call(items)
        replies = {link: self._backend.loop.submit(link.client.score(call)) for link in self._links}
        await_all(replies, {})
        gaps = [
            compare(
                items,
                learner,
                replies[link].result(),
                tolerance=self._config.sync.canary_tolerance,
                base_url=link.base_url,
            )
            for link in self._links
        ]
        return CanaryGap(mean=max(gap.mean for gap in gaps), max=max(gap.max for gap in gaps))

    def leave(self, *, abort: bool) -> None:
        """Leave every group; bounded in time. A server that no longer answers is only logged."""
        links, self._links = self._links, ()
        for link in links:
            link.leave(abort=abort)
        goodbyes = {link: link.post_close(self._incarnation) for link in links}
        wait(goodbyes.values(), timeout=REPLY_GRACE_S)
        for link, goodbye in goodbyes.items():
            if not goodbye.done() or goodbye.exception() is not None:
                log.warning("%s did not hear that the learner left: %s", link.base_url, goodbye)
            goodbye.cancel()

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

    def _packed(self, source: WeightSource, plan: Sequence[Sequence[TensorSpec]]) -> Iterator[torch.Tensor]:
        return packed_buckets(source, plan, dtype=self._dtype, device=self._device)

    def _broadcast(self, source: WeightSource, call: UpdateWeightsCall, meanwhile: Callable[[], T]) -> T:
        posts = {link: link.post_update(call) for link in self._links}
        try:
            for i, buffer in enumerate(self._packed(source, [bucket.tensors for bucket in call.buckets]), start=1):
                sent = {link: link.broadcast(buffer) for link in self._links}
                await_all(sent, posts, may_reply=i == len(call.buckets))
            result = meanwhile()
            await_all(posts, {})
        except BaseException:
            cancel(posts)
            raise
        for link, post in posts.items():
            _check_reply(call, post.result(), link.base_url)
        return result


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
