"""All rollout servers of a run as the sync sees them: in groups by machine, and one update sent to all (R09).

In: weights, by a `WeightSource`. Out: all servers serve them and have checked them, or the first cause of a failure,
with the server named. Invariants: complete means that every server has checked bytes and coverage; after `leave`, or a
failed `connect`, there is no group. A bucket is packed and sealed while those before it travel. Called by
`weight_sync.py`, on rank 0.

Before the first sync: do the servers have the learner's model, and read its prompts alike? (R03, R16)

In: the servers' status and one sample as the learner encodes it. Out: nothing, or the first mismatch with the server
named, on every rank. A first sync would find most of it too, but after it has overwritten the server's weights. Called
by `build`, and in parts by the sync and the doctor.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Literal

import torch

from learner.config.schema import VllmConfig
from learner.data.prompt import check_prompt_prefix
from learner.policy.canary_scores import CanaryScores
from learner.policy.parallel import Ranks
from learner.rollout.client import REPLY_GRACE_S
from learner.rollout.servers import ServerBackend
from learner.sync.canary import CanaryGap, CanaryItem, Scorer, compare, score_items
from learner.sync.groups import (
    Futures,
    ServerGroup,
    ServerLink,
    StartJoin,
    await_all,
    cancel,
    of_one_machine,
    open_groups,
)
from learner.sync.source import WeightSource, check_specs, sealed_buckets
from shared.checkpoint import differences
from shared.errors import ProjectError, PromptMismatchError, ServerMismatchError, SyncError
from shared.sync.buckets import DTYPES, num_bucket_bytes, plan_buckets
from shared.wire import Bucket, ScoreCall, ScoreReply, ServerStatus, UpdateWeightsCall, UpdateWeightsReply

Mode = Literal["full", "adapter"]


AHEAD = 2  # buckets under way beside the one that is sent: fewer, and the wire waits; more, and memory is spent
log = logging.getLogger("learner.sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """An update that every server has confirmed, and what both sides say of the canary."""

    buckets: Sequence[Bucket]
    learner: CanaryScores | None  # None: no canary was sent
    scores: dict[str, ScoreReply]  # by the server's URL

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_tensors(self) -> int:
        return sum(len(bucket.tensors) for bucket in self.buckets)


class Fleet:
    """`device` is where the weights are."""

    def __init__(self, backend: ServerBackend, config: VllmConfig, device: torch.device, start_join: StartJoin) -> None:
        self.statuses: dict[str, ServerStatus] = {}  # by URL, when it was joined
        self._backend, self._config, self._device, self._start_join = backend, config, device, start_join
        self._groups: tuple[ServerGroup, ...] = ()  # empty: not connected
        self._incarnation = ""
        self._dtype: torch.dtype | None = None
        self._plans: dict[WeightSource, list[Bucket]] = {}  # the same in every update

    @property
    def connected(self) -> bool:
        return bool(self._groups)

    def connect(self) -> int:
        """Join the groups of all servers; the highest version that one of them has seen.

        Raises CommunicatorError, DeadlineError or the server's own error.
        """
        backend = self._backend
        self.statuses = {
            client.base_url: status for client, status in zip(backend.clients, backend.statuses(), strict=True)
        }
        dtypes = {status.dtype for status in self.statuses.values()}
        self._dtype = DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
        self._plans.clear()
        self._incarnation = uuid.uuid4().hex
        groups = self._make_groups()
        open_groups(groups, self._incarnation)
        self._groups = tuple(groups)
        log.info("joined %s, weights travel in %s", [group.name for group in groups], self._dtype or "their own type")
        return max(status.ver for status in self.statuses.values())

    def send(
        self,
        source: WeightSource,
        *,
        mode: Mode,
        ver: int,
        canary: Sequence[CanaryItem] = (),
        scorer: Scorer | None = None,
    ) -> Sent:
        """Done when all servers serve the weights as version `ver` and have scored the canary. `scorer` is called while
        they load."""
        call = UpdateWeightsCall(
            incarnation=self._incarnation,
            ver=ver,
            mode=mode,
            buckets=self._plan(source),
            canary=score_items(canary),
            timeout_s=self._config.server.timeout_s,
        )
        posts = {link: link.post_update(call) for group in self._groups for link in group.links}
        try:
            learner = self._broadcast(source, call, posts, scorer)
            await_all(posts, posts)
        except BaseException:
            cancel(posts)
            raise
        for link, post in posts.items():
            _check_reply(call, post.result(), link.base_url)
        scores = {link.base_url: post.result().scores for link, post in posts.items()}
        return Sent(buckets=call.buckets, learner=learner, scores=scores)

    def check_canary(self, items: Sequence[CanaryItem], sent: Sent) -> CanaryGap:
        """The worst gap over servers. Raises CanaryError."""
        assert sent.learner is not None, "an update without a canary has nothing to compare"
        tolerance = self._config.sync.canary_tolerance
        gaps = [
            compare(items, sent.learner.logprobs, reply, tolerance=tolerance, base_url=base_url)
            for base_url, reply in sent.scores.items()
        ]
        return CanaryGap(mean=max(gap.mean for gap in gaps), max=max(gap.max for gap in gaps))

    def leave(self, *, abort: bool) -> None:
        """Leave every group; bounded in time. A server that no longer answers is only logged."""
        groups, self._groups = self._groups, ()
        for group in groups:
            group.leave(abort=abort)
        goodbyes = {link: link.post_close(self._incarnation) for group in groups for link in group.links}
        wait(goodbyes.values(), timeout=REPLY_GRACE_S)
        for link, goodbye in goodbyes.items():
            if not goodbye.done() or goodbye.exception() is not None:
                log.warning("%s did not hear that the learner left: %s", link.base_url, goodbye)
            goodbye.cancel()

    def _make_groups(self) -> list[ServerGroup]:
        backend = self._backend
        links = [
            ServerLink(client, loop=backend.loop, group_port=entry.group_port, world_size=world_size)
            for client, entry, world_size in zip(backend.clients, backend.servers, backend.world_sizes, strict=True)
        ]
        timeout_s = self._config.server.timeout_s
        return [
            ServerGroup(members, device=self._device, timeout_s=timeout_s, start_join=self._start_join)
            for members in of_one_machine(links, list(self.statuses.values()))
        ]

    def _plan(self, source: WeightSource) -> list[Bucket]:
        """Raises SyncError where the source's tensors can't be sent."""
        if source not in self._plans:
            specs = source.weight_specs(self._dtype)
            check_specs(specs)
            self._plans[source] = [
                Bucket(tensors=part, num_bytes=num_bucket_bytes(part))
                for part in plan_buckets(specs, self._config.sync.bucket_bytes)
            ]
        return self._plans[source]

    def _broadcast(
        self, source: WeightSource, call: UpdateWeightsCall, posts: Futures, scorer: Scorer | None
    ) -> CanaryScores | None:
        """Every bucket to every server; the learner's own canary answers, made while the last buckets travel."""
        plan = [bucket.tensors for bucket in call.buckets]
        under_way: deque[Futures] = deque()
        for buffer in sealed_buckets(source, plan, ver=call.ver, dtype=self._dtype, device=self._device):
            if len(under_way) > AHEAD:
                await_all(under_way.popleft(), posts, may_reply=False)
            sending = [(group, group.broadcast(buffer)) for group in self._groups]
            under_way.append({link: sent for group, sent in sending for link in group.links})
        learner = scorer(self._dtype, merged=call.mode == "full") if scorer else None
        for sent in under_way:
            await_all(sent, posts)
        return learner


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


