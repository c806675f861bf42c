"""Sends each weight update to all rollout servers, through the groups that `broadcast_groups.py` opens.

In: weights, by a `WeightSource`. Out: all servers have checked and serve the weights, or the first cause of a failure
is raised, with the server named. Invariants (R09, R24, D1): only rank 0 talks to servers, and all ranks do `barrier ->
update -> barrier`. An update is complete when each server has passed two checks: all tensors came with the right bytes,
and the server's log-probabilities of fixed answers (the canary) are close to the learner's. The server compares the
log-probabilities too, and serves nothing before that. The learner scores the canary and packs the first buckets before
the update begins, so no server waits for them. Later buckets are gathered, packed and sealed while earlier ones are
sent. The base weights, to which an adapter is applied, are sent as an update of their own, with its own version. The
update with the base weights also brings back a server that serves nothing after a failed update (poisoned).

`members.py` knows which servers take part (D15, R40). A server that failed is left out of the next try. If no single
server caused the failure, the sync is repeated once. While too few servers answer, the silent servers are asked again
until `timeout_s` is over.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeVar

import torch

from learner.config.sections.vllm import VllmConfig
from learner.policy.canary_scores import CanaryScores
from learner.policy.weights import Checksums, checksum
from learner.records import ServerChange
from learner.rollout.client import REPLY_GRACE_S
from learner.rollout.control import ServerControl
from learner.rollout.membership import Member
from learner.rollout.server_backend import ServerBackend
from learner.sync.broadcast_groups import (
    Post,
    Posts,
    Sent,
    ServerGroups,
    ServerLink,
    StartJoin,
    accused,
    await_all,
    cancel,
    open_groups,
)
from learner.sync.canary import Canary, CanaryItem, score_items, worst_gap
from learner.sync.fitness import CheckServer, check_adapter, check_new, is_silent, look
from learner.sync.members import Members
from learner.sync.source import AdapterSource, SyncRanks, WeightSource, sealed_buckets
from learner.sync.sync import Delivered, Mode, Recovery
from shared.aio import gather
from shared.canary import CanaryGap
from shared.errors import NotFiniteError, ProjectError, ServerUnreachableError, SyncError
from shared.sync.buckets import DTYPES, SEAL_BYTES, WeightsDigest, digest_of, num_bucket_bytes, plan_buckets
from shared.sync.group import start_join
from shared.waits import Deadline, Retry
from shared.wire import Bucket, ServedWeights, ServerStatus, UpdateWeightsCall, UpdateWeightsReply

T = TypeVar("T")
Looks = dict[str, ServerStatus | ProjectError]  # each server's status or error, by URL
GOODBYE_S = 3.0  # max wait, after a failed sync, until the servers have confirmed that the group is closed.
# A server that has not served yet may be slow, and a step waits for it. If a server that has not served yet takes part,
# the limit for join and update together is NEWCOMER_S seconds, or NEWCOMER_MARGIN times the last update without such a
# server, whichever is more. The update alone may always take LEAST_S seconds.
NEWCOMER_S, NEWCOMER_MARGIN, LEAST_S = 15.0, 3.0, 1.0
# The learner's second forward pass on the canary (fixed answers) is captured as a CUDA graph. During a capture no other
# thread may wait for the device. So the learner makes the first two passes inside a sync, while no rollouts are made.
CAPTURED_AFTER = 2
# Max unfinished broadcasts when the next broadcast starts. With fewer broadcasts, the network is idle at times; more
# broadcasts need more memory.
SENT_AHEAD = 2
NO_SCORES = CanaryScores(read=list, merge_gap=0.0)
log = logging.getLogger("learner.sync")


class ServerDelivery:
    """`canary` is used on rank 0 only. `device`: the device of the weights. `check` is called for each server process
    that was not there at the start. `control` brings requests of the user or the cluster to add or remove servers."""

    def __init__(
        self,
        backend: ServerBackend,
        config: VllmConfig,
        *,
        canary: Canary,
        ranks: SyncRanks,
        device: torch.device,
        start_join: StartJoin = start_join,
        check: CheckServer | None = None,
        control: ServerControl | None = None,
    ) -> None:
        self._backend, self._config, self._canary = backend, config, canary
        self._device, self._start_join = device, start_join
        self.members = Members(backend, ranks, control=control, check=check)
        self._groups = ServerGroups((), "", b"")
        self._statuses: dict[str, ServerStatus] = {}  # URL -> the server's status when the learner joined its group.
        # The buckets of each source and dtype, which are the same in every sync.
        self._plans: dict[tuple[WeightSource, torch.dtype | None], list[Bucket]] = {}
        self._digest = WeightsDigest()
        self._accused: dict[str, ProjectError] = {}  # URL of each server that made the last try fail -> its error
        self._usual_s = 0.0  # seconds of the last update without a new server
        self._newcomers = Deadline(0.0)  # one deadline for join and update together, if new servers take part
        self._deadline = Deadline(0.0)  # deadline for reaching the number of servers that this sync needs
        self._parts: dict[str, float] = {}  # part of this sync -> seconds that it took
        self._learner: dict[tuple[torch.dtype | None, Mode], CanaryScores] = {}  # the learner's scores in this sync.
        # Number of syncs for which the learner computed scores.
        self._num_scored: Counter[tuple[torch.dtype | None, Mode]] = Counter()

    def together(self, work: Callable[[], T]) -> T:
        return self.members.together(work)

    def agree(self) -> Sequence[ServerChange]:
        return self.members.changes()

    def is_current(self) -> bool:
        # A group cannot change its members, so any other set of servers needs new groups.
        return {member.base_url for member in self.members.to_reach()} == {link.base_url for link in self._groups.links}

    # ---- failures --------------------------------------------------------------------------------------------------

    def recover(self, error: ProjectError, num_repeated: int) -> Recovery:
        # Another try would send the same weights, with the same values that are not finite.
        if isinstance(error, NotFiniteError):
            return "stop"
        accused_by, self._accused = self._accused, {}
        silent = {url: found for url, found in accused_by.items() if isinstance(found, ServerUnreachableError)}
        tried = [member for member in self._backend.membership.members if member.base_url in self._statuses]
        gone = {url: found for url, found in self._look(tried, silent).items() if isinstance(found, ProjectError)}
        # The run does not need a new server, so the next try leaves it out, even if it did not cause the failure.
        newcomers = {m.base_url: accused_by.get(m.base_url, error) for m in tried if m.state == "out"}
        is_all = self._backend.membership.min_servers == "all"
        # With `min_servers: all` the run cannot continue without a server that served.
        if is_all and not gone.keys() <= newcomers.keys():
            return "stop"
        for base_url, found in (newcomers | gone).items():
            self.members.leave_out(base_url, found)
        # A refused connection must not end the run: silent servers are asked again until `timeout_s` is over.
        if newcomers or gone or (silent and not self._deadline.is_over()):
            return "changed"
        # One repetition shows whether the fault was temporary.
        if is_all or num_repeated > 1:
            return "stop"
        if num_repeated == 1:
            if len(accused_by) != 1 or not self._backend.membership.is_elastic:
                return "stop"
            # If the second try accuses only one server, that server is left out. If the second try accuses several
            # servers, the cause is not a server.
            for base_url, found in accused_by.items():
                self.members.leave_out(base_url, found)
        return "repeat"

    def _look(self, members: Sequence[Member], silent: Mapping[str, ProjectError]) -> Looks:
        """Return each server's status or error now. While too few servers answer for the run to go on, silent servers
        are asked again, until this sync's deadline. `silent`: servers that were silent just now, with their errors."""
        backend, found = self._backend, Looks(silent)
        asked = [member.base_url for member in members if member.base_url not in found]
        retry = Retry(self._deadline.left_s(), backend.timeouts.poll_s)
        while True:
            found |= zip(asked, backend.loop.run(gather(look(backend, url) for url in asked)), strict=True)
            # A membership is never changed in place: this only computes whether enough servers would be left.
            left = backend.membership
            for base_url, status in found.items():
                left = left if isinstance(status, ServerStatus) else left.leave_out(base_url, "", now_s=0.0)
            asked = [url for url, status in found.items() if isinstance(status, ProjectError) and is_silent(status)]
            if left.enough or not asked or not retry.wait():
                return found

    # ---- joining ---------------------------------------------------------------------------------------------------

    def connect(self) -> int:
        """Join the groups of all servers that serve or are ready to. Raises CommunicatorError, DeadlineError or the
        server's own error."""
        backend = self._backend
        statuses = self._reach(self.members.to_reach())
        self._statuses = {member.base_url: status for member, status in statuses}
        self._newcomers = Deadline(max(NEWCOMER_S, NEWCOMER_MARGIN * self._usual_s))
        least = backend.membership.min_servers
        # The new servers of the group are counted too, although they do not serve before this sync.
        patience = backend.timeouts.patience(has_others=least != "all" and len(statuses) > least)
        links = [
            ServerLink(backend.client(m.base_url), backend.loop, m.group_port, status.world_size, patience)
            for m, status in statuses
        ]
        asked: list[Post] = []
        try:
            self._groups = open_groups(
                links,
                [status for _, status in statuses],
                device=self._device,
                timeout_s=self._limit_s,
                allow_shared_gpu=self._config.server.allow_shared_gpu,
                start_join=self._start_join,
                asked=asked,
            )
        except ProjectError:
            self._accused = accused(asked)
            raise
        joined = [group.name for group in self._groups.groups]
        log.info("joined %s, weights travel in %s", joined, self._dtype or "their own type")
        return max(status.ver for _, status in statuses)

    @property
    def _dtype(self) -> torch.dtype | None:
        """The type in which weights are sent: the servers' type. None: servers have several types, so weights are sent
        as trained, and each server rounds them itself."""
        dtypes = {status.dtype for status in self._statuses.values()}
        return DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None

    def _reach(self, members: Sequence[Member]) -> list[tuple[Member, ServerStatus]]:
        """Return each member that answers and fits, with its status. Members that do not answer or fit are left out.
        Raises ServerError if too few are left."""
        # At the start all servers must answer, and all of them have just been checked.
        if not self.members.returning.fit:
            statuses = self._backend.statuses()
            self.members.returning.fit |= {status.server_id for status in statuses}
            return list(zip(members, statuses, strict=True))
        found, reached = self._look(members, silent={}), list[tuple[Member, ServerStatus]]()
        for member in members:
            try:
                if isinstance(status := found[member.base_url], ProjectError):
                    raise status
                check_new(member, status, reached)
                self.members.check(member, status)
            except ProjectError as error:
                self.members.leave_out(member.base_url, error)
            else:
                reached.append((member, status))
        return reached

    @property
    def _limit_s(self) -> float:
        """Max seconds of joining, or of an update. The limit is short if a new server takes part (NEWCOMER_S)."""
        left_s = max(LEAST_S, self._newcomers.left_s()) if self._has_newcomers else math.inf
        return min(self._config.server.timeout_s, left_s)

    @property
    def _has_newcomers(self) -> bool:
        """True if a new server, which the run does not need, takes part in this sync."""
        membership = self._backend.membership
        return membership.enough and any(member.base_url in self._statuses for member in membership.out)

    def check_adapter(self, adapter: AdapterSource) -> None:
        for base_url, status in self._statuses.items():
            check_adapter(base_url, status, rank=adapter.rank)

    def prepare(self, mode: Mode) -> None:
        if self._num_scored[self._dtype, mode] >= CAPTURED_AFTER:
            self._scores(mode)

    @contextmanager
    def delivering(self, modes: Sequence[Mode]) -> Iterator[Mapping[str, float]]:
        # All tries of a sync share this deadline.
        self._deadline = Deadline(self._config.server.timeout_s)
        try:
            yield self._parts
        finally:  # from here on the policy's weights may change
            self._parts, self._learner = {}, {}

    def _scores(self, mode: Mode) -> CanaryScores:
        """Return the learner's scores of the canary for this sync. Only the first call computes the scores."""
        # The number type of the sent weights may change when servers come or go, so scores are kept by type.
        key = self._dtype, mode
        if key not in self._learner:
            began = time.perf_counter()
            scores = self._canary.scorer(self._dtype, mode == "full")
            scores.read()  # waits until the device has computed the scores
            self._learner[key] = scores
            self._num_scored[key] += 1
            self._parts["scores"] = self._parts.get("scores", 0.0) + time.perf_counter() - began
        return self._learner[key]

    def deliver_base(self, source: WeightSource, ver: int) -> int:
        self._send_and_switch(source, "full", ver + 1, items=())
        return ver + 1

    def deliver(self, source: WeightSource, mode: Mode, ver: int) -> Delivered:
        replies, learner, weights = self._send_and_switch(source, mode, ver, items=self._canary.items)
        reply, longest = next(iter(replies.values())), max(replies.values(), key=lambda reply: reply.pause_s)
        self._parts |= {"drain": longest.drain_s, "load": longest.load_s, "canary": longest.canary_s}
        self._parts["verdict"] = longest.pause_s - longest.load_s - longest.canary_s
        delivered = Delivered(
            mode=mode,
            num_bytes=reply.num_bytes,
            num_tensors=reply.num_tensors,
            gap=worst_gap([self._gap(learner, reply, base_url) for base_url, reply in replies.items()]),
            merge_gap=learner.merge_gap,
            pause_s=longest.pause_s,
        )
        served = ServedWeights(ver=ver, incarnation=self._groups.incarnation, weights=weights)
        membership = self._backend.membership.sized((url, status.world_size) for url, status in self._statuses.items())
        self.members.change_to(membership.synced(replies, served, now_s=time.time()))
        return delivered

    def accept(self, ver: int) -> None:
        served = self._backend.membership.served
        assert served is not None, "accepted before anything was delivered"
        assert served.ver == ver, "another version was delivered"

    def leave(self, *, abort: bool) -> None:
        groups, self._groups = self._groups, ServerGroups((), "", b"")
        out = {member.base_url for member in self._backend.membership.out}
        # Servers that do not answer get no call, because the wait below would then always last its full time.
        unreachable = {url for url, error in self._accused.items() if isinstance(error, ServerUnreachableError)}
        goodbyes = groups.leave(abort=abort, gone=out | unreachable)
        wait([goodbye for _, goodbye in goodbyes], timeout=GOODBYE_S if abort else REPLY_GRACE_S)
        for link, goodbye in goodbyes:
            if not goodbye.done() or goodbye.exception() is not None:
                log.warning("%s did not hear that the learner left: %s", link.base_url, goodbye)
            goodbye.cancel()

    def _gap(self, learner: CanaryScores, reply: UpdateWeightsReply, base_url: str) -> CanaryGap:
        try:
            return self._canary.compare(learner.logprobs, reply.scores, base_url, self._dtype)
        except ProjectError as error:
            self._accused = {base_url: error}
            raise

    def _send_and_switch(
        self, source: WeightSource, mode: Mode, ver: int, *, items: Sequence[CanaryItem]
    ) -> tuple[dict[str, UpdateWeightsReply], CanaryScores, str]:
        """Send the weights as version `ver`, and wait until all servers serve them and have scored `items`. Return the
        replies by URL, the learner's scores, and the digest that the servers must report."""
        # The canary (fixed answers) is scored before servers pause and buckets are sent. So no other thread waits for
        # the device while the learner's pass is captured as a CUDA graph.
        learner = self._scores(mode) if items else NO_SCORES
        # Scores that are not finite raise an error here, before any server pauses.
        expected = (
            self._canary.expected(self._groups.incarnation, ver, learner.logprobs, self._dtype) if items else None
        )
        call = UpdateWeightsCall(
            incarnation=self._groups.incarnation,
            ver=ver,
            mode=mode,
            buckets=self._plan(source),
            canary=score_items(items),
            base_of_adapter=not items,
            timeout_s=self._limit_s,
        )
        buckets = self._buckets(source, ver)
        # Launching the merges of adapters takes the host longer than sending their results, so servers would wait.
        buckets = chain(list(islice(buckets, self._num_early)), buckets)
        began = time.monotonic()
        # A server answers at the end of the update, so the calls are not awaited before the buckets are sent.
        posts = [(link, link.post(link.client.update_weights(call, link.patience))) for link in self._groups.links]
        told: Posts = []
        try:
            under_way, sums, seals = self._send(buckets, posts)
            self._parts["send"] = time.monotonic() - began
            if expected is not None:
                # The weights are checked before the servers get the expected scores, without which they serve nothing.
                check_sent(call.buckets, sums, learner.checksums)
                told = [(link, link.post(link.client.expect_scores(expected))) for link in self._groups.links]
            await_all(under_way, [*posts, *told])
        except BaseException:
            self._accused = accused([*posts, *told])
            # The servers' own errors were read above, so these calls need no further wait.
            cancel([*posts, *told])
            raise
        replies = {link.base_url: post.result() for link, post in posts}
        for base_url, reply in replies.items():
            check_reply(ver, call.buckets, reply, base_url)
        # The time of an update with a slow new server must not raise the limit for the next new server.
        if not self._has_newcomers:
            self._usual_s = time.monotonic() - began
        return replies, learner, self._digest.after(mode, digest_of(seals))

    @property
    def _num_early(self) -> int:
        """Number of buckets that are made before servers pause: as many as are in memory at any later time, or as many
        as fit into half of the device memory that torch holds for the next step."""
        is_cuda = self._device.type == "cuda"
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device) if is_cuda else 0
        return max(SENT_AHEAD + 1, held // (2 * self._config.sync.bucket_bytes))

    def _buckets(self, source: WeightSource, ver: int) -> Iterator[torch.Tensor]:
        plan = [bucket.tensors for bucket in self._plan(source)]
        key, dtype = self._groups.seal_key, self._dtype
        return sealed_buckets(source, plan, key=key, ver=ver, dtype=dtype, device=self._device)

    def _send(
        self, buckets: Iterable[torch.Tensor], posts: Posts
    ) -> tuple[Sent, list[torch.Tensor], list[torch.Tensor]]:
        """Broadcast every bucket to every group. Return the broadcasts that may be unfinished, and each bucket's
        checksum and seal."""
        under_way, sums, seals = deque[Sent](), list[torch.Tensor](), list[torch.Tensor]()
        for bucket in buckets:
            if len(under_way) > SENT_AHEAD:
                await_all(under_way.popleft(), posts, replies=False)
            under_way.append(self._groups.broadcast(bucket))
            sums.append(checksum(bucket[:-SEAL_BYTES]))
            # A view would keep the whole bucket in memory.
            seals.append(bucket[-SEAL_BYTES:].clone())
        return [part for sent in under_way for part in sent], sums, seals

    def _plan(self, source: WeightSource) -> list[Bucket]:
        key = source, self._dtype
        if key not in self._plans:
            parts = plan_buckets(source.weight_specs(self._dtype), self._config.sync.bucket_bytes)
            # The plan depends only on names, shapes and types of the tensors, so it is made once.
            self._plans[key] = [Bucket(tensors=part, num_bytes=num_bucket_bytes(part)) for part in parts]
        return self._plans[key]


# ---- checks --------------------------------------------------------------------------------------------------------


def check_sent(buckets: Sequence[Bucket], sums: Sequence[torch.Tensor], scored: Checksums) -> None:
    """Raises SyncError unless the sent weights equal, bit for bit, the weights that scored the learner's canary.

    A stale tensor can change log-probabilities less than different kernels do. So the comparison of log-probabilities
    (the canary) cannot show a stale tensor. `sums`: the checksum of each sent bucket, int64 `[]`. `scored`: checksums
    per tensor. A bucket is not compared if one of its tensors has no checksum in `scored`.
    """
    known = [(i, bucket) for i, bucket in enumerate(buckets) if all(t.name in scored for t in bucket.tensors)]
    if not known:
        return
    # All buckets are compared in one step, because each value that is read makes the host wait for the device.
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


def check_reply(ver: int, buckets: Sequence[Bucket], reply: UpdateWeightsReply, base_url: str) -> None:
    """Raises SyncError unless the server at `base_url` confirms version `ver` with the bytes and tensors of
    `buckets`."""
    wanted = (ver, sum(bucket.num_bytes for bucket in buckets), sum(len(bucket.tensors) for bucket in buckets))
    found = (reply.ver, reply.num_bytes, reply.num_tensors)
    if found != wanted:
        raise SyncError(
            f"{base_url}: the server confirmed another update than the one that was sent",
            found=f"(ver, bytes, tensors) {found}",
            wanted=str(wanted),
            remedy="run the same version of this project on both sides",
        )
