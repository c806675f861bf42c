"""Delivery to rollout servers: one update sent to all of them, and what is asked of them before the first one.

In: weights, by a `WeightSource`. Out: all servers serve them and have checked them, or the first cause of a failure,
with the server named. Invariants (R09, R24, D1): only rank 0 talks to servers, and all ranks do `barrier -> update ->
barrier`; complete means that every server has checked bytes and coverage, and that its canary gap is within the
tolerance. The server judges that too, by the learner's scores, and serves nothing before. A bucket is gathered, packed
and sealed while the buckets before it travel, and the learner scores the canary while the last ones do. The weights
below an adapter are an update of their own version, which also heals a poisoned server.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from learner.config.schema import VllmConfig
from learner.data.prompt import check_prompt_prefix
from learner.policy.canary_scores import CanaryScores
from learner.policy.weights import Checksums, checksum
from learner.rollout.client import REPLY_GRACE_S
from learner.rollout.servers import ServerBackend
from learner.sync.canary import Canary, CanaryItem, score_items, worst_gap
from learner.sync.groups import Posts, Sent, ServerGroups, ServerLink, StartJoin, await_all, cancel, named, open_groups
from learner.sync.source import AdapterSource, SyncRanks, WeightSource, sealed_buckets
from learner.sync.sync import Delivered, Mode
from shared.checkpoint import differences
from shared.errors import ProjectError, PromptMismatchError, ServerMismatchError, SyncError
from shared.sync.buckets import DTYPES, SEAL_BYTES, num_bucket_bytes, plan_buckets
from shared.sync.group import start_join
from shared.wire import Bucket, ScoreCall, ScoreReply, ServerStatus, UpdateWeightsCall, UpdateWeightsReply

T = TypeVar("T")
SENT_AHEAD = 2  # buckets under way beside the one that is sent: fewer, and the wire waits; more, and memory is spent
log = logging.getLogger("learner.sync")


NO_SCORES = CanaryScores(logprobs=[], merge_gap=0.0)


class ServerDelivery:
    """`canary` is used on rank 0 only; `device` is where the weights are."""

    def __init__(
        self,
        backend: ServerBackend,
        config: VllmConfig,
        *,
        canary: Canary,
        ranks: SyncRanks,
        device: torch.device,
        start_join: StartJoin = start_join,
    ) -> None:
        self._backend, self._config, self._canary, self._ranks = backend, config, canary, ranks
        self._device, self._start_join = device, start_join
        self._groups = ServerGroups((), "")
        self._statuses: dict[str, ServerStatus] = {}  # by URL, when they were joined
        self._dtype: torch.dtype | None = None  # in which weights travel; None: as trained
        self._plans: dict[WeightSource, list[Bucket]] = {}  # the same in every update

    def together(self, work: Callable[[], T]) -> T:
        return on_rank_0(self._ranks, work)

    def connect(self) -> int:
        """Join the groups of all servers. Raises CommunicatorError, DeadlineError or the server's own error."""
        backend = self._backend
        statuses = backend.statuses()
        links = [
            ServerLink(client, backend.loop, entry.group_port, world_size)
            for client, entry, world_size in zip(backend.clients, backend.servers, backend.world_sizes, strict=True)
        ]
        self._statuses = {link.base_url: status for link, status in zip(links, statuses, strict=True)}
        dtypes = {status.dtype for status in statuses}
        self._dtype = DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
        self._plans.clear()
        timeout_s = self._config.server.timeout_s
        self._groups = open_groups(
            links, statuses, device=self._device, timeout_s=timeout_s, start_join=self._start_join
        )
        names = [group.name for group in self._groups.groups]
        log.info("joined %s, weights travel in %s", names, self._dtype or "their own type")
        return max(status.ver for status in statuses)

    def check_adapter(self, adapter: AdapterSource) -> None:
        for base_url, status in self._statuses.items():
            check_adapter(base_url, status, rank=adapter.rank)

    def updating(self, modes: Sequence[Mode]) -> AbstractContextManager[None]:
        return nullcontext()

    def deliver_base(self, source: WeightSource, ver: int) -> int:
        self._update(source, "full", ver + 1, items=())
        return ver + 1

    def deliver(self, source: WeightSource, mode: Mode, ver: int) -> Delivered:
        canary = self._canary
        replies, learner = self._update(source, mode, ver, items=canary.items)
        reply = next(iter(replies.values()))
        return Delivered(
            mode=mode,
            num_bytes=reply.num_bytes,
            num_tensors=reply.num_tensors,
            gap=worst_gap(
                [canary.compare(learner.logprobs, reply.scores, base_url) for base_url, reply in replies.items()]
            ),
            merge_gap=learner.merge_gap,
        )

    def accept(self, ver: int) -> None:
        self._backend.expected_ver = ver

    def leave(self, *, abort: bool) -> None:
        groups, self._groups = self._groups, ServerGroups((), "")
        goodbyes = groups.leave(abort=abort)
        wait([goodbye for _, goodbye in goodbyes], timeout=REPLY_GRACE_S)
        for link, goodbye in goodbyes:
            if not goodbye.done() or goodbye.exception() is not None:
                log.warning("%s did not hear that the learner left: %s", link.base_url, goodbye)
            goodbye.cancel()

    def _update(
        self, source: WeightSource, mode: Mode, ver: int, *, items: Sequence[CanaryItem]
    ) -> tuple[dict[str, UpdateWeightsReply], CanaryScores]:
        """Replies by URL, once all servers serve the weights as version `ver` and have scored `items`, and the
        learner's own scores."""
        call = UpdateWeightsCall(
            incarnation=self._groups.incarnation,
            ver=ver,
            mode=mode,
            buckets=self._plan(source),
            canary=score_items(items),
            base_of_adapter=not items,
            timeout_s=self._config.server.timeout_s,
        )
        posts = [(link, link.post(link.client.update_weights(call))) for link in self._groups.links]
        told: Posts = []
        try:
            under_way, sums = self._send(source, call, posts)
            learner = NO_SCORES
            if items:  # scored while the last buckets travel
                learner = self._canary.scorer(self._dtype, mode == "full")
                check_sent(call.buckets, sums, learner.checksums)
                expected = self._canary.expected(call.incarnation, ver, learner.logprobs)
                told = [(link, link.post(link.client.expect_scores(expected))) for link in self._groups.links]
            await_all(under_way, [*posts, *told])
        except BaseException:
            cancel([*posts, *told])
            raise
        replies = {link.base_url: post.result() for link, post in posts}
        for base_url, reply in replies.items():
            _check_reply(call, reply, base_url)
        return replies, learner

    def _send(self, source: WeightSource, call: UpdateWeightsCall, posts: Posts) -> tuple[Sent, list[torch.Tensor]]:
        """Give every bucket to every group; the buckets that are still under way, and every bucket's checksum."""
        plan = [bucket.tensors for bucket in call.buckets]
        under_way: deque[Sent] = deque()
        sums = []
        for bucket in sealed_buckets(source, plan, ver=call.ver, dtype=self._dtype, device=self._device):
            if len(under_way) > SENT_AHEAD:
                await_all(under_way.popleft(), posts, replies=False)
            under_way.append(self._groups.broadcast(bucket))
            sums.append(checksum(bucket[:-SEAL_BYTES]))
        return [part for sent in under_way for part in sent], sums

    def _plan(self, source: WeightSource) -> list[Bucket]:
        if source not in self._plans:
            parts = plan_buckets(source.weight_specs(self._dtype), self._config.sync.bucket_bytes)
            self._plans[source] = [Bucket(tensors=part, num_bytes=num_bucket_bytes(part)) for part in parts]
        return self._plans[source]


