"""Rollouts by vLLM inside the learner's job: `vllm.mode: colocate` (R02, R03, R04, R10, R11, R21).

In: samples of this rank. Out: one rollout per sample, in order, by the weights last synced. Ranks that share an engine
(`tensor_parallel_size` of them) bring their requests together, and each takes back its own; a request's seed follows
from its place over all ranks, as everywhere. Invariants: the engine makes the prompt's image tokens itself, from the
pictures, so that the prompt-prefix check compares two renderings; no rollout is made by weights that were not checked.
With engines over several ranks `generate` is collective, also for a rank without samples. Built by `connect.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from learner.config.rules import ROLLOUT
from learner.config.schema import RolloutMatchingConfig
from learner.policy.parallel import Ranks
from learner.prompt import PromptEncoder
from learner.records import Rollout, Sample
from learner.rollout.backend import MicroStep, Requests, RolloutBackend, split_window
from learner.rollout.call_log import RolloutCallLog, begin_record, local_call, recorded
from learner.rollout.colocate_engine import ColocatedEngine
from learner.rollout.requests import request_config
from shared.errors import ConfigError, SyncError
from shared.generation import Generation

NAME = "colocate"  # in call records, where a server's URL would be


class ColocateBackend(RolloutBackend):
    """`on_call` hears of every `generate_window`, also of one that failed."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        engine: ColocatedEngine,
        encoder: PromptEncoder,
        *,
        run_seed: int,
        ranks: Ranks,
        on_call: Callable[[RolloutCallLog], None] | None = None,
    ) -> None:
        """Raises ConfigError where the engine has no room for a prompt, or can't decode so."""
        self.engine, self.chunk = engine, config.decode_batch_size
        self._encoder, self._run_seed, self._ranks, self._on_call = encoder, run_seed, ranks, on_call
        self._decoding = {greedy: request_config(config.decoding, greedy=greedy) for greedy in (False, True)}
        if config.decoding.max_new_tokens >= engine.max_model_len:
            raise ConfigError(
                f"{ROLLOUT}.decoding.max_new_tokens: no room for a prompt",
                found=f"{config.decoding.max_new_tokens} of the colocated engine's {engine.max_model_len} tokens",
                wanted="fewer new tokens than vllm.max_model_len",
                remedy="lower max_new_tokens, or raise max_model_len",
            )

    def generate_window(
        self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False
    ) -> list[list[Rollout]]:
        """See `RolloutBackend`. Raises SyncError before the first sync and after one that failed."""
        asked = Requests.of(window, run_seed=self._run_seed, global_step=global_step)
        if not asked.samples and self.engine.tensor_parallel_size == 1:
            return [[] for _ in window]
        record = begin_record(window, global_step=global_step, chunk=self.chunk, ver=self.engine.ver)
        with recorded(record, self._on_call), local_call(record, asked, name=NAME):
            return split_window(window, self._generate(asked.samples, asked.seeds, greedy))

    def close(self) -> None:
        self.engine.close()

    def _generate(self, samples: Sequence[Sample], seeds: Sequence[int], greedy: bool) -> list[Rollout]:
        ver = self.engine.ver
        if ver is None:
            raise SyncError(
                "the colocated engine's weights are not known to be right",
                found="no sync that was completed and checked",
                wanted="a sync before the rollouts",
                remedy="see why the last sync failed",
            )
        generations = self._generate_together(samples, seeds, greedy)
        return [
            Rollout(
                sample=sample,
                prompt_token_ids=tuple(generation.prompt_token_ids),
                response_token_ids=tuple(generation.response_token_ids),
                finish_reason=generation.finish_reason,
                ver=ver,
                seed=seed,
                server_id=NAME,
            )
            for sample, seed, generation in zip(samples, seeds, generations, strict=True)
        ]

    def _generate_together(self, samples: Sequence[Sample], seeds: Sequence[int], greedy: bool) -> list[Generation]:
        """This rank's generations, out of those of all ranks that share its engine."""
        shares, mine = [(samples, seeds)], 0
        size = self.engine.tensor_parallel_size
        if size > 1:
            mine = self._ranks.rank % size
            first = self._ranks.rank - mine
            shares = self._ranks.all_gather_object((samples, seeds))[first : first + size]
        prompts = [self._encoder.for_engine(sample) for share, _ in shares for sample in share]
        all_seeds = [seed for _, share in shares for seed in share]
        with self.engine.awake():
            generations = self.engine.generate(prompts, self._decoding[greedy], all_seeds)
        start = sum(len(share) for share, _ in shares[:mine])
        return generations[start : start + len(samples)]
