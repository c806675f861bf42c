"""vLLM inside the learner's job: `vllm.mode: colocate` (R02, R03, R04, R10, R11, R21).

`ColocatedEngine` is vLLM in the learner's own process, on the learner's device. Only this module calls vLLM's engine.
One engine spans `tensor_parallel_size` ranks. All ranks of an engine run the same requests in the same order.
Invariants:
- vLLM works only inside the block `awake`, in which the training state is moved off the device. On CUDA the engine
  sleeps outside the block: its weights are in host memory. If the device has room for the engine and for training, as
  estimated or measured, the engine stays awake, which saves copying its weights. On CPU vLLM cannot sleep, and need
  not;
- training's random generators, and torch's folder for compiled code, are left as they were;
- `ver` is the version of the weights that were loaded and checked; None: the weights are unchecked, and may be zeros
  before the first load;
- answers are computed with the adapter that was loaded last. `load` removes that adapter.

`learner/run/environment.py` must have prepared the environment before vLLM is imported.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from learner.config.modes import ROLLOUT
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.loss import is_out_of_memory
from learner.policy.offload import Offload
from learner.policy.parallel import Ranks
from learner.rollout.engine_start import (
    all_told_by,
    inspecting_here,
    keeping_compiler_variables,
    keeping_random_state,
    unread_weights,
)
from shared.checkpoint import model_folder
from shared.engine_images import EngineImages
from shared.errors import ConfigError, ProjectError, PromptTooLongError, RolloutError, SyncError
from shared.generation import (
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
)
from shared.private import locked_folder, note_processes, remove_semaphores
from shared.sync.adapter_loading import AdapterLoad, BaseWeightLoad, adapt_linear_layers_only, adapter_request
from shared.sync.loading import CopyMemory, WeightLoad
from shared.wire import RequestConfig

_PIECE_BYTES = 64 * 2**20  # min bytes of the weights that are given to vLLM at a time.
# An engine stays awake only if this fraction of the device's memory is still free with engine and training in memory.
ROOM = 0.08
SURPLUS = 1.5  # the estimated memory of learning is multiplied by this, until the memory has been measured
LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)  # adapter ranks that vLLM accepts
GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # vLLM's settings for CUDA graphs of uncompiled code
if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

log = logging.getLogger("learner.rollout")
ELSEWHERE = "or use another backend: vllm.mode: server, or rollout_backend: hf"


class ColocatedEngine:
    """vLLM's engine in the learner's process. `model`: a checkpoint with the architecture of the trained model. The
    checkpoint's weights are read only with `reads_weights`, because each sync overwrites them. `lora_rank`: rank of the
    adapters that will be loaded; 0: no adapters, and decoding is a little faster. `keeps_awake`: True if nothing else
    needs the device, so that the engine never sleeps. `learning_bytes`: estimated bytes of device memory for learning,
    without the weights; None: not known."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        *,
        model: str,
        dtype: torch.dtype,
        ranks: Ranks,
        tensor_parallel_size: int,
        offload: Offload,
        lora_rank: int = 0,
        reads_weights: bool = False,
        keeps_awake: bool = False,
        learning_bytes: int | None = None,
    ) -> None:
        """Start the engine. Every rank that shares the engine must call this. Raises ConfigError if vLLM cannot start
        with these settings and the memory that is free."""
        self.ver: int | None = None
        self.dtype, self.tensor_parallel_size = dtype, tensor_parallel_size
        self.max_lora_rank = next((r for r in LORA_RANKS if r >= lora_rank), LORA_RANKS[-1]) if lora_rank else 0
        self._config, self._ranks, self._offload = config, ranks, offload
        self._copies = CopyMemory()
        self._sleeps = ranks.device.type == "cuda" and not keeps_awake
        self._asleep = self._stays_awake = False
        self._num_loads = 0
        self._reads_weights = reads_weights
        folder = model_folder(model, "model.path")
        # vLLM measures free memory while it starts, so training's state is moved off the device.
        with offload.away(), keeping_random_state(ranks.device), keeping_compiler_variables():
            self._llm = self._start(folder)
            # Remove the shared memory of a killed run's engine. If this process is killed, the next start removes its
            # shared memory in the same way.
            left = locked_folder("engine-", Path(tempfile.gettempdir()), leave=remove_semaphores)
            note_processes(left, [os.getpid()])
            # The first sleep takes longest, because it allocates memory on the host.
            if self._sleeps and learning_bytes is not None and self._may_stay_awake():
                self._stays_awake = self._has_room(int(SURPLUS * learning_bytes))
            self._rest()
        model_config = self._llm.llm_engine.model_config
        self.max_model_len = int(model_config.max_model_len)
        self._caches_prefixes = bool(self._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)
        self._stop_token_ids = stop_token_ids(model_config, self._llm.get_tokenizer())
        self._adapter: LoRARequest | None = None  # the adapter used for answers; None: no adapter
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pixels")
        self._images = EngineImages(self._llm.llm_engine.renderer, self._threads)
        self._adapter_numbers = itertools.count(1)

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's module of the served model on this rank."""
        model: torch.nn.Module = self._runner.model
        return model

    @property
    def _runner(self) -> GPUModelRunner:
        return self._worker.model_runner

    @property
    def _worker(self) -> Worker:
        return self._llm.llm_engine.model_executor.driver_worker.worker

    @property
    def leaves_training(self) -> bool:
        """True if the engine is awake and training's state stays on the device. The trained model can then compute at
        the same time as the engine."""
        return not self._asleep and not self._offload.moves

    @contextmanager
    def awake(self, *, after_update: bool = False) -> Iterator[None]:
        """Keep the engine ready to load, generate and score inside this block. `after_update`: training may have
        computed since the last block, so the free memory can be measured."""
        with self._offload.away(), keeping_random_state(self._ranks.device):
            if self._asleep:
                # Before the first load training has not computed, so free memory would say nothing.
                measures = after_update and self._num_loads > 0 and self._may_stay_awake()
                held = torch.cuda.memory_reserved(self._ranks.device) if measures else 0
                self._wake_up()
                if measures:  # waking up frees cached device memory, but training will allocate it again
                    self._stays_awake = self._has_room(held - torch.cuda.memory_reserved(self._ranks.device))
            elif self._stays_awake and self.tensor_parallel_size > 1:
                # Each rank measures its own device, so the engine may have slept on some of its ranks only. vLLM
                # empties the caches of a rank that sleeps. Ranks with different caches would schedule different tokens,
                # and wait for each other forever.
                self._reset_caches()
            try:
                yield
            finally:
                self._rest()

    def generate(
        self,
        prompts: Sequence[Prompt],
        config: RequestConfig,
        seeds: Sequence[int],
        *,
        looks: Sequence[bool] | None = None,
    ) -> list[Generation]:
        """Return one response per prompt and seed, in order; at most `decode_batch_size` per device are decoded at
        once. `looks`: for each prompt, True if its response gets digests of the processed images (`Generation.pixels`).
        Raises PromptTooLongError, RolloutError."""
        num_new = config.max_tokens or 1
        for prompt in prompts:
            # A prompt that is certainly too long is refused before anything is generated.
            self._check_length(len(prompt.token_ids), num_new)
        looks = looks or [False] * len(prompts)
        with self._images.looking(prompts, looks) as seen:
            outputs = self._run(prompts, [sampling_params(config, seed) for seed in seeds])
        for output in outputs:  # only vLLM's own token ids include the tokens of the images
            self._check_length(len(output.prompt_token_ids), num_new)
        return [
            replace(read_generation(output, self._stop_token_ids), pixels=self._images.result(prompt, images))
            for output, prompt, images in zip(outputs, prompts, seen, strict=True)
        ]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[Scores]:
        """Return the log-probabilities (nats) of each response's tokens after its prompt, computed without and with the
        prefix cache, and digests of the prompt's processed images (`Scores.pixels`). Raises the errors of
        `generate`."""
        pairs = [(prompt, list(ids)) for prompt, ids in zip(prompts, responses, strict=True)]
        # Rollouts use the prefix cache, so the scores are computed with it too, to reveal stale blocks.
        reads = [cached_scoring(*pair) if self._caches_prefixes else [] for pair in pairs]
        asked = [*(scoring(*pair) for pair in pairs), *(read for several in reads for read in several)]
        # Images are digested only for the whole requests, which come first: the other requests have the same images.
        looks = [i < len(pairs) and bool(prompt.images) for i, (prompt, _) in enumerate(asked)]
        wholes = [whole for whole, _ in asked]
        with self._images.looking(wholes, looks) as seen:
            # All requests go in one call, so that they share steps of the engine.
            outputs = iter(self._run(wholes, [params for _, params in asked]))
        scores = [
            replace(read_scores(next(outputs), len(ids)), pixels=self._images.result(prompt, images))
            for (prompt, ids), images in zip(pairs, seen, strict=False)
        ]
        return [
            replace(score, cached_logprobs=[read_cached_score(next(outputs)) for _ in several])
            for score, several in zip(scores, reads, strict=True)
        ]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Overwrite the served weights, and check that every parameter was written. Afterwards empty the caches, which
        hold values of the old weights. The adapter is removed.

        Raises CoverageError, or SyncError for any error of vLLM's loaders.
        """
        # The version is dropped before the first tensor comes: after a load that fails, nothing may be generated.
        self.ver = self._adapter = None
        self._num_loads += 1
        model = self.model, self._llm.llm_engine.vllm_config, self._ranks.device, self._copies
        if self.max_lora_rank:
            self._take(weights, BaseWeightLoad(*model, self._runner.lora_manager))
        else:
            self._take(weights, WeightLoad(*model))

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load an adapter in place of the last one. The base weights do not change. Raises the errors of `load`."""
        self.ver = None
        self._num_loads += 1
        self._take(weights, AdapterLoad(self._runner.lora_manager))
        # The adapter gets a new name each time, because vLLM finds cached prefixes by the adapter's name.
        self._adapter = adapter_request(f"policy-{next(self._adapter_numbers)}")

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]], load: AdapterLoad | WeightLoad) -> None:
        try:
            load.open()
            # Merged tensors are made during the iteration, so only the tensors of one piece are in memory at a time.
            for piece in _in_pieces(weights):
                load.add(piece)
            load.finish()
        except ProjectError:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:500]}"
            raise SyncError("loading weights into the colocated engine failed", found=found) from error
        finally:
            load.close()
        self._reset_caches()

    def _reset_caches(self) -> None:
        """Empty the caches, whose values the old weights computed. Raises SyncError if the prefix cache is in use."""
        engine = self._llm.llm_engine
        if not engine.reset_prefix_cache():
            raise SyncError("the colocated engine's prefix cache cannot be reset", found="blocks in use")
        engine.reset_encoder_cache()  # the cache of processed images can stay: pixels do not depend on weights

    def close(self) -> None:
        """Free the engine's memory. With one rank, also end the process group that vLLM made."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        with self._offload.away():  # the device may have no room for the engine and training's state together
            if self._asleep:  # memory of a sleeping engine is not mapped, and vLLM reports an error when it frees that
                torch.cuda.empty_cache()
                self._wake_up()
            self._threads.shutdown()
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm, self._images, self._copies  # the recorded copies hold the model's parameters
            if self._ranks.world_size == 1:
                destroy_model_parallel()
                destroy_distributed_environment()
            gc.collect()  # vLLM's objects refer to each other in cycles
            if self._ranks.device.type == "cuda":
                torch.cuda.empty_cache()

    def _start(self, folder: str) -> LLM:
        from vllm import LLM

        if self.max_lora_rank:
            adapt_linear_layers_only()
        try:
            with all_told_by("vllm"), inspecting_here():
                return LLM(**self._engine_args(folder))
        except Exception as error:  # vLLM raises errors of any type
            raise ConfigError(
                f"{ROLLOUT}.vllm: the colocated engine does not start",
                found=f"{type(error).__name__}: {str(error)[:500]}",
                wanted="a model that vLLM loads, and memory for it and its KV cache beside the training state",
                remedy="if memory is short, change gpu_memory_utilization (cpu_kv_cache_gib without a GPU), lower "
                f"max_model_len or decode_batch_size, set offload.enabled: true, {ELSEWHERE}"
                + ("; if the model takes no adapters, set enable_lora: false" if self.max_lora_rank else ""),
            ) from error

    def _engine_args(self, folder: str) -> dict[str, object]:
        vllm, on_cpu = self._config.vllm, self._ranks.device.type == "cpu"
        args = engine_args(
            model=folder,
            dtype=str(self.dtype).removeprefix("torch."),
            max_model_len=vllm.max_model_len,
            max_lora_rank=self.max_lora_rank,
            on_cpu=on_cpu,
            tensor_parallel_size=self.tensor_parallel_size,
            # torchrun has started the ranks, so vLLM must not start processes of its own.
            distributed_executor_backend="external_launcher" if self._ranks.world_size > 1 else "uni",
            max_num_seqs=self._config.decode_batch_size * self.tensor_parallel_size,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            enforce_eager=vllm.enforce_eager,
            enable_sleep_mode=self._sleeps,
            use_tqdm_on_load=False,
        )
        if not self._reads_weights:
            args["load_format"] = unread_weights()
        # With empty caches vLLM's compiler takes 27 to 50 s of a first start.
        if not (vllm.compile or vllm.enforce_eager):
            args["compilation_config"] = GRAPHS_ALONE
        if on_cpu:
            args["kv_cache_memory_bytes"] = vllm.cpu_kv_cache_gib * 2**30
        return args

    def _wake_up(self) -> None:
        self._llm.wake_up()
        self._asleep = False

    def _may_stay_awake(self) -> bool:
        return self._config.vllm.sleep == "auto" and not self._offload.moves

    def _has_room(self, needed_bytes: int = 0) -> bool:
        """Return True if the device has `needed_bytes` free now, and also the fraction ROOM of its memory. ROOM is
        kept free because larger rows may need it."""
        free, total = torch.cuda.mem_get_info(self._ranks.device)
        return free - needed_bytes >= ROOM * total

    def _rest(self) -> None:
        """Let the engine sleep, unless the device has room for the awake engine and for training."""
        # Training may use more memory than at the last measurement, so the room is measured again.
        self._stays_awake = self._stays_awake and self._has_room()
        if not self._stays_awake:
            self._sleep()

    def _sleep(self) -> None:
        """Move the engine's weights to host memory, and free its KV cache. An engine that never sleeps stays awake."""
        if self._sleeps and not self._asleep:
            with _beside_other_programs(self._worker):
                self._llm.sleep(level=1)
            self._asleep = True

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Return vLLM's outputs, in the prompts' order. vLLM's errors are raised as PromptTooLongError or
        RolloutError."""
        try:
            asked = [prompt.for_engine() for prompt in prompts]
            return self._llm.generate(asked, list(params), use_tqdm=False, lora_request=self._adapter)
        except ValueError as error:  # vLLM raises ValueError if it refuses a request
            if says_too_long(error):
                raise self._too_long(str(error)) from error
            raise RolloutError("the colocated engine refuses a request", found=str(error)[:500]) from error
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(len(prompts), error) from error
            found = f"{type(error).__name__}: {str(error)[:500]}"
            remedy = f"see the rank's log; start again, {ELSEWHERE}"
            raise RolloutError("the colocated engine failed", found=found, remedy=remedy) from error

    def _check_length(self, num_prompt: int, num_response: int) -> None:
        if num_prompt + num_response > self.max_model_len:
            raise self._too_long(f"{num_prompt} prompt tokens and {num_response} for the answer")

    def _too_long(self, found: str) -> PromptTooLongError:
        return PromptTooLongError(
            "the request is longer than the colocated engine's context",
            found=found,
            wanted=f"at most {self.max_model_len} tokens together",
            remedy=f"raise {ROLLOUT}.vllm.max_model_len, or lower decoding.max_new_tokens or the images' size",
        )

    def _out_of_memory(self, num_requests: int, error: RuntimeError) -> RolloutError:
        return RolloutError(
            "the colocated engine is out of memory beside the training state",
            found=f"{num_requests} requests; {str(error).splitlines()[0]}",
            wanted=f"memory for {ROLLOUT}.decode_batch_size = {self._config.decode_batch_size} sequences per device",
            remedy="lower decode_batch_size, vllm.gpu_memory_utilization or decoding.max_new_tokens, set "
            f"offload.enabled: true, {ELSEWHERE}",
        )


@contextmanager
def _beside_other_programs(worker: Worker) -> Iterator[None]:
    """Turn a failed assertion of vLLM's worker into a warning inside the `with` block. When the worker sleeps, it
    asserts that the device's free memory has grown."""
    sleep = worker.sleep

    def asleep(level: int = 1) -> None:
        try:
            sleep(level)
        except AssertionError as error:
            # Another program may have taken the memory. The worker sleeps nevertheless, so vLLM's executor must not see
            # an error.
            if "increased after sleeping" not in str(error):
                raise
            log.warning(
                "another program took memory of the GPU while the colocated engine gave its own back. The run goes on, "
                "and needs that memory again for rollouts. nvidia-smi shows the program"
            )

    worker.sleep = asleep
    try:
        yield
    finally:
        del worker.sleep


def _in_pieces(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the weights in lists of about _PIECE_BYTES."""
    piece: list[tuple[str, torch.Tensor]] = []
    for named in weights:
        piece.append(named)
        if sum(tensor.nbytes for _, tensor in piece) >= _PIECE_BYTES:
            yield piece
            piece = []
    if piece:
        yield piece
