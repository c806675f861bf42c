"""The vLLM engine behind the server, for vLLM 0.26 to 0.33 on CUDA and CPU. vLLM's engine API is used only here
and in `openai_api.py`.

In: requests, decoding settings, calls to the workers. Out: generations, log-probabilities, workers' replies, or an
error of the project's tree. Everything runs on one event loop. On CPU the engine needs the environment variables that
`__main__` sets.

Invariants: a cancelled call aborts its requests. Once the engine is dead, every call raises. All scores of one reply
come from one version of the weights, if the caller is inside the gate (`gate.py`), which keeps weight updates out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from rollout_server.config import ServerConfig
from rollout_server.decoding import PixelShare
from rollout_server.openai_api import OpenAICall, OpenAILayer, given_back, image_parts, texts
from rollout_server.processes import cpu_seconds
from rollout_server.prompts import Renderer, prompt_key, too_long
from rollout_server.stalls import StallWatch
from shared.aio import gather
from shared.canary import cached_positions
from shared.checkpoint import checkpoint_digest, model_folder, signature
from shared.engine_images import EngineImages, Look, beginning
from shared.errors import ConfigError, RequestError, ServerError, SyncError
from shared.families import check_folder
from shared.generation import (
    TRIES,
    Generation,
    Prompt,
    Scores,
    cached_scoring,
    engine_args,
    read_cached_score,
    read_generation,
    read_scores,
    sampling_params,
    says_too_long,
    scoring,
    stop_token_ids,
    was_given_back,
)
from shared.processes import descendants
from shared.seeds import offset_seed
from shared.sync.adapter_loading import adapter_request
from shared.waits import time_limit
from shared.wire import ErrorBody, RequestConfig, RolloutInferRequest, ScoreItem, ScoreReply, WireModel

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
_MAX_TOKENS = "request_config.max_tokens"
END_S = 12.0  # max wait for the engine's processes to end; containers allow 15 s beyond `shutdown_timeout_s`
_MOST_HELD_S = 1.0  # max seconds of a pause of the engine; requests that arrive during a pause run in one engine step

# Max tokens of a step that is captured as a CUDA graph. Sizes that vLLM would not capture by itself are captured in
# multiples of `_CAPTURED_EVERY` tokens.
_MOST_CAPTURED, _CAPTURED_EVERY = 512, 64
_GRAPH_ARGS = {
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "performance_mode",
    "speculative_config",
}


class WorkerReply(WireModel):
    """One worker's answer to a call of `SyncWorker`. Errors are sent as JSON too, because an exception in a worker
    could end the engine."""

    error: ErrorBody | None = None
    done: bool = True  # True: joining the group, or the update, has ended
    runs_meanwhile: bool = False  # True: the model can run during the load of the weights
    num_tensors: int = 0  # number of tensors that the whole update loaded
    weights: str = ""  # digest of all loaded weights, the same on every worker of every server
    num_strangers: int = 0  # connections without the group's secret, dropped since the worker started


class Engine(Protocol):
    """The interface to vLLM for the rest of the server; tests use a fake engine."""

    model: str
    dtype: str
    architecture: dict[str, str]
    gpus: list[str]  # the workers' GPUs, by UUID; [] on CPU
    weights: str  # digest of the checkpoint's weights
    vocab_size: int
    max_model_len: int

    @property
    def dead(self) -> bool: ...
    async def generate(
        self, request: RolloutInferRequest, config: RequestConfig, seed: int | None
    ) -> list[Generation]: ...
    def text_of(self, token_ids: list[int]) -> str: ...
    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores: ...
    async def models(self) -> bytes: ...
    async def complete(self, call: OpenAICall, ver: int) -> bytes | AsyncGenerator[str]: ...
    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]: ...
    async def reset_caches(self) -> None: ...
    def together(self, items: Sequence[ScoreItem]) -> AbstractAsyncContextManager[None]: ...
    def serve_adapter(self, name: str | None) -> None: ...
    def check_answers(self) -> None: ...
    async def watch(self) -> None: ...
    def shutdown(self) -> None: ...


async def score(engine: Engine, items: Sequence[ScoreItem], ver: int, *, through_cache: bool = False) -> ScoreReply:
    """Return the log-probabilities of given answers, for `/score/` and the canary. `through_cache` and errors: see
    `VllmEngine.score`."""

    async def one(i: int, item: ScoreItem) -> Scores:
        with named(f"items.{i}"):
            return await engine.score(item.request, item.response_token_ids, through_cache=through_cache)

    scores = await gather(one(i, item) for i, item in enumerate(items))
    return ScoreReply(
        ver=ver,
        logprobs=[one.logprobs for one in scores],
        cached_logprobs=[one.cached_logprobs for one in scores] if all(one.cached_logprobs for one in scores) else [],
        prompt_token_ids=[one.prompt_token_ids for one in scores],
        pixels=[one.pixels for one in scores] if any(item.request.pixels for item in items) else [],
    )


@contextlib.contextmanager
def named(field: str) -> Iterator[None]:
    """Put `field`, the request's position in the call, before the message of a RequestError."""
    try:
        yield
    except RequestError as error:
        raise error.named(field) from error


