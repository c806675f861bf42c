"""The learner's half of the canary: the log-probabilities of fixed answers under the weights that travel (D14).

In: a policy and fixed answers. Out: a `CanaryScorer`, to be called at every sync. It scores the answers with the values
that are sent: merged, and rounded to the type that travels. A server with exactly these values gives the same
log-probabilities, except for differences between kernels. What merging and rounding changed is reported separately, as
`merge_gap`. It needs a second pass, with the weights as trained. Where a pass is slow, only every `MERGE_GAP_EVERY`th
sync makes it, and the others report the last gap.

On CUDA, each forward pass of answers without images is captured once as a CUDA graph. A replay takes 10 ms for a model
of 4B; launching every kernel from Python takes several times as long. Two cases cannot be captured: a vision tower
reads its inputs on the host, and a sharded model's layers are at other addresses in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch

from learner.policy.load import Policy
from learner.policy.weights import Checksums, as_sent, checksum, replaced_modules, unreplaced
from learner.records import EncodedPrompt

Answers = Sequence[tuple[EncodedPrompt, Sequence[int]]]
Within = Callable[[], AbstractContextManager[Checksums | None]]  # around a forward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScores:
    """Natural log-probabilities per answer under the weights that travel. `merge_gap`: their mean absolute difference
    from the log-probabilities under the weights as trained, nats per token."""

    logprobs: list[list[float]]
    merge_gap: float
    checksums: Checksums = field(default_factory=dict)  # of the weights that were used, as far as they are known


MERGE_GAP_EVERY = 10  # syncs, where passes are not captured


class CanaryScorer:
    """`checksums`: whether the scores come with checksums of the weights."""

    def __init__(self, policy: Policy, answers: Answers, *, checksums: bool = True) -> None:
        self._policy, self._answers, self._with_checksums = policy, answers, checksums
        self._trained = RepeatedLogprobs(policy, answers)
        self._sent: dict[tuple[torch.dtype | None, bool], _Sent] = {}

    def __call__(self, dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        """Under the weights as they are now, sent in `dtype` (None: as trained). `merged`: as one weight per layer;
        otherwise the adapter travels by itself."""
        if (dtype, merged) not in self._sent:
            self._sent[dtype, merged] = _Sent(
                self._policy, self._answers, dtype, merged=merged, checksums=self._with_checksums
            )
        way = self._sent[dtype, merged]
        if way.scorer is None:
            return CanaryScores(logprobs=self._trained(), merge_gap=0.0, checksums=self._checksums(way))
        sent = way.scorer()
        if self._trained.is_captured or way.number % MERGE_GAP_EVERY == 0:
            trained = self._trained()
            gaps = np.abs(np.concatenate(sent) - np.concatenate(trained)) if sent else np.zeros(1)
            way.merge_gap = float(gaps.mean())
        way.number += 1
        checksums = self._checksums(way) | way.scorer.checksums
        return CanaryScores(logprobs=sent, merge_gap=way.merge_gap, checksums=checksums)

    @torch.no_grad()
    def _checksums(self, way: _Sent) -> Checksums:
        """Checksums of the weights that are used as they are trained. A sharded model's parts have none."""
        if self._policy.is_sharded or not way.merged or not self._with_checksums:
            return {}
        return {name: checksum(tensor) for name, tensor in way.unreplaced.items()}


class _Sent:
    """One way in which weights travel. `scorer`: None if they travel as they are trained; `number`: of its calls."""

    def __init__(
        self, policy: Policy, answers: Answers, dtype: torch.dtype | None, *, merged: bool, checksums: bool
    ) -> None:
        self._policy, self._dtype, self.merged = policy, dtype, merged
        self.number, self.merge_gap = 0, 0.0
        model = policy.model
        replaced = list(replaced_modules(model, dtype, merged=merged))  # to find them takes longer than a pass
        within = partial(as_sent, model, dtype, merged=merged, replaced=replaced, checksums=checksums)
        self.scorer = RepeatedLogprobs(policy, answers, within) if replaced else None

    @cached_property
    def unreplaced(self) -> dict[str, torch.Tensor]:
        return unreplaced(self._policy.model, self._dtype, merged=self.merged)


class RepeatedLogprobs:
    """`Policy.logprobs` of the same answers, again and again, `within` a context. `checksums`: what that context says
    of the weights that it replaced."""

    def __init__(self, policy: Policy, answers: Answers, within: Within = nullcontext) -> None:
        self._policy, self._answers, self._within = policy, answers, within
        can = policy.device.type == "cuda" and all(prompt.vision is None for prompt, _ in answers)
        self.is_captured = can and len(answers) > 0 and not policy.is_sharded
        self._addresses: tuple[int, ...] = ()
        self.checksums: Checksums = {}
        if self.is_captured:
            self._capture()

    def __call__(self) -> list[list[float]]:
        """Natural log-probabilities per answer, under the weights as they are now."""
        if not self.is_captured:
            with self._within() as checksums:
                logprobs = self._policy.logprobs(self._answers)
            self.checksums = checksums or {}
            return logprobs
        if self._addresses != self._addresses_now():  # offloaded weights come back elsewhere
            self._capture()
        self._graph.replay()
        return self._policy.split(self._logprobs, self._answers)

    @torch.no_grad()
    def _capture(self) -> None:
        policy = self._policy
        inputs = policy.answer_inputs(self._answers)
        with self._within() as checksums:
            policy.logprobs(self._answers)  # warm up: the set-up of a first pass must not be captured
            torch.cuda.synchronize(policy.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(policy.device):  # the default stream is on the first current device
                stream = torch.cuda.Stream()
                # thread_local: other threads may broadcast meanwhile
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    self._logprobs = policy.answer_logprobs(inputs)
        self.checksums = checksums or {}  # the graph's own memory: a replay writes it anew
        self._inputs = inputs  # keeps the memory that the graph reads
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._policy.model.parameters())
