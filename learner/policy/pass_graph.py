"""Records a forward pass as one CUDA graph, for a pass that is repeated with the same inputs (R09).

In: a pass, and the weights that it reads. Out: a `PassGraph`, whose call repeats the pass with the present weights.

A model for images reads image sizes on the host, and copies tables to the device. Such reads and copies cannot be
captured, but their values are the same in every pass, because the inputs are the same. So one pass is recorded in
`Notes`: the values read, the values copied, and which tensors depend on weights. The captured pass gets the recorded
values instead of reading and copying.

Invariants: a pass is not captured if the host reads values that depend on weights (as in a mixture of experts). Before
the capture the pass runs once more with the recorded values, and must give the same output. During this trial pass
torch refuses operations that wait for the device.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

log = logging.getLogger("learner.policy")
Pass = Callable[[], torch.Tensor]
Work = Callable[[], None]
Record = Callable[[Work], Work]  # captures work; returns a function that repeats it. The capture may also run the work
Given = Mapping[str, Any]  # keyword arguments

INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Functions of torch that copy values to the device. A TorchDispatchMode does not see these copies.
_FACTORIES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_CLOSE = 0.01  # max difference, in nats, between the outputs of the recorded pass and of the trial


def cuda_graph(work: Work) -> Work:
    """Capture what `work` launches on the current CUDA device; return the function that executes it. Raises
    OutOfMemoryError."""
    graph, stream, now = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    # CUDA cannot capture on its default stream, so the work runs on another stream.
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        # In the mode `thread_local`, other threads may use the device during the capture.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    now.wait_stream(stream)
    replay: Work = graph.replay
    return replay


class PassGraph:
    """A captured forward pass. A call repeats the pass with the present weights."""

    def __init__(self, replay: Work, output: torch.Tensor, notes: Notes) -> None:
        self._replay, self._output = replay, output
        self._notes = notes  # kept, because the graph reads their tensors

    @classmethod
    def of(cls, run: Pass, weights: Iterable[torch.Tensor], record: Record = cuda_graph) -> PassGraph | None:
        """Return the pass `run` captured as a graph. If the pass cannot be captured, return None and log the reason. If
        `run` reads on the host, no other thread may wait for the device during the capture."""
        notes = Notes(weights)
        with notes.noting():
            now = run()
        # The pass is tried before it is captured, because a failed capture leaves torch's random generators unusable.
        if obstacle := notes.obstacle or _differs(notes, run, now):
            log.info("the canary's pass is not captured: %s", obstacle)
            return None
        outputs: list[torch.Tensor] = []

        def work() -> None:
            with notes.repeating():
                outputs.append(run())

        try:
            return cls(record(work), outputs[0], notes)
        # A lack of memory for the graph must not end the run: a sync without it is only slower.
        except torch.OutOfMemoryError as error:
            log.warning("the canary's pass is not captured, and takes longer: %s", str(error).splitlines()[0])
            return None

    def __call__(self) -> torch.Tensor:
        """Return a copy of the pass's output, computed with the present weights."""
        self._replay()
        return self._output.clone()


def _differs(notes: Notes, run: Pass, before: torch.Tensor) -> str:
    """Run the pass with the recorded values. Return how the new pass differs from the recorded pass, whose output is
    `before`; "" if it does not differ."""
    try:
        with notes.repeating(), _no_waits() if notes.has_values and before.is_cuda else nullcontext():
            again = run()
    except (OtherPassError, RuntimeError) as error:  # torch's RuntimeError: an operation waits for the device
        return str(error).splitlines()[0]
    gap = float((again - before).abs().max()) if before.numel() else 0.0
    return "" if gap <= _CLOSE else f"with the values of before it gives others, by {gap:g} nats"


