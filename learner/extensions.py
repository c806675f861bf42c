"""A user's own parts, named in the YAML by import path, and the protocols that they follow. `docs/extending.md` shows
one worked example of each.

    task.type          `my_package.my_module:MyTask`      a `Task`: reads, scores and teaches answers
    reward.functions   `[my_package.my_module:my_reward]` `Reward`s: a number for each rollout
    loss.function      `my_package.my_module:my_loss`     a `LossFunction`: what the supervised tokens of a row cost
    data.format        `my_package.my_module:my_reader`   a `Reader`: annotations in a format of your own
    training.callbacks `[my_package.my_module:MyCallback]` `Callback`s: told of each step, evaluation and save

In: a configuration. Out: the classes and functions that it names. The first half of the file defines the protocols, the
second half imports the parts and checks them. `check_extensions` lists all mistakes, key by key. `rollout-learner
check` calls it, and a run calls it before it loads the model.

A module is searched where Python searches, and last in the working directory, so a folder there never hides a module of
this project. Every rank imports the modules for itself.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import ENOENT
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from learner.config.schema import RunConfig
from learner.config.sections.data import DataConfig, SplitConfig
from learner.config.sections.loss import LossConfig
from learner.config.sections.task import TaskConfig
from learner.config.split import as_read_for
from learner.records import RawRecord, Rollout, Sample, StepResult, Target
from shared.config.checks import mistakes_of
from shared.config.model import ConfigErrors, show
from shared.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


# ---- protocols -----------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks and targets need."""

    eos_token_id: int

    def __hash__(self) -> int: ...  # by identity, because tables are cached per tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class Reader(Protocol):
    """Reads annotations: `data.format`."""

    def __call__(self, path: str, data: DataConfig) -> Iterable[RawRecord | Sample]:
        """Read every record of the split at `path`, which is `data.train`, `data.val` or `data.test`.

        A `RawRecord` has objects in pixels. Each `RawRecord` is checked and becomes a `Sample`, as in the built-in
        formats. A `Sample` is used as it is. Relative image paths start at `data.image_root`, or else in the folder of
        `path`. `width` and `height` 0: the size of the first image is taken. Ids must differ.

        Raises DataError if a record cannot be used. `rollout-learner check` and every rank call this once per split.
        """
        ...


class PrefixRewards(NamedTuple):
    """The rewards that an answer earns after its first 0, 1, ..., n objects, and where each object ends."""

    values: NDArray[np.float64]  # [n + 1]
    ends: NDArray[np.int64]  # [n] one past the last response token of each object, ascending


