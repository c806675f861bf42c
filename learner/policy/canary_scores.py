"""The learner's half of the canary: the log-probabilities of fixed answers under the weights that travel (D14).

In: a policy and fixed answers. Out: a `CanaryScorer`, to be called at every sync. It scores the answers with the values
that are sent: merged, and rounded to the type that travels. Where the engine quantises weights, the pass does it too,
one layer at a time. A server with exactly these values gives the same log-probabilities, except for differences between
kernels. What merging, rounding and quantising changed is reported separately, as `merge_gap`. It needs a second pass,
with the weights as trained. Where a pass is slow, only every `MERGE_GAP_EVERY`th sync makes it, and the others report
the last gap.

On CUDA, each forward pass of answers without images is captured once as a CUDA graph. A replay takes 10 ms for a model
of 4B; launching every kernel from Python takes several times as long. With images the pass is captured with what it
reads on the host (`pass_graph.py`), or else its layers one by one (`layer_graphs.py`). A sharded model's layers are at
other addresses in every pass, so nothing is captured. Where the device has no memory for a graph, passes run without.

A pass that is one graph with images runs beside what is launched after it (`SideStream`). It reads the policy, so
`CanaryScores.join` comes before the policy changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch

from learner.policy.layer_graphs import CudaRecorder, LayerGraphs, Work, recorded
from learner.policy.load import Policy
from learner.policy.packed import PackedInputs
from learner.policy.pass_graph import PassGraph
from learner.policy.weights import Checksums, as_sent, checksum, replaced_modules, unreplaced
from learner.records import EncodedPrompt
from shared.quantization import Quantization

log = logging.getLogger("learner.policy")
Answers = Sequence[tuple[EncodedPrompt, Sequence[int]]]
Modules = Set[torch.nn.Module]
Read = Callable[[], list[list[float]]]
Within = Callable[[Modules], AbstractContextManager[Checksums]]  # encloses a pass that does not call these modules


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScores:
    """Natural log-probabilities per answer under the weights that are served. `merge_gap`: their mean absolute
    difference from the log-probabilities under the weights as trained, nats per token.

    Reading the log-probabilities waits for the device. So whoever can sends weights first. `join`, which does not wait:
    what is launched on the device from now on comes after the pass. Call it before the policy may change."""

    read: Read
    merge_gap: float
    checksums: Checksums = field(default_factory=dict)  # those of the weights that were used, as far as they are known
    join: Callable[[], None] = lambda: None

    @property
    def logprobs(self) -> list[list[float]]:
        return self.read()


MERGE_GAP_EVERY = 10  # syncs, where passes are not captured


class CanaryScorer:
    """`checksums`: whether the scores come with checksums of the weights. `whole`: a pass with images may be captured
    as one graph. That takes memory, and no other thread may wait for the device at the second call. `quantization`: of
    the engines."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        *,
        checksums: bool = True,
        whole: bool = False,
        quantization: Quantization = "none",
    ) -> None:
        self._policy, self._answers, self._with_checksums, self._whole = policy, answers, checksums, whole
        self._quantization: Quantization = quantization
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
                whole=self._whole,
                quantization=self._quantization,
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
        """Return checksums of the weights that are used as they are trained. A sharded model's parts have none."""
        if self._policy.is_sharded or not way.merged or not self._with_checksums:
            return {}
        return {name: checksum(tensor) for name, tensor in way.unreplaced.items()}


