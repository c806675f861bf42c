"""Rollouts from servers that are already running: `RolloutBackend` over all of them (R05-R07, R10-R16, R21, R23, R30).

In: samples of this rank. Out: one rollout per sample, as each ends (`stream`) or all in order (`generate_window`), by
one weight version. Invariants: `connect` checks the servers and asks their world sizes, once; a request's seed depends
on its index over all ranks only; the quotas of `distribution.py` hold through refills and retries; no sample is
skipped, an error ends the call. Rollouts that nobody has taken yet are bounded by the window.

All clients of a process live on one asyncio event loop in a thread of its own (`LoopThread`), so rollouts and the
weight sync may be called from any thread. Invariants: `run` returns or raises exactly what the coroutine did; a caller
that is interrupted cancels what it started; `close` is bounded in time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

from learner.config.schema import RolloutMatchingConfig, ServerEntry
from learner.records import Rollout
from learner.rollout.backend import (
    CallRecord,
    MicroStep,
    RequestIndex,
    Requests,
    RolloutCallLog,
    RolloutStream,
    StreamingBackend,
    begin_record,
    recorded,
    split_window,
)
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.distribution import Answered, Batch, Dispatcher, ServerSpan, chunk_size, distribute
from learner.rollout.requests import infer_request, read_rollout, request_config
from shared.aio import gather
from shared.errors import ConfigError, ProjectError, ServerMismatchError
from shared.seeds import offset_seed
from shared.wire import PROTOCOL_VERSION, InferCall, RequestConfig, RolloutInferRequest, RolloutOutput, ServerStatus

T = TypeVar("T")
log = logging.getLogger("learner.rollout")

CLOSE_S = 10.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # daemon: an interpreter that exits because of an error must not wait for an answer
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coroutine` on the loop. Cancelling the future cancels it there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end. The coroutine has its own deadlines."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, timeout_s: float) -> None:
        """Cancel what still runs and end the thread within `timeout_s`. A second call does nothing."""
        if self.closed:
            return
        self.submit(_cancel_others()).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What stays the same during one `stream`."""

    asked: Requests
    requests: Sequence[RolloutInferRequest]  # the same, for the wire
    config: RequestConfig
    record: RolloutCallLog


class _Rollouts(RolloutStream):
    """What the servers answer to one job, from the event loop's thread to the one that iterates."""

    def __init__(self, begin: Callable[[Answered[Rollout]], Future[None]], record: Callable[[], Any]) -> None:
        """`begin(on_answer)` starts the job; the iteration runs inside `record()`."""
        self._record, self._closed = record, False
        self._ended: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()
        self._future = begin(lambda i, rollout: self._ended.put((i, rollout)))
        self._future.add_done_callback(lambda _: self._ended.put(None))

    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        with self._record():
            while (ended := self._ended.get()) is not None:
                yield ended
            if not self._closed:
                self._future.result()

    def close(self) -> None:
        self._closed = True
        self._future.cancel()