class Task(Protocol):
    """Reads answers, scores answers, and makes the tokens to learn from them: `task.type`. To be subclassed.

    A task is pure: token ids and records in, records out; no model, no HTTP, no clock. Several threads call it. Only
    the task itself looks into the results of its `parse` and `match`. The results of `parse` and `match` must be
    picklable, because ranks exchange them.
    """

    reader: ClassVar[Reader | None] = None  # used if `data.format` names no reader; None: a built-in reader is used

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        """Set up the task. `config.options` has the task's own keys. Raises ConfigError if they or the tokenizer do not
        fit."""
        ...

    def parse(self, rollout: Rollout) -> Any:
        """Return the answer `rollout.response_token_ids` [T], read strictly. Never raises, for any text of the
        model."""
        ...

    def match(self, parsed: Any) -> Any:
        """Compare the result of `parse` with the truth in `rollout.sample`, and return the matches."""
        ...

    def target(self, assignment: Any, loss: LossConfig) -> Target:
        """Return the tokens to learn from the matched answer: token ids [Y], labels [Y] and loss weights [Y], EOS
        included.

        The first `prefix_length` tokens are the rollout's own tokens. A label is -100 exactly where the weight is 0.
        Every token that is learned follows from the tokens before it (`learner.tasks.detection.target` checks this).
        """
        ...

    def ground_truth(self, sample: Sample, loss: LossConfig) -> Target:
        """Return the whole right answer for plain teacher forcing (`sft`, Channel-A steps). The right answer also shows
        how long an answer may become."""
        ...

    def stats(self, assignment: Any) -> Mapping[str, float]:
        """Return counts of one rollout, by name. A step's metrics are the sums of these counts over its rollouts on all
        ranks."""
        ...

    def counts(self, assignments: Sequence[Any]) -> list[Mapping[str, float]]:
        """Return, for each assignment, the counts that `evaluate` adds up. A bootstrap over samples resamples these
        counts."""
        ...

    def evaluate(self, assignments: Sequence[Any]) -> Mapping[str, float]:
        """Return metrics over a whole evaluation set, by name; for [] each metric is 0."""
        ...

    def calibration(self, assignments: Sequence[Any]) -> str | None:
        """Fit a calibration of scores on greedy answers to validation samples. Return it as the text of
        `calibration.json`. None: answers of this task have no scores, or the answers are too few to fit."""
        return None

    def calibrated(self, assignments: Sequence[Any], calibration: str | None = None) -> Sequence[Any]:
        """Return the assignments with calibrated scores, for `evaluate` and `scene`. `calibration`: a text that the
        method `calibration` returned for other samples. None: each sample's scores are calibrated by a fit on the other
        samples given here. Assignments stay as they are if answers have no scores, or are too few to fit."""
        return assignments

    def reason(self, assignments: Sequence[Any], metrics: Mapping[str, float]) -> tuple[str, str] | None:
        """Return the reason why a score is near 0, and the remedy; None: no score is near 0, or the reason is
        unknown."""
        return None

    def rewards(self, assignment: Any, names: Collection[str]) -> Mapping[str, float]:
        """Return the rewards of this task that are in `names` (keys of `reward.weights`), by name. Each is finite, and
        larger for better answers."""
        return {}

    def prefix_rewards(self, assignment: Any, weights: Mapping[str, float]) -> PrefixRewards | None:
        """Return the part of the weighted reward that single objects earn, for `grpo.credit: object`; None: this task
        cannot divide its reward by object."""
        return None

    def scene(self, assignment: Any) -> Mapping[str, Any]:
        """Return one line of `eval/step_N.jsonl`: truth and answer as JSON."""
        ...

    def validate(self, sample: Sample) -> None:
        """Raises DataError if the task cannot use the sample. Called once for each sample, before training."""
        ...

    @staticmethod
    def check(sample: Sample) -> None:
        """Do the part of `validate` that needs no tokenizer, for `rollout-learner check`. Raises DataError."""
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One rollout as a reward sees it. `text`: the answer's text without special tokens. `assignment`: the result of
    the task's `match` for the answer."""

    sample: Sample
    rollout: Rollout
    text: str
    assignment: Any


class Reward(Protocol):
    """Scores one rollout: an entry of `reward.functions`."""

    def __call__(self, answer: Answer) -> float:
        """Return a finite number, larger for better answers. Several threads call it. An exception ends the run as a
        RewardError, which names the function and the sample."""
        ...


