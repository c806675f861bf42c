"""Full weight sync into colocated engines, in memory and checked (R08, R09, R10, R24).

In: the policy's merged weights. Out: a `SyncReceipt` on every rank. Tensors go from the policy to vLLM's loader one by
one, on the device where they are; there is no wire between. What counts as synced is what counts for a server:
(1) bytes: the digest of what each rank's loader was given is the same on all ranks, which would else roll out by
different weights (with one rank there is no second side to compare); (2) coverage: every served parameter was written;
(3) canary: each engine gives fixed answers the learner's log-probabilities. All ranks learn the first failure, and
no engine generates after one. Called by the trainer, on all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from learner.config.rules import ROLLOUT
from learner.config.schema import VllmConfig
from learner.policy.parallel import Ranks
from learner.prompt import PromptEncoder
from learner.records import SyncReceipt
from learner.rollout.colocate_engine import ColocatedEngine
from learner.sync.canary import CanaryGap, CanaryItem, compare
from learner.sync.fleet import Logprobs
from learner.sync.source import WeightSource, check_specs
from shared.digest import digest
from shared.errors import ConfigError, DigestError
from shared.wire import ScoreReply

log = logging.getLogger("learner.sync")

NAME = "the colocated engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What one rank's loader was given. `digest` is empty where there is no other rank."""

    num_tensors: int
    num_bytes: int
    digest: str


class ColocateSync:
    def __init__(
        self,
        engine: ColocatedEngine,
        weights: WeightSource,
        encoder: PromptEncoder,
        *,
        config: VllmConfig,
        canary: Sequence[CanaryItem],
        learner_logprobs: Logprobs,
        ranks: Ranks,
    ) -> None:
        """Raises ConfigError where adapters alone shall be synced, and nothing else will do."""
        assert canary, "a sync without a canary is not checked"
        _settle_on_full(config)
        self.ver = 0
        self._engine, self._weights, self._config = engine, weights, config
        self._canary, self._learner_logprobs, self._ranks = tuple(canary), learner_logprobs, ranks
        self._prompts = [encoder.for_engine(item.sample) for item in canary]
        check_specs(weights.weight_specs(engine.dtype))

    def sync(self) -> SyncReceipt:
        """Bring every engine to the policy's weights; on all ranks. Raises SyncError (Digest, Coverage, Canary)."""
        begin = time.monotonic()
        # Before the engine wakes: scoring needs the policy on its device.
        learner = self._learner_logprobs()
        with self._engine.awake():
            given = self._ranks.all_succeed(self._load)
            self._check_equal(given)
            gaps = self._ranks.all_succeed(lambda: self._gap(learner))
        self._engine.ver = self.ver = self.ver + 1
        receipt = SyncReceipt(
            ver=self.ver,
            mode="full",
            seconds=time.monotonic() - begin,
            num_bytes=given[0].num_bytes,
            num_tensors=given[0].num_tensors,
            canary_gap=max(gap.mean for gap in gaps),
            canary_gap_max=max(gap.max for gap in gaps),
        )
        log.info("weights synced: %s", receipt)
        return receipt

    def close(self) -> None:
        """Nothing is held."""

    def _load(self) -> Given:
        weights = _Counted(self._weights.named_weights(self._engine.dtype), with_digest=self._ranks.world_size > 1)
        self._engine.load(weights)
        return weights.given()

    def _check_equal(self, given: Sequence[Given]) -> None:
        odd = [rank for rank, other in enumerate(given) if other != given[0]]
        if odd:
            raise DigestError(
                f"the ranks hold different weights: rank {odd[0]} is not as rank 0",
                found=str(given[odd[0]]),
                wanted=str(given[0]),
                remedy="resume from the last checkpoint; if it happens again, look at the memory of both devices",
            )

    def _gap(self, learner: Sequence[Sequence[float]]) -> CanaryGap:
        scores = self._engine.score(self._prompts, [item.response_token_ids for item in self._canary])
        reply = ScoreReply(
            ver=self.ver + 1,
            logprobs=[score.logprobs for score in scores],
            prompt_token_ids=[score.prompt_token_ids for score in scores],
        )
        return compare(self._canary, learner, reply, tolerance=self._config.sync.canary_tolerance, base_url=NAME)


def _settle_on_full(config: VllmConfig) -> None:
    """R08: an engine in the learner's job takes merged weights; a wish for adapters falls back, or ends the run."""
    if config.sync.mode == "full" or (config.sync.mode == "auto" and not config.enable_lora):
        return
    found = f"sync.mode {config.sync.mode}, enable_lora {str(config.enable_lora).lower()}"
    if config.sync.fallback_to_full:
        log.warning("%s: adapters can't be synced to %s; merged weights are, for the whole run", found, NAME)
        return
    raise ConfigError(
        f"{ROLLOUT}.vllm.sync.mode: adapters can't be synced to {NAME}",
        found=f"{found}, fallback_to_full false",
        wanted="full (merged weights)",
        remedy="set sync.mode: full",
    )


class _Counted:
    """Named tensors on their way into a loader."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], *, with_digest: bool) -> None:
        self._weights, self._with_digest = weights, with_digest
        self._num_tensors = self._num_bytes = 0
        self._hasher = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self._num_tensors += 1
            self._num_bytes += tensor.nbytes
            if self._with_digest:
                content = digest(tensor.contiguous().view(-1).view(torch.uint8)).tolist()
                self._hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)} {content}\n".encode())
            yield name, tensor

    def given(self) -> Given:
        """Once all are through."""
        content = self._hasher.hexdigest() if self._with_digest else ""
        return Given(num_tensors=self._num_tensors, num_bytes=self._num_bytes, digest=content)
