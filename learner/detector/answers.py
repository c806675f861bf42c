"""Asks a model about images: for each image it gives one greedy answer and K sampled answers.

`Answers` asks vLLM in this process (the default), transformers' `generate` (`hf`), or a running rollout server. Answers
carry the log-probabilities of their tokens. A sampled answer's seed is computed from the index of the image and the
number of the answer. So the seed does not depend on how many images are answered at once, or on an interruption.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Literal, Self

import torch

from learner.config.schema import RunConfig
from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.config.sections.servers import entry_mistakes
from learner.data.prompt import PromptEncoder, check_prompt_prefix
from learner.detector.model import ModelFiles, merged
from learner.policy.load import load_policy
from learner.policy.offload import Offload
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample
from learner.rollout.backend import MicroStep, RolloutBackend
from learner.run.environment import prepare_for_vllm
from shared.aio import gather
from shared.checkpoint import checkpoint_digest
from shared.config.model import ConfigErrors
from shared.errors import ServerMismatchError, ServerUnreachableError
from shared.images import ImageRules
from shared.wire import ServerStatus

Backend = Literal["vllm", "hf"]
SEED = 0
ON_CPU, ON_CUDA = 32, 128  # max sequences that are decoded at once, by device
REACHABLE_S = 10.0  # max seconds to wait for a server's first answer: the server is already running
GPU_SHARE = 0.85  # fraction of a GPU's memory that the engine takes; no training needs the rest
MOST_PARTS = 4096  # max parts (tiles) of an image; the answers to each part have other seeds
_TEXT_MARGIN = 64  # tokens that are added to the longest expected prompt


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """Settings for answers. `server` is the URL of a rollout server with the same model. Raises ConfigErrors if
    `server` is no URL."""

    backend: Backend = "vllm"
    server: str | None = None
    samples: int = 0  # number of sampled answers to each image, K
    max_new_tokens: int | None = None  # None: the limit in the model's settings
    temperature: float = 1.0
    dtype: str = "auto"
    token: str | None = None

    def __post_init__(self) -> None:
        if self.server is not None and (mistakes := entry_mistakes(self.server, None)):
            raise ConfigErrors(mistakes=[replace(mistake, path="--server") for mistake in mistakes])


class Answers:
    """Gets answers from a model. The backend is opened when the `with` block begins, and closed when it ends."""

    def __init__(self, model: ModelFiles, asked: AnswerSettings) -> None:
        self._model, self.asked = model, asked
        self._stack = ExitStack()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings = model.settings
        self.encoder = PromptEncoder.load(
            str(model.folder), rules=ImageRules(), min_pixels=settings.min_pixels, max_pixels=settings.max_pixels
        )
        self._backend: RolloutBackend | None = None
        self._prompt_is_checked = False

    @property
    def images_at_once(self) -> int:
        """Return how many images keep the backend busy. Answers are saved after each such number of images."""
        return max(1, self._config().decode_batch_size // max(1, self.asked.samples))

    def __enter__(self) -> Self:
        try:
            self._backend = self._open()
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self._backend.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def of(self, groups: Mapping[int, Sequence[Sample]]) -> dict[int, list[list[Rollout]]]:
        """Return the answers to the samples of each image, by the image's index among all images of the command. Each
        sample's greedy answer comes first. Raises the same errors as rollouts during training."""
        greedy = self._generate(groups, 1, greedy=True)
        self._require_same_prompt(greedy)
        drawn = self._generate(groups, self.asked.samples, greedy=False) if self.asked.samples else {}
        number = self.asked.samples
        return {
            place: [[one, *drawn.get(place, [])[i * number : (i + 1) * number]] for i, one in enumerate(answers)]
            for place, answers in greedy.items()
        }

    def each(self, groups: Sequence[Sequence[Sample]]) -> Iterator[list[list[Rollout]]]:
        """Yield the answers to each image's samples, the greedy answer to each sample first."""
        # The number is the same for images in tiles: greedy answers to one image's tiles would not fill a batch.
        size = self.images_at_once
        for start in range(0, len(groups), size):
            yield from self.of({start + i: own for i, own in enumerate(groups[start : start + size])}).values()

    def _generate(
        self, groups: Mapping[int, Sequence[Sample]], number: int, *, greedy: bool
    ) -> dict[int, list[Rollout]]:
        """Return a list of answers for each group, by its key: `number` answers to its first sample, then `number` to
        the next, and so on."""
        assert self._backend is not None, "inside the block only"
        window = [
            MicroStep(
                samples=[sample for sample in samples for _ in range(number)],
                micro_step_idx=0,
                # Seeds depend on this index only, so an image has the same seeds in any group of images.
                first_req_idx=place * MOST_PARTS * number,
            )
            for place, samples in groups.items()
        ]
        rollouts = self._backend.generate_window(window, global_step=0, greedy=greedy)
        return dict(zip(groups, rollouts, strict=True))

    def _require_same_prompt(self, greedy: Mapping[int, Sequence[Rollout]]) -> None:
        """Raises PromptMismatchError if the server read the first image's prompt differently than the learner (R03)."""
        if self.asked.server is None or self._prompt_is_checked:
            return
        first = next(rollout for rollouts in greedy.values() for rollout in rollouts)
        # The server may have other limits of images than the model's settings.
        expected = self.encoder.encode(first.sample).token_ids
        check_prompt_prefix(
            expected, first.prompt_token_ids, first.sample.sample_id, decode=self.encoder.tokenizer.decode
        )
        self._prompt_is_checked = True

    # ---- backends ----------------------------------------------------------------------------------------------------

    def _open(self) -> RolloutBackend:
        if self.asked.server is not None:
            return self._servers(self.asked.server)
        folder = self._stack.enter_context(merged(self._model))
        return self._hf(str(folder)) if self.asked.backend == "hf" else self._vllm(str(folder))

    def _servers(self, url: str) -> RolloutBackend:
        from learner.rollout.server_backend import ServerBackend

        # No weights are sent, so the group port is never used.
        server = {"servers": [{"base_url": url, "group_port": 1}]}
        config = self._config({"vllm": {"mode": "server", "server": server}})
        backend = ServerBackend(config, run_seed=SEED, token=self.asked.token, logprobs=True)
        try:
            (status,) = backend.loop.run(gather(backend.look(client, REACHABLE_S) for client in backend.clients))
            self._require_same_weights(url, status)
            backend.connect()
        except ServerUnreachableError as error:
            backend.close()
            raise ServerUnreachableError(
                error.what, found=error.found, wanted=error.wanted, remedy="start the server, or correct --server"
            ) from error
        except BaseException:
            backend.close()
            raise
        return backend

    def _require_same_weights(self, url: str, status: ServerStatus) -> None:
        """Raises ServerMismatchError if the server's weights are not the weights of `--model`: prompt and calibration
        were made for the weights of `--model` only."""
        # Weights that a run has synced are in no file, and an adapter's file is not the merged model. These weights
        # cannot be compared.
        if status.ver or not status.weights or self._model.has_adapter:
            return
        if checkpoint_digest(str(self._model.folder)) != status.weights:
            raise ServerMismatchError(
                f"{url}: the server has other weights than --model",
                found=f"the server's model is {status.model}",
                wanted=f"the weights of {self._model.folder}",
                remedy="name the folder that the server serves, or serve this one",
            )

    def _hf(self, folder: str) -> RolloutBackend:
        from learner.rollout.hf import HfBackend

        settings = self._model.settings
        config = ModelConfig(
            path=folder,
            dtype=str(self._dtype()).removeprefix("torch."),  # type: ignore[arg-type]
            compile=False,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
            allow_untested_family=True,
        )
        policy = load_policy(config, device=self.device)
        return HfBackend(self._config(), policy, run_seed=SEED, logprobs=True, tell=partial(print, file=sys.stderr))

    def _vllm(self, folder: str) -> RolloutBackend:
        prepare_for_vllm(os.environ)
        from learner.rollout.colocate import ColocateBackend
        from learner.rollout.colocated_engine import ColocatedEngine

        ranks = Ranks(device=self.device)
        config = self._config()
        engine = ColocatedEngine(
            config,
            model=folder,
            dtype=self._dtype(),
            ranks=ranks,
            tensor_parallel_size=1,
            offload=Offload(lambda: iter(()), self.device),
            # The engine reads the weights from the folder, because no sync sends them.
            reads_weights=True,
            keeps_awake=True,
        )
        engine.ver = 0  # version 0: the weights in the model's folder
        return ColocateBackend(config, engine, self.encoder, run_seed=SEED, ranks=ranks, logprobs=True)

    def _dtype(self) -> torch.dtype:
        if self.asked.dtype != "auto":
            return getattr(torch, self.asked.dtype)
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _config(self, changes: dict[str, object] | None = None) -> RolloutMatchingConfig:
        """Return the rollout section of a configuration, with the run's own vLLM settings if the run is known."""
        asked, settings = self.asked, self._model.settings
        run: RunConfig | None = self._model.run
        vllm: dict[str, object] = {"gpu_memory_utilization": GPU_SHARE, "max_model_len": self._longest()}
        if run is not None:
            own = run.rollout_matching.vllm
            vllm |= own.model_dump(include={"enforce_eager", "compile", "cpu_kv_cache_gib"})
            if own.max_model_len is not None:
                vllm["max_model_len"] = own.max_model_len
        values: dict[str, object] = {
            "decode_batch_size": ON_CUDA if self.device.type == "cuda" else ON_CPU,
            "decoding": {
                "temperature": asked.temperature,
                "max_new_tokens": asked.max_new_tokens or settings.max_new_tokens,
                "repetition_penalty": settings.repetition_penalty,
                "stop_repetitions": settings.stop_repetitions,
            },
            "vllm": vllm,
        }
        return RolloutMatchingConfig.model_validate({**values, **(changes or {})})

    def _longest(self) -> int | None:
        """Return the number of tokens of the longest possible request; None if the processor does not bound its
        images."""
        images = getattr(self.encoder.processor, "image_processor", None)
        edge = getattr(images, "patch_size", 0) * getattr(images, "merge_size", 0)
        pixels = getattr(getattr(images, "size", None), "longest_edge", None)
        if not edge or not pixels:
            return None
        text = "".join(str(turn["content"]) for turn in self._model.settings.messages)
        num_text = len(self.encoder.tokenizer.encode(text)) + _TEXT_MARGIN
        new = self.asked.max_new_tokens or self._model.settings.max_new_tokens
        return int(pixels) // (edge * edge) + num_text + new