class _Sent:
    """One way in which weights travel. `scorer`: None if they travel as they are trained; `number`: of its calls."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        dtype: torch.dtype | None,
        *,
        merged: bool,
        checksums: bool,
        whole: bool,
        quantization: Quantization,
    ) -> None:
        self._policy, self._dtype, self.merged = policy, dtype, merged
        self._quantization: Quantization = quantization
        self.number, self.merge_gap = 0, 0.0
        model = policy.model
        # Finding them takes longer than a pass.
        replaced = list(replaced_modules(model, dtype, merged=merged, quantization=quantization))

        def within(without: Modules) -> AbstractContextManager[Checksums]:
            called = [(name, module) for name, module in replaced if module not in without]
            how: dict[str, Any] = {"merged": merged, "quantization": quantization, "checksums": checksums}
            return as_sent(model, dtype, replaced=called, **how)

        self.scorer = RepeatedLogprobs(policy, answers, within, whole=whole) if replaced else None

    @cached_property
    def unreplaced(self) -> dict[str, torch.Tensor]:
        return unreplaced(self._policy.model, self._dtype, merged=self.merged, quantization=self._quantization)


def _as_trained(_: Modules) -> AbstractContextManager[Checksums]:
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
        """Let the current stream wait, from now on, for all work so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class RepeatedLogprobs:
    """`Policy.logprobs` of the same answers, again and again, `within` a context. `checksums`: what that context says
    of the weights that it replaced. `layers`: how layers are captured; None: on CUDA, where the pass has images.
    `whole`: it is tried to capture such a pass as one graph, whose memory is kept. `record`: how; so are passes without
    images captured. None: on CUDA. `side`: the stream of the replays of a pass with images."""

    def __init__(
        self,
        policy: Policy,
        answers: Answers,
        within: Within = _as_trained,
        *,
        layers: LayerGraphs | None = None,
        whole: bool = False,
        record: Callable[[Work], Work] | None = None,
        side: SideStream | None = None,
    ) -> None:
        self._policy, self._answers, self._within = policy, answers, within
        is_pictured = any(prompt.vision is not None for prompt, _ in answers)
        if policy.device.type == "cuda" and len(answers) > 0 and not policy.is_sharded:
            record = record or CudaRecorder(policy.device)
            if is_pictured:
                layers = layers or LayerGraphs(policy.model, CudaRecorder(policy.device))
                side = side or SideStream(policy.device)
        self._layers, self._record, self._side = layers, record if whole or not is_pictured else None, side
        self._replay: Work | None = None  # of a pass without images
        self._whole: PassGraph | None = None
        self._number = 0  # counts calls at these addresses
        self._addresses: tuple[int, ...] = ()
        self.checksums: Checksums = {}
        if self._record is not None and not is_pictured:
            self._capture(self._record)

    @property
    def is_captured(self) -> bool:
        """True if a pass without images is one graph."""
        return self._replay is not None

    def __call__(self) -> list[list[float]]:
        """Return the natural log-probabilities per answer, under the weights as they are now."""
        return self.begin()()

    def begin(self) -> Read:
        """Start the pass. What it returns waits for the device, and gives what a call gives. `join` comes before the
        policy changes."""
        if self._replay is not None and self._record is not None and self._addresses != self._addresses_now():
            self._capture(self._record)  # offloaded weights come back elsewhere
        if self._replay is not None:
            self._replay()
            logprobs = self._logprobs.clone()  # the next replay overwrites it
        else:
            logprobs = self._by_graphs(self._layers) if self._layers is not None else self._pass()
        return cache(partial(self._joined, logprobs))

    def join(self) -> None:
        """Let what is launched on the device from now on wait for the pass. The host does not wait."""
        if self._side is not None:
            self._side.join()

    def _joined(self, logprobs: torch.Tensor) -> list[list[float]]:
        self.join()
        return self._policy.split(logprobs, self._answers)

    def _by_graphs(self, layers: LayerGraphs) -> torch.Tensor:
        """The first pass warms up and looks whether layers can be captured. The second one is captured, whole or layer
        by layer."""
        if self._number and self._addresses != self._addresses_now():  # weights that move are not worth capturing
            self._layers = self._whole = None
            return self._pass()
        self._number += 1
        if self._number == 1:
            self._addresses = self._addresses_now()
            with layers.watching():
                return self._pass()
        if self._number == 2 and self._record is not None:
            self._whole = PassGraph.of(self._pass, self._policy.model.parameters(), self._record)
        if self._whole is not None:
            with nullcontext() if self._side is None else self._side.entered():
                return self._whole()
        return self._by_layers(layers)

    def _by_layers(self, layers: LayerGraphs) -> torch.Tensor:
        if not layers.can_capture:
            self._layers = None
            return self._pass()
        if not layers.is_captured:
            try:
                with layers.capturing():
                    return self._pass()
            except torch.OutOfMemoryError as error:
                log.warning("the canary's layers are not captured, and take longer: %s", str(error).splitlines()[0])
                self._layers = None
            return self._pass()
        captured = self.checksums  # replays write anew what a layer's graph has computed
        with layers.replaying():
            logprobs = self._pass(without=layers.inside)
        self.checksums = captured | self.checksums
        return logprobs

    def _pass(self, without: Modules = frozenset()) -> torch.Tensor:
        """Log-probabilities of all answers, one after the other `[N]`, on the device."""
        with self._within(without) as checksums:
            logprobs = self._policy.answer_logprobs(self._inputs)
        self.checksums = checksums
        return logprobs

    @cached_property
    def _inputs(self) -> PackedInputs:
        """Kept, because graphs read their memory."""
        return self._policy.answer_inputs(self._answers)

    @torch.no_grad()
    def _capture(self, record: Callable[[Work], Work]) -> None:
        policy = self._policy

        def work() -> None:
            self._logprobs = policy.answer_logprobs(self._inputs)

        with self._within(frozenset()) as checksums:
            work()  # warm up: the set-up of a first pass must not be captured
            if policy.device.type == "cuda":
                torch.cuda.synchronize(policy.device)
            self._replay = None  # the next graph, or what runs without one, has the memory of the last
            if policy.device.type == "cuda":
                torch.cuda.empty_cache()  # a capture takes no memory that torch keeps of other work
            self._replay = recorded(record, work, "the canary's pass")
        if self._replay is not None:
            self.checksums = checksums  # the graph's own memory: a replay writes it anew
            self._addresses = self._addresses_now()

    @cached_property
    def _read(self) -> list[torch.Tensor]:
        """All that a graph reads of the model. Listed once: to walk through thousands of modules takes longer than a
        replay."""
        # Buffers too: offloaded weights may come back to where they were and buffers elsewhere, as gradients come and
        # go between them.
        return [*self._policy.model.parameters(), *self._policy.model.buffers()]

    def _addresses_now(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._read)