class ServerBackend(StreamingBackend):
    """`token`: the bearer token. `vocab_size`: that of the learner's model, compared with the servers'. `on_call` gets
    the record of every `stream`, in the thread that iterated it. The weight sync sets `expected_ver`; None: any
    version, but the same from all servers."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        *,
        run_seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        token: str | None = None,
        vocab_size: int | None = None,
        on_call: Callable[[RolloutCallLog], None] | None = None,
    ) -> None:
        server = config.vllm.server
        self.servers: tuple[ServerEntry, ...] = tuple(server.servers or ())
        if not self.servers:
            raise ConfigError(
                "custom.extra.rollout_matching.vllm.server.servers: no rollout server",
                found="an empty list",
                wanted="at least one {base_url, group_port}",
                remedy="name the servers, or set vllm.mode: colocate or rollout_backend: hf",
            )
        self.config = config
        self.expected_ver: int | None = None
        self.world_sizes: tuple[int, ...] = ()  # set by `connect`, and so is `chunk`
        self.chunk = 0  # requests that this rank may have in flight
        self._run_seed, self._rank, self._num_ranks = run_seed, rank, num_ranks
        self._vocab_size, self._on_call = vocab_size, on_call
        self._decoding = {greedy: request_config(config.decoding, greedy=greedy) for greedy in (False, True)}
        timeouts = Timeouts.of(server.timeout_s, server.infer_timeout_s)
        self.loop = LoopThread("rollout-client")
        self.clients = tuple(ServerClient(entry.base_url, timeouts=timeouts, token=token) for entry in self.servers)

    def connect(self) -> tuple[ServerStatus, ...]:
        """Wait until every server is healthy (at most `timeout_s`), check it, and ask its world size.

        Raises ServerUnreachableError, ServerMismatchError (protocol, vocabulary), ConfigError (caps, lengths).
        """
        statuses = self.statuses()
        self.world_sizes = tuple(self.loop.run(gather(client.world_size() for client in self.clients)))
        self.chunk = chunk_size(
            decode_batch_size=self.config.decode_batch_size,
            server_world_sizes=self.world_sizes,
            num_ranks=self._num_ranks,
        )
        for entry, status, size in zip(self.servers, statuses, self.world_sizes, strict=True):
            log.info(
                "rollout server %s: group_port %d, world size %d, model %s, %s at ver %d",
                entry.base_url,
                entry.group_port,
                size,
                status.model,
                status.gate,
                status.ver,
            )
        log.info("rank %d of %d: at most %d requests in flight", self._rank, self._num_ranks, self.chunk)
        return statuses

    def statuses(self) -> tuple[ServerStatus, ...]:
        """Every server's state now, in configured order. Raises as `connect` does."""
        return tuple(self.loop.run(gather(self._look(client) for client in self.clients)))

    def generate_window(
        self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False
    ) -> list[list[Rollout]]:
        """See `RolloutBackend`: all of `stream`, in order. Without samples nothing is sent."""
        if not any(step.samples for step in window):
            return [[] for _ in window]
        rollouts = self.stream(window, global_step=global_step, greedy=greedy)
        try:
            ended = dict(rollouts)
        finally:
            rollouts.close()
        return split_window(window, [ended[i] for i in range(len(ended))])

    def stream(self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False) -> RolloutStream:
        """See `StreamingBackend`. Ranks may bring different numbers of samples, at different times."""
        asked = Requests.of(window, run_seed=self._run_seed, global_step=global_step)
        record = begin_record(window, global_step=global_step, chunk=self.chunk)
        record.began_at = time.time()
        job = _Job(
            asked=asked,
            requests=[infer_request(sample) for sample in asked.samples],
            config=self._decoding[greedy],
            record=record,
        )
        return _Rollouts(
            lambda on_answer: self.loop.submit(self._generate(job, on_answer)), lambda: recorded(record, self._on_call)
        )

    def close(self) -> None:
        """Close the connections and end the loop's thread, in bounded time. A second call does nothing."""
        if not self.loop.closed:
            self.loop.submit(gather(client.aclose() for client in self.clients)).result(CLOSE_S)
            self.loop.close(CLOSE_S)

    async def _look(self, client: ServerClient) -> ServerStatus:
        await client.wait_healthy()
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

    async def _generate(self, job: _Job, on_answer: Answered[Rollout]) -> None:
        plan = distribute(
            len(job.requests),
            rank=self._rank,
            num_ranks=self._num_ranks,
            server_world_sizes=self.world_sizes,
            decode_batch_size=self.config.decode_batch_size,
        )

        def on_rollout(i: int, rollout: Rollout) -> None:
            _check_version(job.record, rollout)
            on_answer(i, rollout)

        def on_split(requests: Sequence[int], error: ProjectError) -> None:
            job.record.splits.append((*job.asked.indices[requests[0]], len(requests)))

        dispatcher = Dispatcher(
            replace(plan, spans=_within_micro_steps(plan.spans, job.asked.indices)),
            send=lambda server, batch, answered: self._send(job, self.clients[server], batch, answered),
            on_answer=on_rollout,
            on_split=on_split,
        )
        await dispatcher.run()

    async def _send(self, job: _Job, client: ServerClient, batch: Batch, answered: Answered[Rollout]) -> None:
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
                seed=offset_seed(seed, i),
                expected_ver=self.expected_ver,
                base_url=client.base_url,
            )
            answered(batch.start + i, rollout)

        try:
            await client.infer(call, on_answer)
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
            log.debug("step %d.%d: %s", job.record.global_step, micro_step_idx, ended)


def _check_version(record: RolloutCallLog, rollout: Rollout) -> None:
    """The first answer says the version of all. Raises ServerMismatchError."""
    if record.ver is None:
        record.ver = rollout.ver
    elif rollout.ver != record.ver:
        raise ServerMismatchError(
            "the servers answered with different weight versions",
            found=f"ver {record.ver}, and {rollout.server_id} ver {rollout.ver}",
            wanted="one version for all rollouts of a call",
            remedy="sync weights before generating, and let no other learner use these servers",
        )


def _within_micro_steps(spans: Sequence[ServerSpan], indices: Sequence[RequestIndex]) -> tuple[ServerSpan, ...]:
    """The same spans, cut where a micro-step begins: the seeds of one call are consecutive."""
    edges = [i for i in range(1, len(indices)) if indices[i].micro_step_idx != indices[i - 1].micro_step_idx]
    cut = []
    for span in spans:
        inside = [span.start, *(edge for edge in edges if span.start < edge < span.stop), span.stop]
        cut += [replace(span, start=start, stop=stop) for start, stop in pairwise(inside)]
    return tuple(cut)
