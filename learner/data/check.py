"""Checks annotations for `--check`, without a tokenizer or a model.

In: a configuration. Out: how many samples a split has, how many records are dropped or clipped, and every record that
cannot be used. Headers of images are read, URLs are not fetched. Checks that need the tokenizer (the length of a
sample, whether a description stays the same) are made before the first step. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from learner.config.retained import retained_configs
from learner.config.schema import RunConfig
from learner.config.split import as_read_for
from learner.data.raw import Validates
from learner.data.splits import Split, load_split, read_split
from learner.extensions import reader_of, task_class
from learner.records import Sample
from shared.config.model import Mistake
from shared.errors import DataError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class WithoutTokenizer:
    """A task whose `validate` makes only the checks of `Task.validate` that need no tokenizer."""

    check: Callable[[Sample], None]

    def validate(self, sample: Sample) -> None:
        self.check(sample)


def checks_of(config: RunConfig) -> Validates:
    """Return the checks of a run's samples that need no tokenizer. Raises ConfigErrors."""
    # The class of this task would load more modules than a check needs.
    if config.task.type == "detection":
        from learner.tasks.detection.write import validate_sample

        return WithoutTokenizer(partial(validate_sample, pieces=None))
    return WithoutTokenizer(task_class(config.task).check)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedSplit:
    """The result of checking a split. `dropped` counts records by kind and action. `mistakes` lists the first bad
    records, one item each; if there are more, a last item counts the rest."""

    num_samples: int = 0
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    split: Split | None = None  # samples of the split that could be read


def splits(config: RunConfig) -> dict[str, str]:
    """Return the paths of `train`, and of `val` and `test` if they are set."""
    return {split: path for split in SPLITS if (path := config.data.path_of(split)) is not None}


def check_retained(config: RunConfig) -> dict[str, CheckedSplit]:
    """Return the checked annotations of `data.retain`, by name."""
    return {
        f"retain {name}": check_split(own, "train", own.data.train, key=f"data.retain ({name})")
        for name, own in retained_configs(config).items()
    }


def check_split(config: RunConfig, split: str, path: str, *, key: str = "") -> CheckedSplit:
    """Check the annotations of `split`, which are at `path`. Never raises DataError. `key` is the name that mistakes
    show, `data.SPLIT` if it is empty."""
    key = key or f"data.{split}"
    data, geometry = as_read_for(config.data, split), config.task.geometry
    try:
        found = read_split(data, path, checks_of(config), geometry=geometry, reader=reader_of(config, split))
    except DataError as error:
        return CheckedSplit(mistakes=[Mistake.of(error, key)])
    mistakes = [Mistake.of(error, key) for error in found.bad.errors]
    if mistakes and (hint := found.bad.reach.hint()):
        wanted, remedy = "numbers in the unit that is read", "look at the photographs with their boxes"
        # If boxes are read in a wrong unit, most other mistakes follow from the wrong unit. So the mistake about the
        # unit comes first.
        mistakes.insert(0, Mistake(path=key, found=hint, wanted=wanted, remedy=remedy))
    more = found.bad.num_errors - len(mistakes)
    if more:
        remedy = "correct them, or set data.on_bad_record for each kind"
        mistakes.append(
            Mistake(path=key, found=f"{more} more records that cannot be used", wanted="none", remedy=remedy)
        )
    if key == "data.train" and config.data.augment is not None:
        mistakes += _not_augmentable(found.samples)
    return CheckedSplit(num_samples=len(found.samples), dropped=found.bad.summary(), mistakes=mistakes, split=found)


def _not_augmentable(samples: Sequence[Sample]) -> list[Mistake]:
    """Return a mistake for the first sample that cannot be augmented; [] if all can."""
    # The import loads numpy, which a check without augmentation does not need.
    from learner.data.augment import require_augmentable

    try:
        for sample in samples:
            require_augmentable(sample)
    except DataError as error:
        return [Mistake.of(error, "data.augment")]
    return []


def load_unchecked(config: RunConfig, path: str, *, limit: int | None = None) -> list[Sample]:
    """Return at most `limit` samples of a file that is read as `data.train`, without the checks that need a tokenizer.
    Raises DataError, which lists every record that cannot be used."""
    geometry, reader = config.task.geometry, reader_of(config)
    return load_split(config.data, path, checks_of(config), geometry=geometry, reader=reader, limit=limit).samples
