"""The learner's half of the canary: the log-probabilities of fixed answers under the weights that are sent (D14).

In: a policy and fixed answers. Out: a `CanaryScorer`, to be called at every sync. It scores the answers with the values
that are sent: merged, and rounded to the type that travels. A server with exactly these values gives the same
log-probabilities, except for differences between kernels. What merging and rounding changed is reported separately, as
`merge_gap`. It needs a second pass, with the weights as trained. Where a pass is slow, only every `MERGE_GAP_EVERY`th
sync makes it, and the others report the last gap.

On CUDA, a forward pass is captured once as a CUDA graph (`pass_graph.py`). A replay takes the host a millisecond;
launching every kernel of a model of 4B from Python takes 0.16 s. Passes with images read on the host, so they are
captured only where no other thread uses the device, in colocated runs. Where weights move (offloading) or are parts,
and where the device has no memory for a graph, passes run without.

A replay in a colocated run goes on beside what is launched after it (`SideStream`). It reads the policy, so
`CanaryScores.join` comes before the policy changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import numpy as np
import torch

from learner.policy.load import Policy
from learner.policy.packed import PackedInputs
from learner.policy.pass_graph import PassGraph, Record, cuda_graph
from learner.policy.weights import Checksums, as_sent, checksum, replaced_modules, unreplaced
from learner.records import EncodedPrompt

Answers = Sequence[tuple[EncodedPrompt, Sequence[int]]]
Read = Callable[[], list[list[float]]]
Within = Callable[[], AbstractContextManager[Checksums]]  # encloses a pass


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScores:
    """Natural log-probabilities per answer under the weights that are served. `merge_gap`: their mean absolute
    difference from the log-probabilities under the weights as trained, nats per token.

    Reading the log-probabilities waits for the device, so send the weights first. `join` does not wait: work that is
    launched on the device later runs after the pass. Call `join` before the policy may change."""

    read: Read
    merge_gap: float
    checksums: Checksums = field(default_factory=dict)  # by name, of the used weights whose checksums are known
    join: Callable[[], None] = lambda: None

    @property
    def logprobs(self) -> list[list[float]]:
        return self.read()


MERGE_GAP_EVERY = 10  # number of syncs between two measurements, if passes are not captured


class CanaryScorer:
    """Scores fixed answers at each sync. `checksums`: also return checksums of the weights. `alone`: no other thread
    waits for the device during the second call, so that a pass with images can be captured."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        *,
        checksums: bool = True,
        alone: bool = False,
    ) -> None:
        self._policy, self._answers, self._with_checksums, self._alone = policy, answers, checksums, alone
        self._trained = RepeatedLogprobs(policy, answers)
        self._sent: dict[tuple[torch.dtype | None, bool], _Sent] = {}

    def __call__(self, dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        """Score the answers under the weights as they are now, sent in `dtype` (None: as trained). `merged`: as one
        weight per layer; otherwise the adapter travels by itself."""
        if (dtype, merged) not in self._sent:
            self._sent[dtype, merged] = _Sent(
                self._policy,
                self._answers,
                dtype,
                merged=merged,
                checksums=self._with_checksums,
                alone=self._alone,
            )
        way = self._sent[dtype, merged]
        if way.scorer is None:
            return CanaryScores(read=self._trained.begin(), merge_gap=0.0, checksums=self._checksums(way))
        sent = way.scorer.begin()
        if self._trained.is_captured or way.number % MERGE_GAP_EVERY == 0:
            found, trained = sent(), self._trained()
            gaps = np.abs(np.concatenate(found) - np.concatenate(trained)) if found else np.zeros(1)
            way.merge_gap = float(gaps.mean())
        way.number += 1
        checksums = self._checksums(way) | way.scorer.checksums
        return CanaryScores(read=sent, merge_gap=way.merge_gap, checksums=checksums, join=way.scorer.join)

    @torch.no_grad()
    def _checksums(self, way: _Sent) -> Checksums:
        """Return checksums of the weights that are sent as they are trained; {} for a sharded model."""
        if self._policy.is_sharded or not way.merged or not self._with_checksums:
            return {}
        return {name: checksum(tensor) for name, tensor in way.unreplaced.items()}


class _Sent:
    """One form in which weights are sent. `scorer`: None if they are sent as trained; `number`: of calls so far."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        dtype: torch.dtype | None,
        *,
        merged: bool,
        checksums: bool,
        alone: bool,
    ) -> None:
        self._policy, self._dtype, self.merged = policy, dtype, merged
        self.number, self.merge_gap = 0, 0.0
        model = policy.model
        # Listed once, because finding the modules takes longer than a pass.
        replaced = list(replaced_modules(model, dtype, merged=merged))

        within = partial(as_sent, model, dtype, merged=merged, replaced=replaced, checksums=checksums)
        self.scorer = RepeatedLogprobs(policy, answers, within, alone=alone) if replaced else None

    @cached_property
    def unreplaced(self) -> dict[str, torch.Tensor]:
        return unreplaced(self._policy.model, self._dtype, merged=self.merged)


def _as_trained() -> AbstractContextManager[Checksums]:
    return nullcontext({})


class SideStream:
    """A stream beside the current one of `device`, which is a CUDA device. Its work begins once all that was launched
    before it has ended, and what is launched later does not wait for it until `join`. The host never waits. Whoever
    changes what the work reads calls `join` first.

    Its kernels must come from a graph: a graph's memory is its own, and so is the workspace of its matrix products.
    Work that allocates otherwise would keep memory that the other stream cannot use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch what is inside on the side stream, after all that the current stream has been given so far."""
        if self._stream is None:
            # Made late: the engine makes and captures with streams of its own before, and torch hands out 32 in turn.
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make later work of the current stream wait for all work of the side stream so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class RepeatedLogprobs:
    """`Policy.logprobs` of the same answers, again and again, `within` a context. `checksums`: what that context says
    of the weights that it replaced. `alone`: as in `CanaryScorer`. `record`: how a pass is captured; None: as a CUDA
    graph on CUDA, elsewhere not. `side`: the stream of the replays."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        within: Within = _as_trained,
        *,
        alone: bool = False,
        record: Record | None = None,
        side: SideStream | None = None,
    ) -> None:
        self._policy, self._answers, self._within, self._alone = policy, answers, within, alone
        if policy.device.type == "cuda" and answers and not policy.is_sharded:  # parts change their addresses
            record = record or cuda_graph
            side = side or (SideStream(policy.device) if alone else None)
        is_pictured = any(prompt.vision is not None for prompt, _ in answers)
        self._record, self._side = record if alone or not is_pictured else None, side
        self._graph: PassGraph | None = None
        self._addresses: tuple[int, ...] = ()  # memory addresses of the weights in the last pass
        self.checksums: Checksums = {}

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> list[list[float]]:
        """Return the natural log-probabilities per answer, under the weights as they are now."""
        return self.begin()()

    def begin(self) -> Read:
        """Start the pass. Returns a function that waits for the device and returns the log-probabilities. Call `join`
        before the policy changes."""
        logprobs = self._pass() if self._record is None else self._by_graph(self._record)
        return cache(partial(self._joined, logprobs))

    def join(self) -> None:
        """Make work that is launched on the device later wait for the pass. The host does not wait."""
        if self._side is not None:
            self._side.join()

    def _joined(self, logprobs: torch.Tensor) -> list[list[float]]:
        self.join()
        return self._policy.split(logprobs, self._answers)

    def _by_graph(self, record: Record) -> torch.Tensor:
        """Return a pass's result: the first pass warms up, the second is captured, later ones are replays."""
        addresses = tuple(tensor.data_ptr() for tensor in self._read)
        is_first, has_moved = not self._addresses, self._addresses not in ((), addresses)
        self._addresses = addresses
        if not is_first and not has_moved and self._graph is None:
            self._graph = PassGraph.of(self._pass, self._policy.model.parameters(), record, alone=self._alone)
        if self._graph is None or has_moved:  # weights that move are not worth capturing
            if not is_first:
                self._record = self._graph = None
            return self._pass()
        with nullcontext() if self._side is None else self._side.entered():
            return self._graph()

    def _pass(self) -> torch.Tensor:
        """Return the log-probabilities of all answers, one after the other `[N]`, on the device."""
        # The checksums of a captured pass are the graph's own memory: a replay writes them anew.
        with self._within() as self.checksums:
            return self._policy.answer_logprobs(self._inputs)

    @cached_property
    def _inputs(self) -> PackedInputs:
        """The inputs of the pass, kept because graphs read their memory."""
        return self._policy.answer_inputs(self._answers)

    @cached_property
    def _read(self) -> list[torch.Tensor]:
        """All that a graph reads of the model. Listed once: to walk through thousands of modules takes longer than a
        replay."""
        # Buffers too: offloaded weights may come back to where they were and buffers elsewhere, as gradients come and
        # go between them.
        return [*self._policy.model.parameters(), *self._policy.model.buffers()]
