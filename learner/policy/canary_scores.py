"""The learner's part of the canary: log-probabilities of fixed answers under the weights that are sent (D14).

In: a policy and fixed answers. Out: a `CanaryScorer`, which is called at every sync. It scores the answers under the
values that are sent: merged, and rounded to the type in which they are sent. A server with exactly these values gives
the same log-probabilities, except for differences between kernels. The effect of merging and rounding is reported
apart, as `merge_gap`. Measuring it needs a second pass, under the weights as trained. Where passes are not captured,
only every `MERGE_GAP_EVERY`th sync makes this pass, and the others report the last gap.

On CUDA, a forward pass is captured once as a CUDA graph (`pass_graph.py`). A replay takes the host a millisecond;
launching every kernel of a model of 4B from Python takes 0.16 s. Passes with images read values on the host, so they
are captured only in colocated runs, where no other thread uses the device. Passes are not captured if weights move
(offloading) or are sharded, or if the device has no memory for a graph.

In a colocated run the replay runs at the same time as later work of the device (`SideStream`). It reads the policy, so
call `CanaryScores.join` before the policy changes.
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
Within = Callable[[], AbstractContextManager[Checksums]]  # the context of a pass: it sets the weights that are read


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScores:
    """The answers' natural log-probabilities under the weights that are sent. `merge_gap`: their mean absolute
    difference from the log-probabilities under the weights as trained, in nats per token.

    `read` waits for the device, so send the weights first. `join` does not wait: it makes work that is launched later
    run after the pass. Call `join` before the policy may change."""

    read: Read
    merge_gap: float
    checksums: Checksums = field(default_factory=dict)  # checksums of weights, by checkpoint name, if known
    join: Callable[[], None] = lambda: None

    @property
    def logprobs(self) -> list[list[float]]:
        return self.read()


MERGE_GAP_EVERY = 10  # if passes are not captured, one sync in so many measures the merge gap


class CanaryScorer:
    """Scores fixed answers at each sync. `checksums`: also return checksums of the weights. `alone`: during the second
    call no other thread waits for the device, so that a pass with images can be captured."""

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
        """Score the answers under the present weights as sent in `dtype` (None: as trained). `merged`: each layer is
        sent as one weight; if False, the adapter is sent apart."""
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
    """One form in which weights are sent. `scorer` is None if they are sent as trained. Otherwise `number` counts how
    often a `CanaryScorer` has scored this form."""

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
    """A second stream of `device`, a CUDA device. Its work begins once all work that was launched before has ended.
    Work that is launched later does not wait for it before `join`. The host never waits. Call `join` before a change of
    memory that the work reads.

    All kernels on this stream must come from a graph, which has memory of its own, also for its matrix products. Memory
    that other work allocates here could not be used by the other stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch the work of the block on the side stream, after all work that the current stream has so far."""
        if self._stream is None:
            # Made at first use: torch hands out 32 streams in turn, and the engine has made its streams, and captured
            # with them, by then.
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make later work of the current stream wait for all work of the side stream so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class RepeatedLogprobs:
    """`Policy.logprobs` of the same answers, repeated in the context `within`. `checksums` are those of the weights
    that the context replaced. `alone` is as in `CanaryScorer`. `record` captures a pass; None: a pass is captured as a
    CUDA graph on CUDA, and not captured elsewhere. `side`: the stream of the replays; None: the current one, or on CUDA
    a new one if `alone`."""

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
        if policy.device.type == "cuda" and answers and not policy.is_sharded:  # gathering moves weights
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
        """Return a pass's result. The first call warms up, the second captures the pass, later calls replay it."""
        addresses = tuple(tensor.data_ptr() for tensor in self._read)
        is_first, has_moved = not self._addresses, self._addresses not in ((), addresses)
        self._addresses = addresses
        if not is_first and not has_moved and self._graph is None:
            self._graph = PassGraph.of(self._pass, self._policy.model.parameters(), record, alone=self._alone)
        if self._graph is None or has_moved:  # a graph reads fixed addresses
            if not is_first:
                self._record = self._graph = None
            return self._pass()
        with nullcontext() if self._side is None else self._side.entered():
            return self._graph()

    def _pass(self) -> torch.Tensor:
        """Return the log-probabilities of all answers, one after the other `[N]`, on the device."""
        # A captured pass writes its checksums to the same memory at each replay.
        with self._within() as self.checksums:
            return self._policy.answer_logprobs(self._inputs)

    @cached_property
    def _inputs(self) -> PackedInputs:
        """The inputs of the pass. They are kept, because graphs read their memory."""
        return self._policy.answer_inputs(self._answers)

    @cached_property
    def _read(self) -> list[torch.Tensor]:
        """All tensors of the model that a graph reads. Listed once: to walk through thousands of modules takes longer
        than a replay."""
        # Buffers are listed too, because they can move when weights do not: offloading brings back first the weights,
        # then the gradients, then the buffers, and there may be other gradients than the last time.
        return [*self._policy.model.parameters(), *self._policy.model.buffers()]
