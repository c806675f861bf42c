"""Delivers weights into colocated engines, on the device where the weights are (R08, R09, R20, R24).

In: weights, by a `WeightSource`. Out: every rank's engine has the weights and has checked them, or the first failure is
raised on every rank. Tensors go from the policy to vLLM's loader one by one, in one process. There are three checks, as
for a server. (1) Bytes: the tensors given to the loaders have the same digest on all ranks. (2) Coverage: every served
parameter was written, or each of the adapter's tensors has found its layer. (3) Canary: each engine gives fixed answers
the same log-probabilities as the learner. No engine generates after a failure. The base weights, to which an adapter is
applied, are part of the adapter's version.

The learner's pass on the canary reads only the policy, which does not change during a sync. So if the engine is awake
and nothing is offloaded, the weights are loaded first, and both sides score at the same time. If the engine sleeps or
state is offloaded, the learner scores before the engine wakes, because afterwards the policy is offloaded, or memory is
short.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from learner.data.prompt import PromptCheck, PromptEncoder
from learner.policy.canary_scores import CanaryScores
from learner.policy.parallel import Ranks
from learner.records import ServerChange
from learner.rollout.colocated_engine import ColocatedEngine
from learner.sync.canary import Canary, worst_gap
from learner.sync.source import AdapterSource, WeightSource
from learner.sync.sync import Delivered, Mode, Recovery
from shared.canary import CanaryGap
from shared.errors import DigestError, ProjectError, SyncError
from shared.sync.digest import digest
from shared.wire import ScoreReply

T = TypeVar("T")
NAME = "the colocated engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Sizes and digest of the weights that one rank's loader got. `digest` is empty if there is only one rank."""

    num_tensors: int
    num_bytes: int
    digest: str


