"""A forward pass that is repeated with the same inputs, its layers captured as CUDA graphs (R09).

In: a model, and passes inside `watching`, then `capturing`, then `replaying`, each with the same inputs and with
weights at the same addresses. Out: the values of an eager pass. Most of an eager pass of a large model is Python that
launches kernels. A whole pass can be captured only without images, because models read image sizes on the host. Their
layers do not. So each call of a layer becomes a graph, and the rest runs eagerly.

Invariants: a layer that reads on the host (a mixture of experts) is seen by `watching`, and then nothing may be
captured, because a capture that fails leaves torch's generators unusable. Every tensor that a layer is given is copied
into its graph's own before each replay, and what it returns is a copy, so graphs share their buffers and their memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

log = logging.getLogger("learner.policy")
Work = Callable[[], None]
Forward = Callable[..., object]
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


@dataclass(frozen=True, kw_only=True, slots=True)
class _GraphedCall:
    """One layer's call. `inputs`: what its graph reads, tensors and others; `outputs`: the tensors that it writes."""

    replay: Work
    inputs: Sequence[object]
    outputs: Sequence[torch.Tensor]
    returned: TreeSpec


class LayerGraphs:
    """`record` turns work into what repeats it (`CudaRecorder`); it need not run it."""

    def __init__(self, model: torch.nn.Module, record: Callable[[Work], Work]) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._record = record
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}
        self._calls: list[_GraphedCall] = []
        self.can_capture = bool(self._layers)

    @property
    def is_captured(self) -> bool:
        return bool(self._calls)

    @cached_property
    def inside(self) -> frozenset[torch.nn.Module]:
        """The modules that a replay does not call."""
        return frozenset(module for layer in self._layers for module in layer.modules())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the layers run as they are. `can_capture` is false afterwards if one of them read a value on the
        host."""

        def watch(forward: Forward, *args: object, **kwargs: object) -> object:
            with _HostReads() as reads:
                returned = forward(*args, **kwargs)
            self.can_capture = self.can_capture and not reads.found and _is_plain(returned)
            return returned

        with self._through(watch):
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Layers are captured, and run."""
        assert self.can_capture, "watching comes first"
        self._calls = []
        with self._through(self._capture):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Run the graphs in place of their layers."""
        calls = iter(self._calls)
        with self._through(lambda _, *args, **kwargs: _replayed(next(calls), args, kwargs)):
            yield
        assert next(calls, None) is None, "a pass calls the layers that were captured"

    @contextmanager
    def _through(self, run: Callable[..., object]) -> Iterator[None]:
        """Each layer's call is `run(forward, ...)`."""
        with ExitStack() as stack:
            for layer in self._layers:
                assert "forward" not in vars(layer), "nobody else replaces a layer's forward"
                layer.forward = partial(run, layer.forward)
                stack.callback(delattr, layer, "forward")
            yield

    def _capture(self, forward: Forward, *args: object, **kwargs: object) -> object:
        leaves, given = tree_flatten((args, kwargs))
        inputs = [self._buffer("in", i, one) if _is_tensor(one) else one for i, one in enumerate(leaves)]
        _fill(inputs, leaves)
        outputs: list[torch.Tensor] = []
        spec: list[TreeSpec] = []

        def work() -> None:
            own_args, own_kwargs = tree_unflatten(inputs, given)
            found, returned = tree_flatten(forward(*own_args, **own_kwargs))
            if not spec:
                spec.append(returned)
                outputs.extend(self._buffer("out", i, one) for i, one in enumerate(found))
            torch._foreach_copy_(outputs, found)

        with _without_autocast_cache():  # it would keep a copy of the weights in the graphs' memory
            replay = self._record(work)
        self._calls.append(_GraphedCall(replay=replay, inputs=inputs, outputs=outputs, returned=spec[0]))
        return _replayed(self._calls[-1], args, kwargs)

    def _buffer(self, use: str, index: int, like: torch.Tensor) -> torch.Tensor:
        """Shared by all calls, because each is done with it before the next one begins."""
        key = use, index, like.shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._buffers[key]


def _replayed(call: _GraphedCall, args: object, kwargs: object) -> object:
    _fill(call.inputs, tree_iter((args, kwargs)))
    call.replay()
    # Copies, because the next call writes into the same outputs.
    return tree_unflatten([output.clone() for output in call.outputs], call.returned)


def _fill(inputs: Iterable[object], given: Iterable[object]) -> None:
    torch._foreach_copy_(list(filter(_is_tensor, inputs)), list(filter(_is_tensor, given)))


class CudaRecorder:
    """Work on `device` as CUDA graphs that are replayed in the order in which they were captured: they share the memory
    of what they compute on the way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # torch drops a pool with the last one

    def __call__(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self._graphs.add(graph)
            # CUDA captures nothing on its default stream, so the work goes to another one.
            self._stream.wait_stream(now)
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may broadcast
                try:
                    work()
                finally:
                    graph.capture_end()
            now.wait_stream(self._stream)
        replay: Work = graph.replay
        return replay


def recorded(record: Callable[[Work], Work], work: Work, what: str) -> Work | None:
    """Return what repeats `work`; None, and a warning that names `what`, if the device has no memory for the capture.
    Raises any other error: torch's generators are unusable then."""
    try:
        return record(work)
    except torch.OutOfMemoryError as error:
        log.warning("%s is not captured as a CUDA graph, and takes longer: %s", what, str(error).splitlines()[0])
        return None


class _HostReads(TorchDispatchMode):
    """`found`: an operation needs a value of the device on the host, or would on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        returned = func(*args, **(kwargs or {}))
        self.found = self.found or _reads(func, args, (args, kwargs, returned))
        return returned


def _reads(func: OpOverload, args: Sequence[object], involved: object) -> bool:
    if func in INDEXING:  # indexing by a mask counts what the mask selects
        return any(_is_tensor(one) and one.dtype in (torch.bool, torch.uint8) for one in tree_iter(args[1]))
    if func in COPIES:
        return len({one.device for one in tree_iter(involved) if _is_tensor(one)}) > 1
    return not READS.isdisjoint(func.tags)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _is_tensor(one: object) -> TypeGuard[torch.Tensor]:
    return isinstance(one, torch.Tensor)


def _is_plain(returned: object) -> bool:
    """True if a layer returned tensors only, in tuples or lists."""
    return all(map(_is_tensor, tree_iter(returned)))