class LossFunction(Protocol):
    """The cost of a row's supervised tokens: `loss.function`."""

    def __call__(self, logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the *sum* over tokens, a float32 scalar. A mean would be wrong: the learner divides once by the weight
        of the whole step, so that packing and the number of ranks do not change the gradient.

        `logprobs` [N], float32, in nats, with gradient: the log-probability of each label, given the tokens before it.
        `weights` [N], float32: positive. N is at least 1. Without a function the sum is
        `-(logprobs * weights).sum()`.
        """
        ...


class Callback:
    """Is told of each step, evaluation and checkpoint: an entry of `training.callbacks`. To be subclassed.

    Made and called on rank 0 alone, in its main thread. A callback may write files, send messages and keep state; a
    resumed run makes a new one. A callback may not change weights or call torch.distributed: the other ranks wait for
    it, at most `training.collective_timeout_s`. If a callback raises, the last whole step is saved, and the run ends on
    all ranks with a CallbackError that names the callback.
    """

    def __init__(self, config: RunConfig) -> None:
        """Take the whole configuration; `config.training.output_dir` is the run's folder."""
        self.config = config

    def on_step(self, result: StepResult) -> bool | None:
        """Act after each optimizer step; `result` is reduced over ranks. Return True to end the run as after its last
        step."""
        return None

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Act after each evaluation, with its metrics by name. Return True to end the run like after its last step."""
        return None

    def on_save(self, step: int, folder: Path) -> None:
        """Act after each complete checkpoint, except the checkpoint that is written when the run fails."""


# ---- imports -------------------------------------------------------------------------------------------------------

TASKS = {
    "detection": "learner.tasks.detection.task:DetectionTask",
    "key_value": "learner.tasks.key_value:KeyValueTask",
}
_WANTED = "the import path of {}, as in my_package.my_module:name"


def task_class(config: TaskConfig) -> type[Task]:
    """Return the class of `task.type`. Raises ConfigErrors."""
    if ":" not in config.type and config.type not in TASKS:
        near = difflib.get_close_matches(config.type, TASKS, n=1)
        wanted = f"{', '.join(TASKS)}, or {_WANTED.format('a task')}"
        remedy = f"did you mean {near[0]}?" if near else "correct the name"
        raise ConfigErrors.one("task.type", show(config.type), wanted, remedy)
    _check_options(config)
    return _checked_task(config.type, _find("task.type", TASKS.get(config.type, config.type), "a task"))


def _check_options(config: TaskConfig) -> None:
    """Raises ConfigErrors if nothing reads `task.options`."""
    if config.options and config.type in TASKS:
        found, wanted = f"the keys {', '.join(config.options)}", f"none: {config.type} has no options"
        remedy = "remove them, or set task.type to a task of your own"
        raise ConfigErrors.one("task.options", found, wanted, remedy)


def make_task(config: TaskConfig, tokenizer: Tokenizer) -> Task:
    """Return the task of a run. Raises ConfigError if the configuration or the tokenizer does not fit the task."""
    return task_class(config)(config, tokenizer)


def reward_functions(config: RunConfig) -> dict[str, Reward]:
    """Return `reward.functions` by the part of their path after the colon. Raises ConfigErrors."""
    found: dict[str, Reward] = {}
    for i, path in enumerate(config.reward.functions):
        key, name = f"reward.functions[{i}]", path.rpartition(":")[2]
        if name in found:
            remedy = "remove one, or rename the function"
            raise ConfigErrors.one(key, f"a second reward {name}", "names that differ", remedy)
        found[name] = _find(key, path, "a reward function", arguments=("answer",))
    return found


def loss_function(config: RunConfig) -> LossFunction | None:
    """Return `loss.function`. Raises ConfigErrors."""
    path = config.loss.function
    return None if path is None else _find("loss.function", path, "a loss function", arguments=("logprobs", "weights"))


def reader_of(config: RunConfig, split: str = "train") -> Reader | None:
    """Return the reader that the split's format or `data.format` names, or else the task's reader; None: a built-in
    format is read. Raises ConfigErrors."""
    path = as_read_for(config.data, split).reader
    if path is not None:
        key = "data.format" if path == config.data.reader else f"data.{split}.format"
        return _find(key, path, "a reader", arguments=("path", "data"))
    own = {"val": config.data.val, "test": config.data.test}.get(split)
    has_format = isinstance(own, SplitConfig) and own.format is not None
    return None if has_format or config.task.type == "detection" else task_class(config.task).reader


def callback_classes(config: RunConfig) -> dict[str, type[Callback]]:
    """Return `training.callbacks` by their path. Raises ConfigErrors."""
    found: dict[str, type[Callback]] = {}
    for i, path in enumerate(config.training.callbacks):
        key = f"training.callbacks[{i}]"
        value = _find(key, path, "a callback")
        if not (isinstance(value, type) and issubclass(value, Callback)):
            what = "another class" if isinstance(value, type) else f"a {type(value).__name__}"
            wanted = "a subclass of learner.extensions.Callback"
            raise ConfigErrors.one(key, f"{show(path)}: {what}", wanted, "see docs/extending.md")
        if path in found:
            raise ConfigErrors.one(key, f"{show(path)} again", "each callback once", "remove one")
        found[path] = value
    return found


def check_extensions(config: RunConfig) -> None:
    """Import everything that the configuration names. Raises ConfigErrors with all mistakes."""
    # The class of `detection` loads more than a check needs.
    looks: list[Callable[[], object]] = [
        partial(_check_options if config.task.type == "detection" else task_class, config.task),
        lambda: reward_functions(config),
        lambda: loss_function(config),
        lambda: callback_classes(config),
        *(partial(reader_of, config, split) for split in ("train", "val", "test")),
    ]
    # Splits may share a reader, and then its mistake is listed once.
    if mistakes := list(dict.fromkeys(mistake for look in looks for mistake in mistakes_of(look))):
        raise ConfigErrors("the configuration names parts that cannot be used", mistakes=mistakes)


def _find(key: str, path: str, what: str, *, arguments: Sequence[str] = ()) -> Any:
    """Return the object at `module:name`. Raises ConfigErrors if there is no such object, or if it cannot be called
    with `arguments`."""
    try:
        value = _import(path)
        if arguments:
            _check_call(value, arguments)
    except ConfigError as error:
        found = f"{show(path)}: {error.found or error.what}"
        raise ConfigErrors.one(key, found, error.wanted or _WANTED.format(what), error.remedy) from error
    return value


def _import(path: str) -> Any:
    module_name, colon, names = path.partition(":")
    if not (colon and module_name and names):
        raise ConfigError("no colon between module and name", remedy="write module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        # The working directory comes last, so that a folder in it hides no module of this project.
        sys.path.append(here)
    try:
        value: Any = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        raise _import_failed(module_name, error) from error
    for name in names.split("."):
        if not hasattr(value, name):
            near = difflib.get_close_matches(name, dir(value), n=1)
            place = getattr(value, "__file__", None) or getattr(value, "__name__", value)
            remedy = f"did you mean {near[0]}?" if near else f"define it, or correct the name ({place})"
            raise ConfigError(f"{module_name} has no {name}", remedy=remedy)
        value = getattr(value, name)
    return value


def _load_file(path: str) -> ModuleType:
    """Return the module in a file. The module's name is made from `path` alone, because another module may have the
    file's name. The name is the same on every rank, so that ranks can send each other objects of its classes."""
    name = "part_" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in path)
    if name in sys.modules:
        return sys.modules[name]
    if not Path(path).is_file():
        raise FileNotFoundError(ENOENT, "no such file", path)
    spec = importlib.util.spec_from_file_location(name, Path(path).resolve())
    assert spec is not None, "its suffix is .py"
    assert spec.loader is not None
    # A dataclass looks its module up by name while the module is executed.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # The next import must not find half of a module.
        del sys.modules[name]
        raise
    return module


