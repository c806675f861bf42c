"""A forward pass that is repeated with the same inputs, captured whole as one CUDA graph (R09).

In: a pass, and the weights that it reads. Out: what repeats the pass under the weights of then. A replay takes the host
a millisecond, and the host goes on while the device works.

A model of pages and photographs reads image sizes on the host and brings tables to the device, and neither can be
captured. But with the same inputs both are the same in every pass, unless they depend on weights. So one pass is noted:
which values it read, which tensors it brought, and which tensors depend on weights. Then it is captured with these
values in place of the reads.

Invariants: a read that depends on weights (a mixture of experts) rules a capture out. Before the capture the pass runs
once more with the noted values, in a mode in which torch refuses whatever would wait for the device, and must give what
it gave before: a capture that fails leaves torch's generators unusable.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from learner.policy.layer_graphs import COPIES, INDEXING, READS, Work, recorded

log = logging.getLogger("learner.policy")
Pass = Callable[[], torch.Tensor]

# They copy to the device below what a dispatch mode sees.
_FACTORIES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_CLOSE = 0.01  # nats: the same kernels on the same values


class PassGraph:
    """One pass, captured."""

    def __init__(self, replay: Work, output: torch.Tensor, notes: Notes) -> None:
        self._replay, self._output = replay, output
        self._notes = notes  # the graph reads its tensors

    @classmethod
    def of(cls, run: Pass, weights: Iterable[torch.Tensor], record: Callable[[Work], Work]) -> PassGraph | None:
        """Capture the graph of `run`; None, and a line in the log, if it can't be captured. `record` turns work into
        what repeats it (`CudaRecorder`); it need not run it."""
        notes = Notes(weights)
        with notes.noting():
            now = run()
        obstacle = notes.obstacle or _differs(notes, run, now)
        if obstacle:
            log.info("the canary's pass is not captured whole: %s", obstacle)
            return None
        outputs: list[torch.Tensor] = []

        def work() -> None:
            with notes.repeating():
                outputs.append(run())

        replay = recorded(record, work, "the canary's pass")
        return None if replay is None else cls(replay, outputs[0], notes)

    def __call__(self) -> torch.Tensor:
        """Return what the pass gives under the weights of now, in memory of its own."""
        self._replay()
        return self._output.clone()


def _differs(notes: Notes, run: Pass, before: torch.Tensor) -> str:
    """Return why a pass with the noted values is not that pass, or empty."""
    try:
        with notes.repeating(), no_waits(before.device):
            again = run()
    except RuntimeError as error:  # torch's, for what would wait for the device
        return str(error).splitlines()[0]
    except OtherPassError as error:
        return str(error)
    gap = float((again - before).abs().max()) if before.numel() else 0.0
    return "" if gap <= _CLOSE else f"with the values of before it gives others, by {gap:g} nats"


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Let torch raise RuntimeError on CUDA for operations inside that wait for the device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch may not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class OtherPassError(Exception):
    """A pass reads other things than the one that was noted."""


class Notes:
    """The notes of one pass: what it read on the host, and what it brought to the device, in order. `obstacle`: why it
    can't be repeated with the same values, or empty."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.obstacle = ""
        self._of_weights: dict[int, StorageWeakRef] = {}  # a reference keeps a storage's number from being used again
        self._values: list[tuple[object, Any]] = []  # (function, value); None for a tensor that stays on the host
        self._next = 0
        self._mark(weights)

    @contextmanager
    def noting(self) -> Iterator[None]:
        with _NotedFactories(self), _NotedOperations(self):
            yield

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Repeat a pass with the noted values. Raises OtherPassError if it asks for others."""
        self._next = 0
        with _RepeatedFactories(self), _RepeatedOperations(self):
            yield
        if self._next != len(self._values):
            raise OtherPassError(f"{self._next} values were read, {len(self._values)} in the pass before")

    def put(self, func: object, value: object) -> None:
        self._values.append((func, tree_map_only(torch.Tensor, torch.clone, value)))

    def take(self, func: object) -> Any:
        """Return the next value. The caller copies a tensor that may be written."""
        noted, value = self._values[self._next] if self._next < len(self._values) else (None, None)
        if noted is not func:
            raise OtherPassError(f"{func} comes where {noted} came before")
        self._next += 1
        return value

    def check(self, func: object, read: object) -> None:
        if self.depends(read):
            self.obstacle = f"{func} reads on the host what depends on weights"

    def depends(self, values: object) -> bool:
        """Return True if a tensor among `values` depends on weights."""
        return any(_key(one) in self._of_weights for one in tree_iter(values) if isinstance(one, torch.Tensor))

    def follow(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], returned: object) -> None:
        """Follow an operation: what it wrote depends on weights if anything that it was given does."""
        if self.depends((args, kwargs)):
            self._mark(one for one in tree_iter(returned) if isinstance(one, torch.Tensor))
            self._mark(_written(func, args, kwargs))

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._of_weights.setdefault(storage._cdata, StorageWeakRef(storage))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_iter(given) if isinstance(one, torch.Tensor))


class _Operations(TorchDispatchMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes


class _NotedOperations(_Operations):
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        notes, kwargs = self.notes, kwargs or {}
        if func in INDEXING:
            masks = [one for one in args[1] if is_mask(one)]
            if masks:
                notes.check(func, masks)
                notes.put(func, [one.nonzero(as_tuple=True) for one in masks])
        returned = func(*args, **kwargs)
        if reads(func, args, kwargs):
            notes.check(func, (args, kwargs))
            notes.put(func, returned)
        notes.follow(func, args, kwargs, returned)
        return returned


class _RepeatedOperations(_Operations):
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in INDEXING and any(map(is_mask, args[1])):
            noted = iter(self.notes.take(func))
            places = [place for one in args[1] for place in (next(noted) if is_mask(one) else (one,))]
            return func(args[0], places, *args[2:], **kwargs)
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            return args[0].copy_(self.notes.take(func))
        if not reads(func, args, kwargs):
            return func(*args, **kwargs)
        # Copies: the pass may write into them, and the notes must stay as they are.
        return tree_map_only(torch.Tensor, torch.clone, self.notes.take(func))


def is_mask(index: object) -> TypeGuard[torch.Tensor]:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def reads(func: OpOverload, args: object, kwargs: Mapping[str, Any]) -> bool:
    """True if the operation needs a value of the device on the host, or goes from one to the other. Masks that are
    indices are another matter."""
    if func in COPIES:
        asked = {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
        return len({device.type for device in _devices(args) | asked}) > 1
    return func not in INDEXING and not READS.isdisjoint(func.tags)


def _devices(values: object) -> set[torch.device]:
    return {one.device for one in tree_iter(values) if isinstance(one, torch.Tensor)}


class _Factories(TorchFunctionMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes


class _NotedFactories(_Factories):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if func in _FACTORIES:
            self.notes.check(func, (args[func is torch.Tensor.new_tensor :], kwargs))  # that one's self is a pattern
            self.notes.put(func, made if made.device.type != "cpu" else None)
        return made


class _RepeatedFactories(_Factories):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _FACTORIES and (value := self.notes.take(func)) is not None:
            return value.clone()
        return func(*args, **(kwargs or {}))
