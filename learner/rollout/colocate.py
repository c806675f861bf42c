"""Rollouts by vLLM inside the learner's job: `vllm.mode: colocate` (R02, R03, R04, R10, R11, R21).

`ColocateBackend` makes rollouts with a `ColocatedEngine`.

In: samples of this rank. Out: one rollout per sample, in order, by the weights last synced. Ranks that share an engine
gather their requests, and each takes the answers to its own requests. A request's seed follows from its index over all
ranks. If an engine spans several ranks, `generate` is collective: a rank without samples must call it too.

Invariants: the engine itself turns a prompt's images into tokens. So comparing the engine's prompt tokens with the
learner's compares two independent results. No rollout is made with unchecked weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from learner.config.modes import ROLLOUT
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.data.prompt import PromptEncoder
from learner.policy.parallel import Ranks
from learner.records import Rollout, RolloutCallLog, Sample
from learner.rollout.backend import (
    MicroStep,
    Requests,
    RolloutBackend,
    begin_record,
    local_call,
    recorded,
    split_window,
)
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.requests import Decodings, asks_pixels
from shared.errors import ConfigError, SyncError
from shared.generation import (
    Generation,
    Prompt,
)
from shared.wire import RequestConfig

NAME = "colocate"  # the `base_url` of this backend's call records, because there is no server


class _Asked(NamedTuple):
    """One rank's requests, one per sample."""

    samples: Sequence[Sample]
    seeds: Sequence[int]
    looks: Sequence[bool]  # True if the sample's rollout gets digests of its processed images (`Rollout.pixels`)


class ColocateBackend(RolloutBackend):
    """Makes rollouts with a colocated engine. `logprobs`: True if rollouts have log-probabilities. `pixel_share`:
    fraction of the samples whose rollouts get digests of their processed images. `on_call` is called with the record of
    every call of `generate_window`, also of a call that failed."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        engine: ColocatedEngine,
        encoder: PromptEncoder,
        *,
        run_seed: int,
        ranks: Ranks,
        logprobs: bool = False,
        pixel_share: float = 0.0,
        on_call: Callable[[RolloutCallLog], None] | None = None,
    ) -> None:
        """Raises ConfigError if the engine has no room for a prompt, or does not have the decode mode."""
        self.engine, self.chunk = engine, config.decode_batch_size
        self._encoder, self._run_seed, self._ranks, self._on_call = encoder, run_seed, ranks, on_call
        self._decoding, self._pixel_share = Decodings(config.decoding, logprobs=logprobs), pixel_share
        if config.decoding.max_new_tokens >= engine.max_model_len:
            raise ConfigError(
                f"{ROLLOUT}.decoding.max_new_tokens: no room for a prompt",
                found=f"{config.decoding.max_new_tokens} of the colocated engine's {engine.max_model_len} tokens",
                wanted="fewer new tokens than vllm.max_model_len",
                remedy="lower max_new_tokens, or raise max_model_len",
            )

    def generate_window(
        self,
        window: Sequence[MicroStep],
        *,
        global_step: int,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[list[Rollout]]:
        """Return the window's rollouts (see `RolloutBackend`). Raises SyncError before the first sync, and after a
        failed one."""
        asked = Requests.of(window, run_seed=self._run_seed, global_step=global_step)
        # An engine of several ranks needs all its ranks for every call, even a rank without requests.
        if not asked.samples and self.engine.tensor_parallel_size == 1:
            return [[] for _ in window]
        record = begin_record(window, global_step=global_step, chunk=self.chunk, ver=self.engine.ver)
        with recorded(record, self._on_call), local_call(record, asked, name=NAME):
            how = self._decoding.of(greedy=greedy, temperature=temperature)
            # Processed images are compared for learned rollouts only.
            share = self._pixel_share if not greedy and temperature is None else 0.0
            looks = [share > 0 and asks_pixels(share, one, global_step=global_step) for one in asked.samples]
            return split_window(window, self._generate(_Asked(asked.samples, asked.seeds, looks), how, record.parts))

    def close(self) -> None:
        self.engine.close()

    def _generate(self, asked: _Asked, how: RequestConfig, parts: dict[str, float]) -> list[Rollout]:
        ver = self.engine.ver
        if ver is None:
            raise SyncError(
                "the colocated engine's weights are not known to be right",
                found="no sync that was completed and checked",
                wanted="a sync before the rollouts",
                remedy="look in the log why the last sync failed",
            )
        generations = self._generate_together(asked, how, parts)
        return [
            Rollout(
                sample=sample,
                prompt_token_ids=tuple(generation.prompt_token_ids),
                response_token_ids=tuple(generation.response_token_ids),
                finish_reason=generation.finish_reason,
                ver=ver,
                seed=seed,
                server_id=NAME,
                stop_token_id=generation.stop_token_id,
                logprobs=generation.sampled_logprobs,
                pixels=generation.pixels,
            )
            for sample, seed, generation in zip(asked.samples, asked.seeds, generations, strict=True)
        ]

    def _generate_together(self, asked: _Asked, how: RequestConfig, parts: dict[str, float]) -> list[Generation]:
        """Return this rank's generations. One call of the engine makes the generations of all ranks that share the
        engine. Writes the seconds of the call's parts ("prompts", "engine") into `parts`."""
        shares, mine = [asked], 0
        size = self.engine.tensor_parallel_size
        if size > 1:
            mine = self._ranks.rank % size
            first = self._ranks.rank - mine
            shares = self._ranks.all_gather_object(asked)[first : first + size]
        began = time.perf_counter()
        prompts = self._prompts([sample for share in shares for sample in share.samples])
        parts["prompts"] = time.perf_counter() - began
        seeds = [seed for share in shares for seed in share.seeds]
        looks = [look for share in shares for look in share.looks]
        with self.engine.awake():
            began = time.perf_counter()
            generations = self.engine.generate(prompts, how, seeds, looks=looks)
            parts["engine"] = time.perf_counter() - began
        start = sum(len(share.samples) for share in shares[:mine])
        return generations[start : start + len(asked.samples)]

    def _prompts(self, samples: Sequence[Sample]) -> list[Prompt]:
        """Return the samples' prompts, in order. A sample that comes several times in a row (`grpo`) is encoded
        once."""
        # Samples are compared by identity, because only samples of data files are sure to have unique ids.
        groups = [list(group) for _, group in itertools.groupby(samples, key=id)]
        return [prompt for group in groups for prompt in [self._encoder.for_engine(group[0])] for _ in group]
