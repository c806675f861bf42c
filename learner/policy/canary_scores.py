"""Computes the learner's log-probabilities of the canary: fixed answers by which a weight sync is tested (D14).

In: a policy and fixed answers to a few prompts. Out: a `CanaryScorer`, which is called at every sync. The scorer
computes the answers' log-probabilities with the weights as they are sent: adapters merged, values rounded to the type
in which they are sent. A server with exactly the same weights gives the same log-probabilities, except for differences
between kernels. The effect of merging and rounding is reported separately, as `merge_gap`. To measure `merge_gap`, a
second pass uses the weights as trained. If passes are not captured (see below), only every `MERGE_GAP_EVERY`th sync
makes this second pass, and the other syncs report the last gap.

On CUDA, a forward pass is captured once as a CUDA graph (`pass_graph.py`). Replaying the graph takes the host a
millisecond; launching every kernel of a model of 4B from Python takes 0.16 s. A pass with images reads values on the
host, so during its capture (in the second call) no other thread may wait for the device. Passes are not captured if
weights move (offloading) or are sharded, or if the device has no memory for a graph.

The device replays the pass at the same time as later work (`SideStream`). The replay reads the policy's weights, so
call `CanaryScores.join` before the weights change.
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

Answers = Sequence[tuple[EncodedPrompt, Sequence[int]]]  # a prompt and the token ids of its answer
Read = Callable[[], list[list[float]]]  # waits for the device; returns each answer's log-probabilities
Within = Callable[[], AbstractContextManager[Checksums]]  # makes a `with` block for one forward pass with these weights


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScores:
    """The result of a `CanaryScorer`. `read` returns for each answer the natural log-probabilities of its tokens, with
    the weights in the form in which they are sent. `merge_gap`: mean absolute difference between these and the
    log-probabilities with the weights as trained, in nats per token.

    `read` waits for the device, so send the weights before you call it. `join` does not wait: it makes the device run
    later work after the pass. Call `join` before the policy may change."""

    read: Read
    merge_gap: float
    checksums: Checksums = field(default_factory=dict)  # checksums of sent weights, by checkpoint name, where known
    join: Callable[[], None] = lambda: None

    @property
    def logprobs(self) -> list[list[float]]:
        return self.read()


MERGE_GAP_EVERY = 10  # if passes are not captured, the merge gap is measured at every 10th sync only


class CanaryScorer:
    """Scores fixed answers at each sync. `checksums`: also return checksums of the weights."""

    def __init__(self, policy: Policy, answers: Answers, *, checksums: bool = True) -> None:
        self._policy, self._answers, self._with_checksums = policy, answers, checksums
        self._trained = RepeatedLogprobs(policy, answers)
        self._sent: dict[tuple[torch.dtype | None, bool], _Sent] = {}

    def __call__(self, dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        """Score the answers with the present weights, as they are sent in `dtype` (None: in the type of training).
        `merged`: adapters are sent merged into the layers' weights; if False, they are sent separately."""
        if (dtype, merged) not in self._sent:
            self._sent[dtype, merged] = _Sent(
                self._policy, self._answers, dtype, merged=merged, checksums=self._with_checksums
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
        """Return checksums of the weights that are sent unchanged. {} for a sharded model, and if adapters are sent
        separately or no checksums are wanted."""
        if self._policy.is_sharded or not way.merged or not self._with_checksums:
            return {}
        return {name: checksum(tensor) for name, tensor in way.unreplaced.items()}


class _Sent:
    """One form in which weights are sent (type, merged or not). `scorer` computes log-probabilities with weights in
    this form; None: weights are sent as they are trained. `number` counts the calls of `scorer`."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        dtype: torch.dtype | None,
        *,
        merged: bool,
        checksums: bool,
    ) -> None:
        self._policy, self._dtype, self.merged = policy, dtype, merged
        self.number, self.merge_gap = 0, 0.0
        model = policy.model
        # The modules are listed once, because finding them takes longer than a pass.
        replaced = list(replaced_modules(model, dtype, merged=merged))

        # Answers are scored with the weights as they are sent. When answers were scored with the weights as trained, a
        # correct run (LoRA, bf16) ended in its third step, because merging and rounding made a gap of 0.29 nats.
        within = partial(as_sent, model, dtype, merged=merged, replaced=replaced, checksums=checksums)
        self.scorer = RepeatedLogprobs(policy, answers, within) if replaced else None

    @cached_property
    def unreplaced(self) -> dict[str, torch.Tensor]:
        return unreplaced(self._policy.model, self._dtype, merged=self.merged)


def _as_trained() -> AbstractContextManager[Checksums]:
    return nullcontext({})


class SideStream:
    """A second stream of a CUDA device. Work on the side stream begins once all work that was launched before has
    ended. Work that is launched later on the current stream runs at the same time, until `join`. The host never waits.
    Call `join` before you change memory that the side stream's work reads.

    Only graphs may run on this stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch the work of the `with` block on the side stream. The work runs after all work that the current stream
        has so far."""
        if self._stream is None:
            # The stream is made at first use. torch gives out 32 streams in turn. The engine got its streams earlier,
            # to capture CUDA graphs, so this stream is a different one.
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream's later work wait until the side stream's work has ended. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class RepeatedLogprobs:
    """Computes `Policy.logprobs` of the same answers again and again, each time in a context that `within` makes. The
    attribute `checksums` has the checksums of the weights that this context replaced in the last pass. `record`
    captures a pass, to be replayed later; None: on CUDA as a CUDA graph, elsewhere nothing is captured. `side`: the
    stream on which captured passes are replayed; None: a new one on CUDA, the current one elsewhere."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        within: Within = _as_trained,
        *,
        record: Record | None = None,
        side: SideStream | None = None,
    ) -> None:
        self._policy, self._answers, self._within = policy, answers, within
        # a sharded model gathers weights at new addresses
        if policy.device.type == "cuda" and answers and not policy.is_sharded:
            # Launching the pass of 4B from Python takes 0.16 s; a replay takes a millisecond.
            record = record or cuda_graph
            side = side or SideStream(policy.device)
        self._record, self._side = record, side
        self._graph: PassGraph | None = None
        self._addresses: tuple[int, ...] = ()  # memory addresses of the weights in the last pass
        self.checksums: Checksums = {}

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> list[list[float]]:
        """Return for each answer the natural log-probabilities of its tokens, with the present weights."""
        return self.begin()()

    def begin(self) -> Read:
        """Launch the pass. Returns a function that waits for the device and returns what a call returns. Call `join`
        before the policy changes."""
        logprobs = self._pass() if self._record is None else self._by_graph(self._record)
        return cache(partial(self._joined, logprobs))

    def join(self) -> None:
        """Make the device's later work wait for the pass. The host does not wait."""
        if self._side is not None:
            self._side.join()

    def _joined(self, logprobs: torch.Tensor) -> list[list[float]]:
        # The scores are read on the current stream, which must first wait for the side stream.
        self.join()
        return self._policy.split(logprobs, self._answers)

    def _by_graph(self, record: Record) -> torch.Tensor:
        """Return the pass's log-probabilities [N]. The first call runs the pass, the second also captures it as a CUDA
        graph, later calls replay the graph. If the weights have moved to other addresses, or the capture fails, every
        later call runs the pass."""
        addresses = tuple(tensor.data_ptr() for tensor in self._read)
        is_first, has_moved = not self._addresses, self._addresses not in ((), addresses)
        self._addresses = addresses
        if not is_first and not has_moved and self._graph is None:
            self._graph = PassGraph.of(self._pass, self._policy.model.parameters(), record)
        # A graph would read the tensors at their old addresses.
        if self._graph is None or has_moved:
            if not is_first:
                # After a failed capture every call runs the pass. The graph is dropped, because it would keep its
                # memory to the end of the run.
                self._record = self._graph = None
            return self._pass()
        # Only the graph runs on the side stream, because it has memory of its own. Memory that other work allocated on
        # the side stream could not be used on other streams.
        with nullcontext() if self._side is None else self._side.entered():
            return self._graph()

    def _pass(self) -> torch.Tensor:
        """Return the log-probabilities of all answers, one after the other `[N]`, on the device."""
        # Each replay of a captured pass overwrites these checksums with the checksums of the present weights.
        with self._within() as self.checksums:
            return self._policy.answer_logprobs(self._inputs)

    @cached_property
    def _inputs(self) -> PackedInputs:
        """The inputs of the pass. The tensors are made once and kept, because graphs read their memory."""
        return self._policy.answer_inputs(self._answers)

    @cached_property
    def _read(self) -> list[torch.Tensor]:
        """All tensors of the model that a graph may read. The list is made once, because listing the tensors of
        thousands of modules takes longer than a replay."""
        # Buffers can move even if parameters do not: offloading brings back parameters, gradients and buffers in this
        # order, and the size of the gradients may have changed.
        return [*self._policy.model.parameters(), *self._policy.model.buffers()]