def check_servers(backend: ServerBackend, *, architecture: Mapping[str, str], canary: CanaryItem, ranks: Ranks) -> None:
    """Ask every server, on rank 0; collective. Raises ServerMismatchError, PromptMismatchError, MediaError."""
    failure: ProjectError | None = None
    if ranks.is_main:
        try:
            _ask_all(backend, architecture, canary)
        except ProjectError as error:  # raised below, on every rank
            failure = error
    (failure, *_) = ranks.all_gather_object(failure)
    if failure is not None:
        raise failure


def check_architecture(base_url: str, status: ServerStatus, architecture: Mapping[str, str]) -> None:
    """Raises ServerMismatchError where a size of the model differs."""
    found = differences(architecture, status.architecture)
    if found:
        raise ServerMismatchError(
            f"{base_url}: the server's model has other tensors than the learner's",
            found=f"{'; '.join(found[:5])} ({status.model})",
            wanted="the architecture of model.path",
            remedy="start the server with the model that the learner starts from",
        )


def check_adapter(base_url: str, status: ServerStatus, *, rank: int) -> None:
    """Raises ServerMismatchError where the server does not take adapters of this rank (R08)."""
    if status.max_lora_rank < rank:
        raise ServerMismatchError(
            f"{base_url}: the server does not take the adapter",
            found=f"max_lora_rank: {status.max_lora_rank}" if status.max_lora_rank else "enable_lora: false",
            wanted=f"adapters of rank {rank}",
            remedy="set enable_lora and max_lora_rank in the server's configuration and start it anew, or set "
            "sync.mode: full",
        )


def check_prompt(base_url: str, item: CanaryItem, reply: ScoreReply) -> None:
    """Raises PromptMismatchError, with the server named, where its prompt token ids are not the learner's."""
    try:
        check_prompt_prefix(item.prompt.token_ids, reply.prompt_token_ids[0], item.sample.sample_id)
    except PromptMismatchError as error:
        what = f"{base_url}: {error.what}"
        raise PromptMismatchError(what, found=error.found, wanted=error.wanted, remedy=error.remedy) from error


def _ask_all(backend: ServerBackend, architecture: Mapping[str, str], canary: CanaryItem) -> None:
    for client, status in zip(backend.clients, backend.statuses(), strict=True):
        check_architecture(client.base_url, status, architecture)
        if status.gate == "poisoned":
            continue  # it scores nothing before the first sync, whose own check then covers the prompt
        reply = backend.loop.run(client.score(ScoreCall(items=score_items([canary]))))
        check_prompt(client.base_url, canary, reply)