def on_rank_0(ranks: SyncRanks, work: Callable[[], T]) -> T:
    """`work()`, run by rank 0 alone; its result, or its ProjectError, on every rank."""
    ranks.barrier()
    outcome: tuple[T | None, ProjectError | None] = (None, None)
    if ranks.is_main:
        try:
            outcome = (work(), None)
        except ProjectError as error:  # raised below, on every rank
            outcome = (None, error)
    result, failure = ranks.broadcast_object(outcome)
    ranks.barrier()
    if failure is not None:
        raise outcome[1] or failure  # rank 0's own has its traceback
    return result


def check_sent(buckets: Sequence[Bucket], sums: Sequence[torch.Tensor], scored: Checksums) -> None:
    """Are the weights that were sent those that the canary was scored with, bit for bit?

    A stale tensor can change log-probabilities less than kernels do, so the canary alone cannot find it. `sums`: what
    was sent, per bucket. `scored`: per tensor; a bucket with a tensor that is not in it is not compared. Raises
    SyncError.
    """
    known = [(i, bucket) for i, bucket in enumerate(buckets) if all(t.name in scored for t in bucket.tensors)]
    if not known:
        return
    wanted = torch.stack([torch.stack([scored[t.name] for t in bucket.tensors]).sum() for _, bucket in known])
    found = torch.stack([sums[i] for i, _ in known])
    wrong = [known[i] for i in torch.nonzero(wanted.to(found.device) != found).flatten().tolist()]
    if wrong:
        index, bucket = wrong[0]
        names = [tensor.name for tensor in bucket.tensors]
        raise SyncError(
            "the weights that were sent are not the policy's",
            found=f"{len(wrong)} of {len(buckets)} buckets differ; first bucket {index}: {names[0]} to {names[-1]}",
            wanted="in every bucket, bit for bit, the weights that the learner scored the canary with",
            remedy="something changed weights while they were sent, or sent old ones: is the policy used by another "
            "thread? If not, this is a defect of the weight source; the servers serve nothing until the next sync",
        )


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


