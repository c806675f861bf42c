"""Rollouts from servers that are already running: a `RolloutBackend` for all servers of a run (R05-R07, R10-R16, R21,
R23, R30).

In: samples of this rank. Out: one rollout per sample, each as soon as it ends (`stream`) or all in order
(`generate_window`). All rollouts of a call are made with one version of the weights. Invariants: `connect` checks the
servers and asks for their world sizes, once; a request's seed depends only on its index over all ranks; a server never
has more requests than its quota (`distribution.py`), also when requests are sent again; no sample is skipped: an error
ends the call. At most one window of rollouts is in memory.

If a server fails and `min_servers` allows it, this rank stops using the server, and sends the unanswered requests to
the other servers (D15). Other ranks learn of the failure at the next agreement. Until that agreement the other servers
may have more requests than `decode_batch_size` allows, because this rank has moved requests to them.

All clients of a process use one asyncio event loop, which has a thread of its own (`LoopThread`). So rollouts and the
weight sync may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.config.sections.servers import ServerEntry
from learner.records import CallRecord, Rollout, RolloutCallLog
from learner.rollout.backend import (
    TELL_S,
    MicroStep,
    Requests,
    RolloutBackend,
    RolloutStream,
    begin_record,
    recorded,
    split_window,
)
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.distribution import (
    Answered,
    Batch,
    Dispatcher,
    chunk_size,
    distribute,
    quotas_of,
)
from learner.rollout.membership import Member, Membership
from learner.rollout.requests import Decodings, asks_pixels, infer_request, read_rollout, sent_pictures
from shared.aio import LoopThread, gather
from shared.errors import ConfigError, ProjectError, ServerMismatchError
from shared.images import ImageRules, Images
from shared.wire import (
    PROTOCOL_VERSION,
    InferCall,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    ServedWeights,
    ServerStatus,
)

T = TypeVar("T")
log = logging.getLogger("learner.rollout")

CLOSE_S = 10.0  # max seconds to close the connections, and then max seconds to end the loop's thread


@dataclass(frozen=True, kw_only=True, slots=True)
class _StreamJob:
    """The work of one `stream`: its requests, their decoding settings, and the servers that may answer."""

    asked: Requests
    requests: Sequence[RolloutInferRequest]  # the requests of `asked`, in the form for servers
    config: RequestConfig
    record: RolloutCallLog
    members: Sequence[Member]  # servers that served when the stream began.
    # The weights that must have made the answers. None: no sync has been made yet, so this is not checked.
    served: ServedWeights | None


class _Rollouts(RolloutStream):
    """The stream of one job's rollouts. The event loop's thread adds each rollout, the iterating thread takes it."""

    def __init__(
        self, begin: Callable[[Answered[Rollout]], Future[None]], record: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """`begin(on_answer)` starts the job; the iteration runs inside `record()`."""
        self._record, self._closed = record, False
        self._ended: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()
        self._future = begin(lambda i, rollout: self._ended.put((i, rollout)))
        # The iteration ends when the job has ended, failed or was cancelled.
        self._future.add_done_callback(lambda _: self._ended.put(None))

    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        with self._record():
            while (ended := self._ended.get()) is not None:
                yield ended
            # After `close` the job was cancelled on purpose, so its CancelledError is no error of the run.
            if not self._closed:
                self._future.result()

    def close(self) -> None:
        self._closed = True
        self._future.cancel()


class ServerBackend(RolloutBackend):
    """Makes rollouts with the run's rollout servers. `token`: the bearer token. `vocab_size`: the learner's vocabulary
    size, which every server must have. `pixel_share`: fraction of the samples whose rollouts get digests of their
    processed images. `images` reads photographs that are augmented. `on_call` is called with the record of every
    `stream`, in the thread that iterated it. The weight sync sets the attribute `membership`: the servers on which the
    ranks agreed, and the weights that must make the answers."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        *,
        run_seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        token: str | None = None,
        vocab_size: int | None = None,
        logprobs: bool = False,
        pixel_share: float = 0.0,
        images: Images | None = None,
        on_call: Callable[[RolloutCallLog], None] | None = None,
    ) -> None:
        self.tell: Callable[[str], None] = lambda _: None  # gets a line of progress every TELL_S of an evaluation
        self._images = images or Images(ImageRules())
        server = config.vllm.server
        entries: tuple[ServerEntry, ...] = tuple(server.servers or ())
        assert entries, "refused by learner/config/sections/servers.py"
        self.config = config
        self.chunk = 0  # requests that this rank may have in flight; set by `connect`
        self.timeouts = Timeouts.of(server.timeout_s, server.infer_timeout_s, num_servers=len(entries))
        self.loop = LoopThread("rollout-client")
        self.membership = Membership(
            members=tuple(Member(base_url=e.base_url.rstrip("/"), group_port=e.group_port) for e in entries),
            min_servers=server.min_servers,
        )
        self._lost: dict[str, str] = {}  # servers that failed on this rank since the last agreement -> reason
        self._lock = threading.Lock()  # guards `membership`, `_lost` and `_clients`, which several threads use
        self._token, self._vocab_size, self._on_call = token, vocab_size, on_call
        self._clients: dict[str, ServerClient] = {}
        self._run_seed, self._rank, self._num_ranks = run_seed, rank, num_ranks
        self._pixel_share = pixel_share
        self._decoding = Decodings(config.decoding, logprobs=logprobs)

    def connect(self) -> tuple[ServerStatus, ...]:
        """Wait until every server is healthy (at most `timeout_s`), check it, and ask its world size. Return the
        servers' states, in order.

        Raises ServerUnreachableError, ServerMismatchError if a server has another protocol or vocabulary, ConfigError
        if `decode_batch_size` is too small for the ranks, or `max_new_tokens` too large for a server.
        """
        members = self.membership.serving
        statuses = self.statuses()
        sizes = self.loop.run(gather(self.client(member.base_url).world_size() for member in members))
        self.membership = self.membership.sized(
            (member.base_url, size) for member, size in zip(members, sizes, strict=True)
        )
        # The quotas need the servers' world sizes, so they are computed only after the servers have answered.
        self.chunk = chunk_size(
            decode_batch_size=self.config.decode_batch_size,
            server_world_sizes=self.world_sizes,
            num_ranks=self._num_ranks,
        )
        for member, status in zip(self.membership.serving, statuses, strict=True):
            log.info(
                "rollout server %s: group_port %d, world size %d, model %s, %s at ver %d",
                member.base_url,
                member.group_port,
                member.world_size,
                status.model,
                status.gate,
                status.ver,
            )
        log.info("rank %d of %d: at most %d requests in flight", self._rank, self._num_ranks, self.chunk)
        return statuses

    @property
    def clients(self) -> tuple[ServerClient, ...]:
        """The clients of the servers that serve, in order."""
        return tuple(self.client(member.base_url) for member in self.membership.serving)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """The world sizes of the servers that serve, in order: the number of GPUs of each."""
        return tuple(member.world_size for member in self.membership.serving)

    def client(self, base_url: str) -> ServerClient:
        """Return the client of the server at `base_url`; the first call makes it."""
        with self._lock:
            if base_url not in self._clients:
                self._clients[base_url] = ServerClient(base_url, timeouts=self.timeouts, token=self._token)
            return self._clients[base_url]

    # ---- membership ------------------------------------------------------------------------------------------------

    def usable(self) -> Membership:
        """Return the membership on which the ranks agreed, without the servers that have since failed on this rank."""
        with self._lock:
            return self._without_lost()

    def lose(self, base_url: str, error: ProjectError) -> Membership:
        """Stop using a server on this rank, and return the membership without it. Raises `error` if the run needs every
        server, and a ServerError if fewer than `min_servers` would serve. Any thread may call this."""
        with self._lock:
            before = self._without_lost()
            # Without another server the original error says more than "too few servers".
            if before.min_servers == "all" or len(before.members) == 1:
                raise error
            # The first error is kept, because later errors are its consequences.
            self._lost.setdefault(base_url, str(error))
            left = self._without_lost()
        if not left.enough:
            raise left.too_few() from error
        log.warning("rollout server %s is left out, %d serve: %s", base_url, len(left.serving), error)
        return left

    def lost(self) -> dict[str, str]:
        """Return the servers that have failed this rank since the last agreement: URL -> reason."""
        with self._lock:
            return dict(self._lost)

    def adopt(self, membership: Membership, *, told: Collection[str] = ()) -> None:
        """Use the membership that the ranks agreed on. `told`: URLs of lost servers that this rank had reported, and
        that the new membership takes into account."""
        with self._lock:
            self.membership = membership
            for base_url in told:
                self._lost.pop(base_url, None)

    def _without_lost(self) -> Membership:
        found = self.membership
        for base_url, because in self._lost.items():
            found = found.leave_out(base_url, because, now_s=0.0)
        return found

    # ---- rollouts --------------------------------------------------------------------------------------------------

    def statuses(self) -> tuple[ServerStatus, ...]:
        """Return every serving server's state now, in order. Raises the errors of `connect`."""
        return tuple(self.loop.run(gather(self.look(client) for client in self.clients)))

    def generate_window(
        self,
        window: Sequence[MicroStep],
        *,
        global_step: int,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[list[Rollout]]:
        """Return the rollouts of `stream`, in order (see `RolloutBackend`). Without samples nothing is sent."""
        if not any(step.samples for step in window):
            return [[] for _ in window]
        how = self._decoding.of(greedy=greedy, temperature=temperature)
        # Processed images are compared for learned rollouts only.
        share = self._pixel_share if not greedy and temperature is None else 0.0
        rollouts = self._stream(window, how, global_step=global_step, share=share)
        try:
            ended = dict(self._telling(rollouts, sum(len(step.samples) for step in window)) if greedy else rollouts)
        finally:
            # After an error or an interrupt the servers must stop working on the rest.
            rollouts.close()
        return split_window(window, [ended[i] for i in range(len(ended))])

    def _telling(self, rollouts: RolloutStream, number: int) -> Iterator[tuple[int, Rollout]]:
        """Yield the stream's rollouts, and report every TELL_S how many of the `number` rollouts have ended."""
        told_s = time.monotonic()
        for count, ended in enumerate(rollouts, 1):
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                self.tell(f"{count}/{number} photographs answered")
            yield ended

    def stream(self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False) -> RolloutStream:
        """Begin the window's rollouts (see `RolloutBackend`). Ranks may call `stream` at different times, and with
        different numbers of samples."""
        share = 0.0 if greedy else self._pixel_share
        return self._stream(window, self._decoding.of(greedy=greedy), global_step=global_step, share=share)

    def _stream(
        self, window: Sequence[MicroStep], how: RequestConfig, *, global_step: int, share: float
    ) -> RolloutStream:
        """Send the window's requests, and return the stream of their rollouts. `share`: fraction of the samples whose
        requests ask for digests of the processed images."""
        asked = Requests.of(window, run_seed=self._run_seed, global_step=global_step)
        record = begin_record(window, global_step=global_step, chunk=self.chunk)
        record.began_at = time.time()
        # The pictures are made on this thread, because encoding would hold up the loop that all clients share.
        pictures = sent_pictures(asked.samples, self._images)
        job = _StreamJob(
            asked=asked,
            requests=[
                infer_request(
                    sample,
                    pictures.get(id(sample)),
                    seed=seed,
                    pixels=share > 0 and asks_pixels(share, sample, global_step=global_step),
                )
                for sample, seed in zip(asked.samples, asked.seeds, strict=True)
            ],
            config=how,
            record=record,
            # The members are read once, so that all requests of this stream are divided among the same servers.
            members=self.usable().serving,
            served=self.membership.served,
        )
        return _Rollouts(
            lambda on_answer: self.loop.submit(self._generate(job, on_answer)), lambda: recorded(record, self._on_call)
        )

    def close(self) -> None:
        """Close the connections and end the loop's thread, in bounded time. A second call does nothing."""
        if not self.loop.closed:
            self.loop.submit(gather(client.aclose() for client in self._clients.values())).result(CLOSE_S)
            self.loop.close(CLOSE_S)

    async def look(self, client: ServerClient, limit_s: float | None = None) -> ServerStatus:
        """Wait until a server is healthy, for at most `limit_s` (None: `timeout_s`). Check its status and return it.
        Raises the errors of `connect`."""
        await client.wait_healthy(limit_s)
        status = await client.status()
        self._check(client.base_url, status)
        return status

    def _check(self, base_url: str, status: ServerStatus) -> None:
        if status.protocol != PROTOCOL_VERSION:
            raise ServerMismatchError(
                f"{base_url}: the server speaks another protocol",
                found=f"protocol {status.protocol}",
                wanted=f"protocol {PROTOCOL_VERSION}",
                remedy="run the same version of this project on both sides",
            )
        if self._vocab_size is not None and status.vocab_size != self._vocab_size:
            raise ServerMismatchError(
                f"{base_url}: the server's model has another vocabulary than the learner's",
                found=f"vocab_size {status.vocab_size} ({status.model})",
                wanted=f"vocab_size {self._vocab_size} (model.path)",
                remedy="start the server with the model that the learner starts from",
            )
        if self.config.decoding.max_new_tokens >= status.max_model_len:
            raise ConfigError(
                "custom.extra.rollout_matching.decoding.max_new_tokens: no room for a prompt",
                found=f"{self.config.decoding.max_new_tokens} of the {status.max_model_len} tokens of {base_url}",
                wanted="fewer new tokens than the server's max_model_len",
                remedy="lower max_new_tokens, or raise max_model_len in the server's configuration",
            )

    async def _generate(self, job: _StreamJob, on_answer: Answered[Rollout]) -> None:
        place = {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "decode_batch_size": self.config.decode_batch_size,
        }
        sizes = [member.world_size for member in job.members]
        plan = distribute(len(job.requests), server_world_sizes=sizes, **place)

        def on_rollout(i: int, rollout: Rollout) -> None:
            # Before the first sync any version is accepted, but all servers must have the same one.
            _check_version(job.record, rollout)
            on_answer(i, rollout)

        def on_split(requests: Sequence[int], error: ProjectError) -> None:
            job.record.splits.append((*job.asked.indices[requests[0]], len(requests)))

        def lose(server: int, error: ProjectError) -> Sequence[int]:
            self.lose(job.members[server].base_url, error)
            sizes[server] = 0
            if not any(sizes):  # no server of this job is left
                raise error
            return quotas_of(server_world_sizes=sizes, **place)

        dispatcher = Dispatcher(
            plan,
            send=lambda server, batch, answered: self._send(job, job.members[server].base_url, batch, answered),
            on_answer=on_rollout,
            on_split=on_split,
            lose=lose,
        )
        await dispatcher.run()

    async def _send(self, job: _StreamJob, base_url: str, batch: Batch, answered: Answered[Rollout]) -> None:
        client, patience = self.client(base_url), self.timeouts.patience(has_others=self.usable().is_elastic)
        micro_step_idx, first_req_idx = job.asked.indices[batch.start]
        seed = job.asked.seeds[batch.start]
        requests = list(job.requests[batch.start : batch.stop])
        call = InferCall(infer_requests=requests, request_config=job.config.model_copy(update={"seed": seed}))
        began_at, begin, error_text = time.time(), time.monotonic(), ""

        def on_answer(i: int, output: RolloutOutput) -> None:
            rollout = read_rollout(
                output,
                sample=job.asked.samples[batch.start + i],
                request_uuid=requests[i].uuid,
                seed=job.asked.seeds[batch.start + i],
                served=job.served,
                base_url=client.base_url,
                logprobs=job.config.logprobs,
            )
            answered(batch.start + i, rollout)

        try:
            await client.infer(call, on_answer, patience)
        except ProjectError as error:
            error_text = str(error)
            raise
        finally:
            ended = CallRecord(
                base_url=client.base_url,
                seed=seed,
                micro_step_idx=micro_step_idx,
                first_req_idx=first_req_idx,
                num_requests=len(batch),
                seconds=time.monotonic() - begin,
                error=error_text,
                began_at=began_at,
            )
            job.record.calls.append(ended)
            log.debug("step %s, share %s: %s", job.record.global_step, job.record.share, ended)


def _check_version(record: RolloutCallLog, rollout: Rollout) -> None:
    """Raises ServerMismatchError if a rollout is by another version of the weights than the first one in `record`."""
    if record.ver is None:
        record.ver = rollout.ver
    elif rollout.ver != record.ver:
        raise ServerMismatchError(
            "the servers answered with different weight versions",
            found=f"ver {record.ver}, and {rollout.server_id} ver {rollout.ver}",
            wanted="one version for all rollouts of a call",
            remedy="sync weights before generating, and let no other learner use these servers",
        )
