"""Does the work of the endpoints, without HTTP: makes rollouts, scores answers, reports the state (R06, R10, R11, R13).

In: bodies of `shared/wire.py`. Out: their replies, rollouts as JSON.

Invariants:
- all new rollouts of a call are made by one version of the weights;
- answer `j` to a request is seeded with the request's seed + `j`. Without a seed, request `i` takes the call's seed +
  `i * n`;
- a call is inside the gate, which keeps weight updates out, until its last answer is made, however slowly its caller
  reads;
- a repeated uuid gets the same rollout, so that a retry after a lost reply never makes a second rollout, which would be
  trained twice. The rollout keeps the `ver` it was made with, also after a later sync.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from rollout_server.config import ServerConfig
from rollout_server.engine import Engine, named, score
from rollout_server.gate import Gate, WaitingGate
from rollout_server.metrics import Metrics
from rollout_server.openai_api import OpenAICall
from rollout_server.updates import WeightUpdates
from shared.aio import gather, relay
from shared.errors import NotFiniteError, ProjectError, RequestError, ServerBusyError, ServerError
from shared.generation import Generation
from shared.seeds import offset_seed
from shared.wire import (
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    ChoiceLogprobs,
    InferCall,
    Message,
    RequestConfig,
    RolloutInferRequest,
    RolloutInfos,
    RolloutOutput,
    ScoreCall,
    ScoreReply,
    ServerStatus,
    TokenLogprob,
    Usage,
    WeightVersionSpan,
)

T = TypeVar("T")
KEPT_ANSWERS = 4096  # number of recent answers that are kept for retries
MOST_REQUESTS = 65_536  # max requests of all running calls together
_MANY_CHARS = 1 << 18  # a request with more characters is hashed on a thread, because hashing it takes 1 ms or longer
_MANY_LOGPROBS = 1024  # an answer with more log-probabilities is converted to JSON on a thread (10 ms or longer)


class RolloutService:
    def __init__(self, engine: Engine, config: ServerConfig, server_id: str = "") -> None:
        """Set up the service. `server_id`: the name of this start of the server; "": a random one."""
        self.config = config
        self.engine = engine
        self.gate = Gate(engine.weights)
        self.waiting_gate = WaitingGate(
            self.gate, queue_timeout_s=config.queue_timeout_s, drain_timeout_s=config.drain_timeout_s
        )
        self.updates = WeightUpdates(engine, self.waiting_gate, config)
        self.metrics = Metrics(self.waiting_gate, self.updates.totals)
        self.server_id = server_id or uuid.uuid4().hex[:12]
        # Answers are kept as bytes. As bytes an answer takes 5 KiB instead of 16, and is no work for the garbage
        # collector.
        self._answers: RecentAnswers[bytes] = RecentAnswers(KEPT_ANSWERS)
        self._versions = _versions()
        self._num_requests = 0  # requests in calls that run now or wait for a weight update

    async def infer(self, call: InferCall) -> list[bytes]:
        """Return all rollouts of `answers` as JSON, in request order."""
        async with aclosing(self.answers(call)) as answers:
            outputs = {i: output async for i, output in answers}
        return [outputs[i] for i in range(len(call.infer_requests))]

    async def answers(self, call: InferCall) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield each request's index and the JSON of its `RolloutOutput`, as soon as the request ends. Close the
        generator to abort the remaining requests.

        Raises the errors of the gate, the media rules and the engine; one bad request makes the whole call fail.
        """
        check_number("infer_requests", len(call.infer_requests) * call.request_config.n, self.config)
        async with aclosing(relay(partial(self._answer_all, call))) as answers:
            async for answer in answers:
                yield answer

    async def _answer_all(self, call: InferCall, put: Callable[[tuple[int, bytes]], None]) -> None:
        start, config, num_answered = time.monotonic(), call.request_config, 0

        async def one(i: int, request: RolloutInferRequest, ver: int) -> None:
            nonlocal num_answered
            seed = request.seed
            if seed is None and config.seed is not None:
                seed = offset_seed(config.seed, i * config.n)
            put((i, await self._answer(i, request, config, seed, ver)))
            num_answered += 1

        try:
            async with self._admitted(len(call.infer_requests) * call.request_config.n) as ver:
                await gather(one(i, request, ver) for i, request in enumerate(call.infer_requests))
        except BaseException as error:
            outcome = type(error).__name__ if isinstance(error, ProjectError) else "cancelled"
            self.metrics.requests.labels(outcome).inc(len(call.infer_requests) - num_answered)
            raise
        finally:
            self.metrics.requests.labels("answered").inc(num_answered)
        self.metrics.infer_seconds.observe(time.monotonic() - start)

    async def complete(self, call: OpenAICall) -> bytes:
        """Return the answer of vLLM's OpenAI layer. Raises the errors of the gate, the media rules and the engine."""
        check_number("n", call.num_prompts * call.n, self.config)
        with self._counted():
            async with self._admitted(call.num_prompts * call.n) as ver:
                answer = await self._checked(self.engine.complete(call, ver))
                self.gate.check_sound()
        assert isinstance(answer, bytes), "a call without `stream` gets one answer"
        return answer

    async def completion_events(self, call: OpenAICall) -> AsyncGenerator[bytes]:
        """Yield the answer of `complete` as server-sent events. The call stays inside the gate until the last event is
        made."""
        check_number("n", call.num_prompts * call.n, self.config)
        async with aclosing(relay(partial(self._put_events, call))) as events:
            async for event in events:
                yield event

    async def _put_events(self, call: OpenAICall, put: Callable[[bytes], None]) -> None:
        with self._counted():
            async with self._admitted(call.num_prompts * call.n) as ver:
                events = await self.engine.complete(call, ver)
                assert isinstance(events, AsyncGenerator), "a call with `stream` gets events"
                await self._checked(self._put_all(events, put))

    async def _put_all(self, events: AsyncGenerator[str], put: Callable[[bytes], None]) -> None:
        async with aclosing(events):
            async for event in events:
                self.gate.check_sound()
                put(event.encode())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        outcome = "cancelled"
        try:
            yield
            outcome = "answered"
        except ProjectError as error:
            outcome = type(error).__name__
            raise
        finally:
            self.metrics.openai_calls.labels(outcome).inc()

    async def score(self, call: ScoreCall) -> ScoreReply:
        """Return log-probabilities under the served weights. A log-probability that is not finite poisons the
        server."""
        check_number("items", len(call.items), self.config)
        async with self._admitted(len(call.items)) as ver:
            return await self._checked(score(self.engine, call.items, ver))

    @asynccontextmanager
    async def _admitted(self, num_requests: int) -> AsyncIterator[int]:
        """Let `num_requests` requests in, and yield the version of the weights that answers them. Raises
        ServerBusyError if there are too many, and the errors of the gate."""
        # If no other call runs, a call of any size is let in, because waiting would not make room for it.
        if self._num_requests and self._num_requests + num_requests > MOST_REQUESTS:
            raise ServerBusyError(
                "too many requests are under way",
                found=f"{self._num_requests}, and {num_requests} more",
                wanted=f"at most {MOST_REQUESTS}",
                remedy="try again later",
            )
        self._num_requests += num_requests
        try:
            async with self.waiting_gate.call() as ver:
                yield ver
        finally:
            self._num_requests -= num_requests

    async def _checked(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. A log-probability in it that is not finite poisons the server."""
        try:
            return await work
        except NotFiniteError as error:
            self.gate.poison(str(error))
            raise

    async def reset_prefix_cache(self) -> None:
        """Empty the caches of prefixes and images. Raises SyncError at once if a request uses them."""
        await self.engine.reset_caches()

    def check_alive(self) -> None:
        """Raises ServerError once the engine is dead, or while it does not answer."""
        if self.engine.dead:
            remedy = "see the server's log, restart it"
            found = "an engine that has ended"
            raise ServerError("the engine died", found=found, wanted="a living engine", remedy=remedy).as_status(503)
        self.engine.check_answers()

    def check_ready(self) -> None:
        """Raises ServerError, ServerPoisonedError or ServerBusyError if a rollout would now be refused or have to
        wait."""
        self.check_alive()
        if self.gate.state == "poisoned":
            self.gate.try_enter()  # raises ServerPoisonedError if the weights may be wrong
        if self.gate.state != "serving":
            raise ServerBusyError("a weight update is under way", found=self.gate.state, wanted="serving")

    def status(self) -> ServerStatus:
        return ServerStatus(
            server_id=self.server_id,
            model=self.engine.model,
            dtype=self.engine.dtype,
            architecture=self.engine.architecture,
            vocab_size=self.engine.vocab_size,
            max_model_len=self.engine.max_model_len,
            gate=self.gate.state,
            poisoned_because=self.gate.poisoned_because,
            ver=self.gate.ver,
            weights=self.gate.served.weights,
            incarnation=self.gate.incarnation,
            world_size=self.config.world_size,
            group_host=self.config.group_host,
            gpus=self.engine.gpus,
            max_lora_rank=self.config.max_lora_rank if self.config.enable_lora else 0,
            in_flight=self.gate.in_flight,
            waiting=self.waiting_gate.waiting,
            versions=self._versions,
        )

    async def _answer(
        self, i: int, request: RolloutInferRequest, config: RequestConfig, seed: int | None, ver: int
    ) -> bytes:
        async def compute() -> bytes:
            generations = await self._checked(self.engine.generate(request, config, seed))
            # Another call may have found the weights wrong while this call ran.
            self.gate.check_sound()
            self.metrics.prompt_tokens.inc(len(generations[0].prompt_token_ids))
            self.metrics.response_tokens.inc(sum(len(one.response_token_ids) for one in generations))
            infos = RolloutInfos(
                **self.gate.served.model_dump(),
                seed=seed,
                server_id=self.server_id,
                uuid=request.uuid,
                pixels=generations[0].pixels,
            )
            num_logprobs = sum(len(one.logprobs or ()) for one in generations)
            # A request's JSON is written as soon as the request ends. Writing the JSON of 256 rollouts at the end of a
            # call took 13 ms, in which the GPU was idle.
            return await _beside(num_logprobs > _MANY_LOGPROBS, self._output, generations, infos)

        with named(f"infer_requests.{i}"):
            num_chars = sum(map(len, request.images)) + sum(map(_num_chars, request.messages))
            fingerprint = await _beside(num_chars > _MANY_CHARS, _fingerprint, request, config, seed)
            return await self._answers.get(request.uuid, fingerprint, compute)

    def _output(self, generations: Sequence[Generation], infos: RolloutInfos) -> bytes:
        """Return the JSON of a `RolloutOutput`."""
        whole = self._without_choices(generations, infos).model_dump_json().encode()
        # Choices are written one by one, because a single call for all may block other threads for a second.
        choices = (
            self._choice(index, one, infos.ver).model_dump_json().encode() for index, one in enumerate(generations)
        )
        # This text cannot occur inside a string of the JSON, where its quotes would be escaped.
        before, _, after = whole.partition(b'"choices":[]')
        return before + b'"choices":[' + b",".join(choices) + b"]" + after

    def _without_choices(self, generations: Sequence[Generation], infos: RolloutInfos) -> RolloutOutput:
        first = generations[0]
        num_prompt = len(first.prompt_token_ids)
        num_responses = sum(len(one.response_token_ids) for one in generations)
        response = ChatCompletionResponse(
            id=infos.uuid,
            created=int(time.time()),
            model=self.config.model_name,
            choices=[],
            usage=Usage(
                prompt_tokens=num_prompt, completion_tokens=num_responses, total_tokens=num_prompt + num_responses
            ),
        )
        return RolloutOutput(
            response=response,
            response_token_ids=first.response_token_ids,
            prompt_token_ids=first.prompt_token_ids,
            rollout_logprobs=[one.logprobs for one in generations if one.logprobs is not None],
            rollout_infos=infos,
        )

    def _choice(self, index: int, generation: Generation, ver: int) -> Choice:
        logprobs = None
        if generation.logprobs is not None:
            texts = [self.engine.text_of([token_id]) for token_id in generation.response_token_ids]
            logprobs = ChoiceLogprobs(
                content=[
                    TokenLogprob(token=text, bytes=list(text.encode(errors="replace")), logprob=logprob)
                    for text, logprob in zip(texts, generation.logprobs, strict=True)
                ]
            )
        return Choice(
            index=index,
            message=ChatMessage(content=generation.text),
            finish_reason=generation.finish_reason,
            token_ids=generation.response_token_ids,
            logprobs=logprobs,
            stop_token_id=generation.stop_token_id,
            stop_logprob=generation.stop_logprob,
            weight_versions=[WeightVersionSpan(version=str(ver), start=0, end=len(generation.response_token_ids))],
        )


def check_number(field: str, number: int, config: ServerConfig) -> None:
    """Raises RequestError (413) if `number` is above the limit for one call."""
    if number > config.max_requests_per_call:
        raise RequestError(
            f"{field}: too many for one call",
            found=str(number),
            wanted=f"at most {config.max_requests_per_call}",
            remedy="send several calls, or raise the server's max_requests_per_call",
        ).as_status(413)


@dataclass
class _Entry(Generic[T]):
    fingerprint: str
    task: asyncio.Task[T]
    num_waiting: int = 0


class RecentAnswers(Generic[T]):
    """Recent answers by request uuid, on one event loop.

    A repeat of a request that still runs waits for the same answer. The same uuid with other content is refused.
    Failures are not kept. The least recently used answer is forgotten first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()

    async def get(self, uuid: str, fingerprint: str, compute: Callable[[], Coroutine[object, None, T]]) -> T:
        """Return the kept answer of this uuid. If there is none, return the result of `compute()`. Raises RequestError
        if the uuid was used for another request, and the errors of `compute`. If all waiting callers are cancelled,
        `compute` is cancelled too.
        """
        entry = self._entries.get(uuid)
        if entry is None:
            entry = self._entries[uuid] = _Entry(fingerprint, asyncio.create_task(compute()))
        elif entry.fingerprint != fingerprint:
            raise RequestError(
                f"uuid {uuid!r} was used for another request",
                found="other messages, images or decoding settings",
                wanted="a uuid per request",
                remedy="give every request a fresh uuid; only an exact repeat may reuse it",
            )
        self._entries.move_to_end(uuid)
        entry.num_waiting += 1
        try:
            # A caller that hangs up must not end the computation for others with the same uuid.
            return await asyncio.shield(entry.task)
        finally:
            entry.num_waiting -= 1
            self._tidy(uuid, entry)

    def _tidy(self, uuid: str, entry: _Entry[T]) -> None:
        if entry.num_waiting == 0 and not entry.task.done():
            entry.task.cancel()
        # A task that is about to be cancelled counts as failed, so that a repeated request computes a new answer.
        failed = entry.task.cancelled() or entry.task.cancelling() or not entry.task.done() or entry.task.exception()
        if failed and entry.num_waiting == 0 and self._entries.get(uuid) is entry:
            del self._entries[uuid]
        while len(self._entries) > self._size:
            oldest = next((key for key, old in self._entries.items() if old.task.done()), None)
            if oldest is None:
                return
            del self._entries[oldest]


async def _beside(large: bool, work: Callable[..., T], *arguments: object) -> T:
    """Return the result of `work`. If `large`, the work runs on a thread, so the event loop can serve other calls."""
    return await asyncio.to_thread(work, *arguments) if large else work(*arguments)


def _num_chars(message: Message) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text or "") + len(part.source or "") for part in message.content)


def _fingerprint(request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> str:
    """Return a digest of all inputs that determine an answer. `seed`: the request's seed, which replaces the
    call's seed."""
    digest = hashlib.blake2b(digest_size=16)
    for value in (request.model_dump(exclude={"data_dict"}), config.model_copy(update={"seed": seed}).model_dump()):
        _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: object) -> None:
    """Hash a value and all values in it."""
    if isinstance(value, str):
        # Type and length are hashed before the value, so that different values never give the same bytes. JSON is not
        # used: it would copy a long text several times, and no other thread could run meanwhile.
        content = value.encode(errors="surrogatepass")
        digest.update(b"s%d:" % len(content))
        digest.update(content)
    elif isinstance(value, dict):
        digest.update(b"d%d:" % len(value))
        for part in value.items():
            _feed(digest, part)
    elif isinstance(value, list | tuple):
        digest.update(b"l%d:" % len(value))
        for part in value:
            _feed(digest, part)
    else:
        digest.update(f"{type(value).__name__}{value!r}:".encode())


def _versions() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": nccl,
    }