class EngineDelivery:
    """Loads weights into every rank's engine, and scores the canary's answers there. If a load or the canary fails on
    one rank, the error is raised on all ranks."""

    def __init__(
        self,
        engine: ColocatedEngine,
        encoder: PromptEncoder,
        *,
        canary: Canary,
        ranks: Ranks,
    ) -> None:
        self._engine, self._canary, self._ranks = engine, canary, ranks
        self._prompts = [encoder.for_engine(item.sample) for item in canary.items]
        # Pixels are compared too, because different pixels on the two sides cause no error by themselves.
        self._same = PromptCheck(image_processing=encoder.image_processing)
        # Scores that the learner has begun to compute for the running sync.
        self._learner: dict[Mode, CanaryScores] = {}
        self._parts: dict[str, float] = {}  # seconds of each part of the running sync

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def agree(self) -> Sequence[ServerChange]:
        return ()

    def is_current(self) -> bool:
        return True

    def connect(self) -> int:
        return 0

    def recover(self, error: ProjectError, num_repeated: int) -> Recovery:
        return "stop"

    def check_adapter(self, adapter: AdapterSource) -> None:
        if self._engine.max_lora_rank < adapter.rank:
            raise SyncError(
                f"{NAME} does not take the adapter",
                found=f"rank {adapter.rank}",
                wanted=f"at most rank {self._engine.max_lora_rank}",
                remedy="lower model.lora.r, or set sync.mode: full (merged weights)",
            )

    def prepare(self, mode: Mode) -> None:
        """Do nothing: a colocated engine makes no rollouts while the learner computes, so no time would be saved."""

    @contextmanager
    def delivering(self, modes: Sequence[Mode]) -> Iterator[Mapping[str, float]]:
        self._parts, self._learner = {}, {}
        with ExitStack() as stack:
            stack.callback(self._end_scores)
            if not self._scores_beside():
                # The learner scores before the engine wakes, while the policy is on its device.
                for mode in modes:
                    self._begin_scores(mode)
            with self._part("wake"):
                stack.enter_context(self._engine.awake(after_update=True))
            yield self._parts
            with self._part("sleep"):
                stack.close()

    def _scores_beside(self) -> bool:
        """Return True if the learner scores at the same time as the engine."""
        # With more ranks, the collectives of learner and engine would run at the same time, in any order.
        return self._ranks.world_size == 1 and self._engine.leaves_training

    def _begin_scores(self, mode: Mode) -> CanaryScores:
        """Return the learner's scores of this sync. The first call begins to compute the scores."""
        if mode not in self._learner:
            with self._part("scores"):
                self._learner[mode] = self._canary.scorer(self._engine.dtype, mode == "full")
        return self._learner[mode]

    def _end_scores(self) -> None:
        # After a failure nobody has read the scores, but their computation must end before the policy changes.
        for scores in self._learner.values():
            scores.join()

    def deliver_base(self, source: WeightSource, ver: int) -> int:
        self._load(source, self._engine.load)
        return ver

    def deliver(self, source: WeightSource, mode: Mode, ver: int) -> Delivered:
        given = self._load(source, self._engine.load if mode == "full" else self._engine.load_adapter)
        learner = self._begin_scores(mode)
        with self._part("canary"):
            gaps = self._ranks.all_succeed(lambda: self._gap(learner, ver))
        return Delivered(
            mode=mode,
            num_bytes=given.num_bytes,
            num_tensors=given.num_tensors,
            gap=worst_gap(gaps),
            merge_gap=learner.merge_gap,
        )

    def accept(self, ver: int) -> None:
        self._engine.ver = ver

    def leave(self, *, abort: bool) -> None:
        """Do nothing: a colocated engine joins no group."""

    def _load(self, source: WeightSource, load: Callable[[Iterable[tuple[str, torch.Tensor]]], None]) -> Given:
        """Load the weights on every rank, and return sizes and digest of the weights that this rank's loader got."""

        def load_counted() -> Given:
            # With one rank there is nothing to compare a digest with.
            weights = _Counted(lambda: source.named_weights(self._engine.dtype), with_digest=self._ranks.world_size > 1)
            with self._part("load"):
                load(weights)
            self._parts["merge"] = self._parts.get("merge", 0.0) + weights.seconds
            # The loader takes merged tensors one by one, so the time of merging lies inside the time of loading.
            self._parts["load"] -= weights.seconds
            assert weights.given is not None, "a load walks through all weights"
            return weights.given

        # Every rank learns of a failure here, before the canary is scored. Without this exchange the collectives of the
        # scoring would wait for a failed rank.
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

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Time a part of a sync. Device work that is unfinished when the part ends counts for the next part."""
        began = time.perf_counter()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - began

    def _gap(self, learner: CanaryScores, ver: int) -> CanaryGap:
        scores = self._engine.score(self._prompts, [item.response_token_ids for item in self._canary.items])
        for item, score in zip(self._canary.items, scores, strict=True):
            if item.prompt.vision is not None and score.pixels is not None:
                self._same.pixels(item.prompt.vision, score.pixels, sample_id=item.sample.sample_id, name=NAME)
        reply = ScoreReply(
            ver=ver,
            logprobs=[score.logprobs for score in scores],
            cached_logprobs=[score.cached_logprobs for score in scores if score.cached_logprobs],
            prompt_token_ids=[score.prompt_token_ids for score in scores],
        )
        began = time.perf_counter()
        expected = learner.logprobs
        waited = time.perf_counter() - began
        self._parts["scores"] += waited
        self._parts["canary"] = self._parts.get("canary", 0.0) - waited  # the canary's time contains this wait
        return self._canary.compare(expected, reply, NAME, self._engine.dtype)


class _Counted:
    """Named tensors for a loader, which may iterate over them several times. `given`: sizes and digest of the tensors
    of the last complete iteration."""

    def __init__(self, named_weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], *, with_digest: bool) -> None:
        self._named_weights, self._with_digest = named_weights, with_digest
        self.given: Given | None = None
        self.seconds = 0.0  # seconds that making the tensors took

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        num_tensors = num_bytes = 0
        hasher = hashlib.blake2b(digest_size=16)
        weights = self._named_weights()
        while True:
            began = time.perf_counter()
            name, tensor = next(weights, ("", None))
            self.seconds += time.perf_counter() - began
            if tensor is None:
                break
            num_tensors += 1
            num_bytes += tensor.nbytes
            # A digest of the bytes is made on their device: only 16 bytes a tensor come to the host.
            if self._with_digest:
                values = digest(tensor.contiguous().view(-1).view(torch.uint8)).tolist()
                hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)} {values}\n".encode())
            yield name, tensor
        found = hasher.hexdigest() if self._with_digest else ""
        # The attribute is set only at the end: an iteration that breaks off must not count as a load.
        self.given = Given(num_tensors=num_tensors, num_bytes=num_bytes, digest=found)
