"""Weight sync into colocated engines, in memory and checked (R08, R09, R10, R24).

In: the policy's merged weights, or its adapter where adapters are synced. Out: a `SyncReceipt` on every rank. Tensors
go from the policy to vLLM's loader one by one, on the device where they are; there is no wire between. What counts as
synced is what counts for a server: (1) bytes: the digest of what each rank's loader was given is the same on all ranks,
which would else roll out by different weights (with one rank there is no second side to compare); (2) coverage: every
served parameter was written, or each of the adapter's tensors has found its layer; (3) canary: each engine gives fixed
answers the learner's log-probabilities. All ranks learn the first failure, and no engine generates after one. The first
adapter sync, and the next one after an error, loads the weights below the adapter before; where one fails,
`fallback.py` decides. Called by the trainer, on all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from learner.config.schema import VllmConfig
from learner.data.prompt import PromptEncoder
from learner.policy.canary_scores import CanaryScores
from learner.policy.parallel import Ranks
from learner.records import SyncReceipt
from learner.rollout.colocate import ColocatedEngine
from learner.sync.canary import CanaryGap, CanaryItem, Scorer, compare
from learner.sync.receipts import AdapterFallback, check_plain
from learner.sync.servers import Mode
from learner.sync.source import AdapterSource, WeightSource, check_specs
from shared.errors import DigestError, SyncError
from shared.sync.digest import digest
from shared.wire import ScoreReply

log = logging.getLogger("learner.sync")

NAME = "the colocated engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What one rank's loader was given. `digest` is empty where there is no other rank."""

    num_tensors: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What the engines were given last, and the canary's gap on each rank."""

    mode: Mode
    given: Given
    gaps: Sequence[CanaryGap]


class ColocateSync:
    """`adapter`: sync it alone, as long as that works; None: full syncs."""

    def __init__(
        self,
        engine: ColocatedEngine,
        weights: WeightSource,
        encoder: PromptEncoder,
        *,
        adapter: AdapterSource | None = None,
        config: VllmConfig,
        canary: Sequence[CanaryItem],
        scorer: Scorer,
        ranks: Ranks,
    ) -> None:
        """Raises SyncError where the adapter can't be served and there is no falling back."""
        assert canary, "a sync without a canary is not checked"
        self.ver = 0
        self._engine, self._weights, self._config = engine, weights, config
        self._canary, self._scorer, self._ranks = tuple(canary), scorer, ranks
        self._prompts = [encoder.for_engine(item.sample) for item in canary]
        check_specs(weights.weight_specs(engine.dtype))
        self._fallback = AdapterFallback(adapter, to_full=config.sync.fallback_to_full)
        self._base_is_loaded = False
        if adapter is not None:
            with self._fallback.trying():
                _check_adapter(adapter, engine)
        log.info("sync mode %s", "full" if self._fallback.adapter is None else "adapter")

    def sync(self) -> SyncReceipt:
        """Bring every engine to the policy's weights; on all ranks. Raises SyncError (Digest, Coverage, Canary)."""
        begin = time.monotonic()
        # Before the engine wakes: scoring needs the policy on its device.
        may_send: list[Mode] = ["full"] if self._fallback.adapter is None else ["adapter", "full"]
        learner = {mode: self._scorer(self._engine.dtype, merged=mode == "full") for mode in may_send}
        with self._engine.awake():
            checked = self._update(learner)
        self._engine.ver = self.ver = self.ver + 1
        receipt = SyncReceipt(
            ver=self.ver,
            mode=checked.mode,
            seconds=time.monotonic() - begin,
            num_bytes=checked.given.num_bytes,
            num_tensors=checked.given.num_tensors,
            canary_gap=max(gap.mean for gap in checked.gaps),
            canary_gap_max=max(gap.max for gap in checked.gaps),
            merge_gap=learner[checked.mode].merge_gap,
            fallback=self._fallback.tell(),
        )
        log.info("weights synced: %s", receipt)
        return receipt

    def close(self) -> None:
        """Nothing is held."""

    def _update(self, learner: Mapping[Mode, CanaryScores]) -> Checked:
        if (adapter := self._fallback.adapter) is not None:
            with self._fallback.trying():
                return self._update_adapter(adapter, learner["adapter"])
        given = self._load(self._weights, self._engine.load)
        return Checked(mode="full", given=given, gaps=self._gaps(learner["full"]))

    def _update_adapter(self, adapter: AdapterSource, learner: CanaryScores) -> Checked:
        base_is_loaded, self._base_is_loaded = self._base_is_loaded, False
        if not base_is_loaded:
            self._load(adapter.base, self._engine.load)
            log.info("the weights below the adapter were loaded")
        given = self._load(adapter, self._engine.load_adapter)
        checked = Checked(mode="adapter", given=given, gaps=self._gaps(learner))
        self._base_is_loaded = True
        return checked

    def _load(self, source: WeightSource, load: Callable[[Iterable[tuple[str, torch.Tensor]]], None]) -> Given:
        """What every rank's engine was given."""

        def load_counted() -> Given:
            weights = _Counted(source.named_weights(self._engine.dtype), with_digest=self._ranks.world_size > 1)
            load(weights)
            return weights.given()

        given = self._ranks.all_succeed(load_counted)
        odd = [rank for rank, other in enumerate(given) if other != given[0]]
        if odd:
            raise DigestError(
                f"the ranks hold different weights: rank {odd[0]} is not as rank 0",
                found=str(given[odd[0]]),
                wanted=str(given[0]),
                remedy="resume from the last checkpoint; if it happens again, look at the memory of both devices",
            )
        return given[0]

    def _gaps(self, learner: CanaryScores) -> list[CanaryGap]:
        return self._ranks.all_succeed(lambda: self._gap(learner))

    def _gap(self, learner: CanaryScores) -> CanaryGap:
        scores = self._engine.score(self._prompts, [item.response_token_ids for item in self._canary])
        reply = ScoreReply(
            ver=self.ver + 1,
            logprobs=[score.logprobs for score in scores],
            prompt_token_ids=[score.prompt_token_ids for score in scores],
        )
        return compare(
            self._canary, learner.logprobs, reply, tolerance=self._config.sync.canary_tolerance, base_url=NAME
        )


def _check_adapter(adapter: AdapterSource, engine: ColocatedEngine) -> None:
    """Raises SyncError where the engine could not apply it."""
    check_plain(adapter)
    if engine.max_lora_rank < adapter.rank:
        raise SyncError(
            f"{NAME} does not take the adapter",
            found=f"rank {adapter.rank}",
            wanted=f"at most rank {engine.max_lora_rank}",
            remedy="lower model.lora.r, or set sync.mode: full (merged weights)",
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