@dataclass
class _SharedPrompt:
    """A prompt that is rendered once for several requests. `share` counts its images' pixels."""

    rendering: asyncio.Future[Prompt]
    share: PixelShare
    num_users: int = 0


class VllmEngine:
    def __init__(self, config: ServerConfig) -> None:
        """Start the engine, and wait until the model is loaded. Raises ConfigError if the model's family does not
        work or is not tested, or if vLLM refuses the settings."""
        self.model = config.model
        self._path = model_folder(config.model, "model")
        check_folder(self._path, key="model", allow_untested=config.allow_untested_family)
        self._renderer = Renderer(self._path, config)
        self._llm: AsyncLLM = _start(_engine_args(self._path, config), config)
        # The list lacks the image decoders, which start later: their CPU time says nothing about the engine.
        self._processes = descendants(os.getpid())
        model_config = self._llm.model_config
        self.dtype = str(model_config.dtype).removeprefix("torch.")
        self.architecture = signature(model_config.hf_config.to_dict())
        self.gpus = _gpus(config.world_size)
        self.vocab_size = int(model_config.get_vocab_size())
        self.max_model_len = self._renderer.max_model_len = int(model_config.max_model_len)
        self._caches_prefixes = bool(self._llm.vllm_config.cache_config.enable_prefix_caching)
        self._stop_ids = stop_token_ids(model_config, self._renderer.tokenizer)
        self._ids = itertools.count()
        self._rendering: dict[Hashable, _SharedPrompt] = {}  # prompts that are being rendered, by `prompt_key`
        self._adapter: LoRARequest | None = None
        self._openai = OpenAILayer(
            self._llm, model=config.model_name, renderer=self._renderer, adapter=lambda: self._adapter
        )
        self._stalls = StallWatch(config.engine_stall_s)
        # Tokenizing and reading images on threads keeps the event loop free for probes.
        self._threads = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="render")
        self._images = EngineImages(self._llm.renderer, self._threads)
        self.weights = checkpoint_digest(self._path)
        # Objects made at start-up are never freed. Without the freeze each full garbage collection took 0.4 s.
        gc.collect()
        gc.freeze()

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        """Return `config.n` responses, the first one seeded with `seed`. Raises MediaError, RequestError,
        PromptTooLongError, ServerError, NotFiniteError."""
        # `max_tokens` null asks for all tokens that fit; at least one must fit.
        num_new = config.max_tokens or 1
        seeds = [None if seed is None else offset_seed(seed, j) for j in range(config.n)]
        async with self._rendered(request) as prompt:
            self._check_length(len(prompt.token_ids), _MAX_TOKENS, num_new)
            look = self._look(request, prompt)
            with self._vllm_errors():
                # Each answer is made by a request of its own, not by vLLM's `n`. So the n answers are the same as for n
                # requests with n seeds. The responses share their images, so only the first one reports the pixels.
                answers = await gather(
                    self._generation(prompt, sampling_params(config, own), None if j else look)
                    for j, own in enumerate(seeds)
                )
        # The length is checked again, because the engine has expanded the image placeholders.
        self._check_length(len(answers[0].prompt_token_ids), _MAX_TOKENS, num_new)
        return answers

    async def _generation(self, prompt: Prompt, params: SamplingParams, look: Look | None) -> Generation:
        output = await self._run(prompt, params, look)
        answer = read_generation(output, self._stop_ids, self._renderer.text_of)
        return answer if look is None else replace(answer, pixels=await look.result())

    def text_of(self, token_ids: list[int]) -> str:
        """Return the text of the tokens, special tokens included."""
        return self._renderer.text_of(token_ids)

    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores:
        """Return the natural log-probabilities of the response after the prompt. `through_cache`: also score through
        the prefix cache, if the engine has one. Raises the errors of `generate`."""
        self._check_ids(response_token_ids)
        async with self._rendered(request) as prompt:
            self._check_length(len(prompt.token_ids) + 1, "response_token_ids:", len(response_token_ids))
            reads = cached_scoring(prompt, response_token_ids) if through_cache and self._caches_prefixes else []
            whole, params = scoring(prompt, response_token_ids)
            look = self._look(request, whole)
            with self._vllm_errors():
                # vLLM renders the prompt once for all of these requests, because that takes it 1 to 2 ms each time.
                rendered = await (self._images.render(whole) if look is None else look.render())
                output, *cached = await gather(
                    [
                        self._run(whole, params, look, rendered),
                        *(self._run(*read, rendered=beginning(whole, rendered, read[0])) for read in reads),
                    ]
                )
                pixels = None if look is None else await look.result()
        return replace(
            read_scores(output, len(response_token_ids)),
            cached_logprobs=[read_cached_score(one) for one in cached],
            pixels=pixels,
        )

    async def models(self) -> bytes:
        """Return the body of `/v1/models`."""
        return await self._openai.models()

    async def complete(self, call: OpenAICall, ver: int) -> bytes | AsyncGenerator[str]:
        """Return the answer of vLLM's OpenAI layer, or its events if `call.stream`. `ver`: the version of the weights.
        Raises the errors of `generate`."""
        with contextlib.ExitStack() as stack:
            share = stack.enter_context(contextlib.closing(self._renderer.decoders.share()))
            for text in texts(call):
                await self._on_thread(self._renderer.check_length, text, share)
            images = await self._on_thread(self._renderer.decoders.load, image_parts(call), share)
            with self._vllm_errors():
                async with self._stalls.guard():
                    answer = await self._openai.complete(call, images, ver)
            return answer if isinstance(answer, bytes) else self._guarded(answer, stack.pop_all())

    async def _guarded(self, events: AsyncGenerator[str], share: contextlib.ExitStack) -> AsyncGenerator[str]:
        with share, self._vllm_errors():
            async with self._stalls.guard(), contextlib.aclosing(events):
                async for event in events:
                    yield event

    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
        """Call a method of `SyncWorker` on every worker. Raises the first error that a worker answers."""
        async with self._stalls.guard():
            return await self._call_workers(method, *args)

    def check_answers(self) -> None:
        """Raises ServerError if the engine has not answered for `engine_stall_s`."""
        self._stalls.check()

    async def watch(self) -> None:
        """Watch for a stalled engine until cancelled."""
        await self._stalls.run(lambda: self._call_workers("sync_ping"), lambda: cpu_seconds(self._processes))

    async def _call_workers(self, method: str, *args: object) -> list[WorkerReply]:
        """Call all workers, without a deadline in vLLM. vLLM does not number the replies of workers in other processes.
        So after a timeout, a late reply would be taken for the reply of the next call, or for a step's tokens. A
        stopped worker stops the engine; `StallWatch` notices that."""
        core = self._llm.engine_core
        call = (method, None, args, None)
        if len(getattr(core, "core_engines", ())) > 1:
            # The public call returns only the first data-parallel engine's answers, and hides errors of the other
            # engines.
            calls = [core._call_utility_async("collective_rpc", *call, engine=engine) for engine in core.core_engines]
        else:
            calls = [core.collective_rpc_async(*call)]
        try:
            # The gather is shielded, because vLLM cannot cancel a worker call, and its answer must still be received.
            answers = [answer for one in await asyncio.shield(asyncio.gather(*calls)) for answer in one]
        except Exception as error:
            raise SyncError(f"{method} failed in a worker", found=f"{type(error).__name__}: {error}") from error
        replies = [WorkerReply.model_validate_json(answer) for answer in answers]
        for reply in replies:
            if reply.error is not None:
                raise reply.error.to_exception()
        return replies

    async def reset_caches(self) -> None:
        """Empty the prefix and encoder caches. Raises SyncError if a request still uses the prefix cache."""
        with self._vllm_errors():
            async with self._stalls.guard():
                # vLLM's encoder cache finds embeddings by the image's hash alone, so it would return embeddings that
                # old weights computed. The cache of processed images can stay: pixels do not depend on weights.
                prefix_reset, _ = await asyncio.gather(self._llm.reset_prefix_cache(), self._llm.reset_encoder_cache())
        if not prefix_reset:
            raise SyncError(
                "the prefix cache cannot be reset",
                found="blocks in use",
                wanted="no running request",
                remedy="try again",
            )

    @contextlib.asynccontextmanager
    async def together(self, items: Sequence[ScoreItem]) -> AsyncIterator[None]:
        """Pause the engine until the scoring requests of all items are sent, so that they run in one step if they fit.
        The caller must be inside the gate.

        Loading images may take long, or wait for memory, so the pause ends after `_MOST_HELD_S`. With several replicas
        there is no pause: replicas would need extra steps to agree on a pause."""
        core = self._llm.engine_core
        if len(getattr(core, "core_engines", ())) > 1:
            yield
            return
        answers = [len(item.response_token_ids) for item in items]
        left = sum(1 + (len(cached_positions(n)) if self._caches_prefixes else 0) for n in answers)
        # Requests reach the engine one by one. Without the pause, the first would run in an engine step of its own.
        sent, send = asyncio.Event(), core.add_request_async

        # Requests are counted here, because `AsyncLLM` does not report what it has sent.
        async def counted(request: object) -> None:
            nonlocal left
            await send(request)
            left -= 1
            if left == 0:
                sent.set()

        async def go_on() -> None:
            with contextlib.suppress(TimeoutError):
                async with time_limit(_MOST_HELD_S):
                    await sent.wait()
            # The resume call is sent even to a stalled engine, so that the engine is not still paused when it answers
            # again.
            resuming = asyncio.ensure_future(core.resume_scheduler_async())
            with self._vllm_errors():
                async with self._stalls.guard():
                    await asyncio.shield(asyncio.gather(resuming, holding))

        core.add_request_async = counted
        # The engine runs calls in order, so the answer to the pause need not be awaited here. The argument False keeps
        # the caches.
        holding = asyncio.ensure_future(core.pause_scheduler_async("keep", False))
        going_on = asyncio.create_task(go_on())
        try:
            # The pause must be sent before any request, and its task begins only when this coroutine waits.
            await asyncio.sleep(0)
            yield
        finally:
            core.add_request_async = send
            sent.set()
            # The wait continues even if this call is cancelled, because a paused engine answers no request.
            await asyncio.shield(going_on)

    def serve_adapter(self, name: str | None) -> None:
        """From now on, answer requests with the adapter that the workers hold; None: without an adapter."""
        self._adapter = name and adapter_request(name)

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._renderer.decoders.close()
        # By default vLLM kills its processes after 5 s, too early on a busy machine. Older versions have no `timeout`.
        limit = {"timeout": END_S} if "timeout" in inspect.signature(self._llm.shutdown).parameters else {}
        self._llm.shutdown(**limit)
        # vLLM's destructor would call `shutdown` again while Python exits.
        self._llm.shutdown = lambda: None
        # Some libraries warn about objects that still exist at exit, so garbage collection may free all objects again.
        gc.unfreeze()

    @contextlib.asynccontextmanager
    async def _rendered(self, request: RolloutInferRequest) -> AsyncIterator[Prompt]:
        """Yield the rendered prompt. Requests that come while the same prompt is rendered share it (`grpo` asks for
        several answers). The prompt's images stay in memory until the last `with` block ends. Cancelling all of these
        requests stops the decoding."""
        key = prompt_key(request)
        shared = self._rendering.get(key)
        if shared is None:
            share = self._renderer.decoders.share()
            rendering = asyncio.ensure_future(self._on_thread(self._renderer.render, request, share))
            shared = self._rendering[key] = _SharedPrompt(rendering, share)
        shared.num_users += 1
        try:
            prompt = await asyncio.shield(shared.rendering)
            # A later request reads its images itself, because a file or a URL may have changed.
            self._forget(key, shared)
            yield prompt
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                self._forget(key, shared)
                shared.rendering.cancel()
                shared.share.close()

    def _forget(self, key: Hashable, shared: _SharedPrompt) -> None:
        if self._rendering.get(key) is shared:
            del self._rendering[key]

    async def _on_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _look(self, request: RolloutInferRequest, prompt: Prompt) -> Look | None:
        return self._images.look(prompt) if request.pixels and prompt.images else None

    async def _run(
        self,
        prompt: Prompt,
        params: SamplingParams,
        look: Look | None = None,
        rendered: EngineInput | None = None,
    ) -> RequestOutput:
        """Return the finished output. `look`: reads the processed images of this request. `rendered`: the prompt as
        vLLM renders it, for the first try. Raises ServerBusyError if the engine gives the request back
        (`was_given_back`) in all tries."""
        for _ in range(TRIES):
            asked = rendered or (prompt.for_engine() if look is None else await look.render())
            answers = self._llm.generate(asked, params, str(next(self._ids)), lora_request=self._adapter)
            async with self._stalls.guard():
                output = [output async for output in answers][-1]
            if not was_given_back(output):
                return output
            # The prompt is rendered anew for another try, because an engine gives a request back if its image is
            # missing in vLLM's cache.
            rendered = None
        raise given_back()

    @contextlib.contextmanager
    def _vllm_errors(self) -> Iterator[None]:
        """Raise vLLM's errors as errors of this project."""
        from vllm import exceptions
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # vLLM refuses a request with this error; older versions raise ValueError only.
        refused: type[Exception] = getattr(exceptions, "VLLMClientError", ValueError)
        try:
            yield
        except (EngineDeadError, EngineGenerateError) as error:
            # vLLM refuses a wrong request in this way.
            if not self.dead and isinstance(error.__cause__, ValueError):
                raise RequestError("the engine refuses the request", found=str(error.__cause__)[:500]) from error
            raise ServerError(
                "the engine died" if self.dead else "the engine failed on this request",
                found=f"{type(error).__name__}: {error.__cause__ or error}",
                remedy="see the server's log, and restart it",
            ) from error
        except (ValueError, refused) as error:
            if says_too_long(error):
                raise too_long(str(error), self.max_model_len) from error
            raise RequestError("the engine refuses the request", found=str(error)[:500]) from error

    def _check_length(self, num_prompt: int, field: str, num_response: int) -> None:
        if num_prompt + num_response > self.max_model_len:
            found = f"{num_prompt} tokens of messages and images, and {field} {num_response}"
            raise too_long(found, self.max_model_len)

    def _check_ids(self, token_ids: list[int]) -> None:
        outside = next((i for i in token_ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise RequestError(
                "a token id lies outside the vocabulary",
                found=str(outside),
                wanted=f"0 to {self.vocab_size - 1}",
                remedy="serve the model that the learner trains",
            )


def _start(engine_args: AsyncEngineArgs, config: ServerConfig) -> AsyncLLM:
    """Start an `AsyncLLM`. On CPU the engine's process is forked if this process has a single thread."""
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    # A fork copies locks, but not the threads that hold them, so only a process with one thread is forked.
    if current_platform.is_cpu() and config.world_size == 1 and _num_threads() == 1:
        # vLLM's CPU backend would spawn the process, which then spends half of the server's start on imports.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(
        vllm_config,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )


def _num_threads() -> int:
    """Return the number of threads of this process; 0 if it is not known. The number includes OpenMP's threads, which
    Python does not know."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _gpus(num_workers: int) -> list[str]:
    """Return the workers' devices by UUID, in the driver's spelling; [] on CPU."""
    from vllm.platforms import current_platform

    return [] if current_platform.is_cpu() else [current_platform.get_device_uuid(i) for i in range(num_workers)]


def graph_args(config: ServerConfig) -> dict[str, object]:
    """Return vLLM's argument for the step sizes, in tokens, that are captured as CUDA graphs. {} if the user sets the
    sizes, or vLLM's default sizes are enough.

    vLLM's default sizes end at twice `max_num_seqs`."""
    most = min(2 * config.max_num_seqs, _MOST_CAPTURED)
    if config.enforce_eager or most == _MOST_CAPTURED or _GRAPH_ARGS & config.engine_args.keys():
        return {}
    own = {n for n in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if n <= most}
    # Newer versions of vLLM capture this size too, because a decoding step that is padded to more tokens than
    # `max_num_seqs` has no full graph.
    own.add(config.max_num_seqs)
    # A step that reads several short prompts (such as a weight check without images) is larger than any decoding step.
    # Without a CUDA graph of its size Python launches each layer, and the device waits.
    larger = {n for n in range(_CAPTURED_EVERY, _MOST_CAPTURED + 1, _CAPTURED_EVERY) if n > most}
    return {"cudagraph_capture_sizes": sorted(own | larger)}


def _engine_args(path: str, config: ServerConfig) -> AsyncEngineArgs:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    settings = engine_args(
        model=path,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        on_cpu=on_cpu,
        trust_remote_code=config.trust_remote_code,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        worker_extension_cls="rollout_server.worker.SyncWorker",
    )
    if on_cpu:
        if config.tensor_parallel_size == 1:
            # The worker runs inside the engine's process, as on CUDA, which saves a third of the imports and of the
            # memory. The full name is needed: on CPU vLLM turns "uni" into "mp", to choose OpenMP's threads per worker.
            # In this worker `cpu_threads` sets the number of threads; without it torch takes one per core.
            settings["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    else:
        settings |= graph_args(config)
    try:
        return AsyncEngineArgs(**{**settings, **config.engine_args})
    except TypeError as error:
        raise ConfigError(
            "engine_args: vLLM does not know an argument",
            found=str(error),
            wanted="arguments of vLLM's AsyncEngineArgs",
            remedy="check the spelling against the installed version of vLLM",
        ) from error