# ---- before the first sync -------------------------------------------------------------------------------------------


def check_servers(
    backend: ServerBackend, *, architecture: Mapping[str, str], canary: CanaryItem, ranks: SyncRanks
) -> None:
    """Do the servers have the learner's model, and read its prompts alike (R03, R16)? A first sync would find most of
    it too, but after it has overwritten the servers' weights. Rank 0 asks every server; collective.

    Raises ServerMismatchError, PromptMismatchError or MediaError, with the server named.
    """

    def ask_all() -> None:
        for client, status in zip(backend.clients, backend.statuses(), strict=True):
            check_architecture(client.base_url, status, architecture)
            if status.gate == "poisoned":
                continue  # it scores nothing before the first sync, whose own check then covers the prompt
            reply = backend.loop.run(client.score(ScoreCall(items=score_items([canary]))))
            check_prompt(client.base_url, canary, reply)

    on_rank_0(ranks, ask_all)


def check_architecture(base_url: str, status: ServerStatus, architecture: Mapping[str, str]) -> None:
    """Raises ServerMismatchError if a size of the model differs."""
    found = differences(architecture, status.architecture)
    if found:
        raise ServerMismatchError(
            f"{base_url}: the server's model has other tensors than the learner's",
            found=f"{'; '.join(found[:5])} ({status.model})",
            wanted="the architecture of model.path",
            remedy="start the server with the model that the learner starts from",
        )


def check_adapter(base_url: str, status: ServerStatus, *, rank: int) -> None:
    """Raises ServerMismatchError if the server does not take adapters of this rank (R08)."""
    if status.max_lora_rank < rank:
        raise ServerMismatchError(
            f"{base_url}: the server does not take the adapter",
            found=f"max_lora_rank: {status.max_lora_rank}" if status.max_lora_rank else "enable_lora: false",
            wanted=f"adapters of rank {rank}",
            remedy="set enable_lora and max_lora_rank in the server's configuration and restart it, or set "
            "sync.mode: full",
        )


def check_prompt(base_url: str, item: CanaryItem, reply: ScoreReply) -> None:
    """Raises PromptMismatchError, with the server named, if its prompt token ids are not the learner's."""
    try:
        check_prompt_prefix(item.prompt.token_ids, reply.prompt_token_ids[0], item.sample.sample_id)
    except PromptMismatchError as error:
        raise named(error, base_url) from error