@contextmanager
def _no_waits() -> Iterator[None]:
    """Make torch raise RuntimeError for operations in the `with` block that wait for the CUDA device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode may not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class OtherPassError(Exception):
    """A repeated pass reads or copies other values than the recorded pass."""


class Notes:
    """The values that one pass read on the host or copied to the device, in order. `obstacle`: why the pass cannot be
    repeated with these values; "" if it can. `weights`: the tensors that change between passes."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.obstacle = ""
        # Storages of tensors that depend on weights, by their number. As long as a weak reference exists, torch gives
        # the number to no other storage.
        self._of_weights: dict[int, StorageWeakRef] = {}
        self._values: list[tuple[object, Any]] = []  # (function, value); value None: a repeated pass computes it anew
        self._next = 0  # index of the recorded value that a repeated pass reads next
        self.has_values = False  # True: the pass read a value on the host, or copied one to the device
        self._mark(weights)

    def noting(self) -> AbstractContextManager[None]:
        return _watched(self._note_factory, self._note_operation)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let a pass inside the `with` block use the recorded values instead of reading and copying. Raises
        OtherPassError if the pass reads or copies other values than the recorded pass."""
        self._next = 0
        with _watched(self._repeat_factory, self._repeat_operation):
            yield
        # With fewer reads the pass took another path, and the graph must not repeat such a pass.
        if self._next != len(self._values):
            raise OtherPassError(f"{self._next} values were read, {len(self._values)} in the pass before")

    def _note_factory(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Given) -> object:
        made = func(*args, **kwargs)
        if func in _FACTORIES:
            # The value of the tensor whose method `new_tensor` is called does not matter.
            read = (args[func is torch.Tensor.new_tensor :], kwargs)
            self._put(func, read, made if made.device.type != "cpu" else None)
        return made

    def _repeat_factory(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Given) -> object:
        value = self._take(func) if func in _FACTORIES else None
        return func(*args, **kwargs) if value is None else value.clone()

    def _note_operation(self, func: OpOverload, args: Sequence[Any], kwargs: Given) -> object:
        if func in INDEXING and (masks := list(filter(is_mask, args[1]))):
            self._put(func, masks, [one.nonzero(as_tuple=True) for one in masks])
        returned = func(*args, **kwargs)
        if reads(func, args, kwargs):
            self._put(func, (args, kwargs), returned)
        # Results of operations on weights depend on weights, and so do tensors into which they are written.
        if self._depends((args, kwargs)):
            self._mark([*_tensors(returned), *_written(func, args, kwargs)])
        return returned

    def _repeat_operation(self, func: OpOverload, args: Sequence[Any], kwargs: Given) -> object:
        if func in INDEXING and any(map(is_mask, args[1])):
            noted = iter(self._take(func))
            places = [place for one in args[1] for place in (next(noted) if is_mask(one) else (one,))]
            return func(args[0], places, *args[2:], **kwargs)
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            return args[0].copy_(self._take(func))
        if not reads(func, args, kwargs):
            return func(*args, **kwargs)
        # The recorded values are copied, because the pass may write into them, and they are needed again.
        return tree_map_only(torch.Tensor, torch.clone, self._take(func))

    def _put(self, func: object, read: object, value: object) -> None:
        if self._depends(read):
            self.obstacle = f"{func} reads on the host what depends on weights"
        self.has_values |= value is not None
        self._values.append((func, tree_map_only(torch.Tensor, torch.clone, value)))

    def _take(self, func: object) -> Any:
        noted, value = self._values[self._next] if self._next < len(self._values) else (None, None)
        if noted is not func:
            raise OtherPassError(f"{func} comes where {noted} came before")
        self._next += 1
        return value

    def _depends(self, values: object) -> bool:
        return any(one.untyped_storage()._cdata in self._of_weights for one in _tensors(values))

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._of_weights.setdefault(storage._cdata, StorageWeakRef(storage))


def _tensors(values: object) -> list[torch.Tensor]:
    return [one for one in tree_iter(values) if isinstance(one, torch.Tensor)]


def _written(func: OpOverload, args: Sequence[object], kwargs: Given) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def is_mask(index: object) -> TypeGuard[torch.Tensor]:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def reads(func: OpOverload, args: object, kwargs: Given) -> bool:
    """Return True if the operation reads a value of the device on the host, or copies between host and device.
    Indexing, also by a mask, gives False, because `Notes` handles it separately."""
    if func in _COPIES:
        asked = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
        given = [one.device for one in _tensors(args)]
        return len({device.type for device in (*given, *asked)}) > 1
    return func not in INDEXING and not _READS.isdisjoint(func.tags)


@contextmanager
def _watched(factory: Callable[..., object], operation: Callable[..., object]) -> Iterator[None]:
    """In the `with` block, call `factory` in place of torch's functions, and `operation` in place of their operations.
    Both get (function, args, kwargs) and return the function's result."""

    class Factories(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Given | None = None) -> object:
            return factory(func, args, kwargs or {})

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Given | None = None) -> object:
            return operation(func, args, kwargs or {})

    with Factories(), Operations():
        yield