def _import_failed(module_name: str, error: Exception) -> ConfigError:
    # If another file or module is missing, the user's module was found, and has tried to read or import it.
    if isinstance(error, FileNotFoundError) and error.filename == module_name:
        remedy = f"correct the path; it is relative to the working directory, {Path.cwd()}"
        return ConfigError(f"there is no file {module_name}", remedy=remedy)
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        remedy = f"correct the path, install the package, or start in the folder that holds {error.name}"
        return ConfigError(f"there is no module {error.name}", remedy=remedy)
    found = f"importing {module_name} failed with {where_raised(error)}"
    return ConfigError(found, wanted="a module that can be imported", remedy="correct the module")


def where_raised(error: Exception) -> str:
    """Describe an error of the user's code: its type, its text, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def _check_call(value: Any, arguments: Sequence[str]) -> None:
    wanted, remedy = f"a function of ({', '.join(arguments)})", "see docs/extending.md"
    if not callable(value) or isinstance(value, type):
        found = "a class" if isinstance(value, type) else f"a {type(value).__name__}"
        raise ConfigError("", found=found, wanted=wanted, remedy=remedy)
    try:
        signature = inspect.signature(value)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        found = f"a function of {signature} ({error})"
        raise ConfigError("", found=found, wanted=wanted, remedy=remedy) from error


def _checked_task(path: str, value: Any) -> type[Task]:
    """Return `value`. Raises ConfigErrors if `value` is not a class with everything that a `Task` has."""
    wanted, remedy = "a class with the methods of learner.extensions.Task", "see docs/extending.md"
    found = ""
    if not isinstance(value, type):
        found = f"a {type(value).__name__}, not a class"
    elif missing := sorted(_missing_methods(value)):
        found = f"a class without {', '.join(missing)}"
    if found:
        raise ConfigErrors.one("task.type", f"{show(path)}: {found}", wanted, remedy)
    return value


# A task may lack these methods, because it may have been written before they were added.
_WITH_DEFAULTS = {"check", "rewards", "prefix_rewards", "calibration", "calibrated", "reason"}


def _missing_methods(value: type) -> Iterator[str]:
    """Yield the methods of `Task` that the class lacks, or only inherits from the protocol."""
    for name, method in vars(Task).items():
        if inspect.isfunction(method) and not name.startswith("_") and name not in _WITH_DEFAULTS:
            own = getattr(value, name, None)
            if not callable(own) or own is method:
                yield name
    if not all(hasattr(value, name) for name in (*_WITH_DEFAULTS, "reader")):
        yield "check and reader (subclass learner.extensions.Task)"
