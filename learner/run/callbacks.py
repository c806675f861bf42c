"""Calls the user's callbacks (`training.callbacks`) on rank 0, and gives every rank the outcome.

In: the end of a step, of an evaluation, of a save. Out: whether the run shall end (`Callbacks.ended_by`). All other
ranks wait while rank 0 calls the callbacks. So a failed callback ends the run on all ranks at the same point, at which
a checkpoint can be written. After a failure no callback is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from learner.config.schema import RunConfig
from learner.extensions import Callback, callback_classes, where_raised
from learner.policy.parallel import Ranks
from learner.records import StepResult
from shared.errors import CallbackError


class Callbacks:
    """The callbacks of a run, in the order of `training.callbacks`."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        """Import the callback classes, on every rank. Raises ConfigErrors if a callback cannot be imported."""
        self._config, self._ranks, self._parts = config, ranks, callback_classes(config)
        self._made: list[tuple[str, Callback]] = []
        self._has_failed = False
        self.ended_by = ""  # path of the callback that asked for the end of the run; "": no callback

    def make(self) -> None:
        """Make the callback objects, before the first step. Collective. Raises CallbackError on every rank."""
        self._call("__init__", [(path, partial(self._make, path, made)) for path, made in self._parts.items()])

    def step(self, result: StepResult) -> None:
        """Call the callbacks after a step. Collective. Raises CallbackError on every rank."""
        self._call("on_step", [(path, partial(made.on_step, result)) for path, made in self._made])

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call the callbacks after an evaluation. Collective. Raises CallbackError on every rank."""
        self._call("on_eval", [(path, partial(made.on_eval, step, metrics)) for path, made in self._made])

    def save(self, step: int, folder: Path) -> None:
        """Call the callbacks after a checkpoint was saved in `folder`. Collective. Raises CallbackError on every
        rank."""
        self._call("on_save", [(path, partial(made.on_save, step, folder)) for path, made in self._made])

    def _make(self, path: str, made: type[Callback]) -> None:
        self._made.append((path, made(self._config)))

    def _call(self, hook: str, calls: list[tuple[str, Callable[[], bool | None]]]) -> None:
        if not self._parts or self._has_failed:
            return
        outcome: tuple[str, CallbackError | None] = ("", None)
        if self._ranks.is_main:
            outcome = _outcome(hook, calls)
        ended_by, error = self._ranks.broadcast_object(outcome)
        self.ended_by = self.ended_by or ended_by
        if error is not None:
            self._has_failed = True
            raise error


def _outcome(hook: str, calls: list[tuple[str, Callable[[], bool | None]]]) -> tuple[str, CallbackError | None]:
    """Make the calls, in order, until one fails. Return the path of the first callback that asks for the end of the run
    ("": none), and the error of the failed call (None: no call failed)."""
    ended_by = ""
    for path, call in calls:
        try:
            answer = call()
        except Exception as error:  # the user's code may raise anything
            return ended_by, _failed(path, hook, where_raised(error))
        if answer is not None and not isinstance(answer, bool):
            return ended_by, _failed(path, hook, f"it returned {answer!r:.100}")
        if answer and hook != "on_save":
            ended_by = ended_by or path
    return ended_by, None


def _failed(path: str, hook: str, found: str) -> CallbackError:
    return CallbackError(
        f"training.callbacks: {hook} of {path} failed",
        found=found,
        wanted="no exception; True to end the run, or None",
        remedy="correct the callback, or remove it from training.callbacks, and resume",
    )
