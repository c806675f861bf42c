"""`--check` of the annotations: everything that can be checked without a tokenizer or a model.

In: a configuration. Out: how many samples a split has, what is dropped or clipped, and every record that cannot be
used. Headers of images are read, URLs are not fetched. What needs the tokenizer (whether a description survives it, how
long a sample is) is checked before the first step. Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from learner.config.schema import DataConfig
from learner.data.readers import load_split, read_split
from learner.records import GeometryKind, Sample
from learner.tasks.detection.write import validate_sample
from shared.config.model import Mistake
from shared.errors import DataError


class WithoutTokenizer:
    """The part of `Task.validate` that needs no tokenizer."""

    def validate(self, sample: Sample) -> None:
        validate_sample(sample, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedSplit:
    """`dropped`: number of records by kind and action. `mistakes`: one per bad record, and one with the number of the
    others."""

    num_samples: int = 0
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)


def splits(data: DataConfig) -> dict[str, str]:
    """The annotations of `train`, and of `val` and `test` if they are given."""
    files = {"train": data.train, "val": data.val, "test": data.test}
    return {split: path for split, path in files.items() if path is not None}


def check_split(data: DataConfig, split: str, path: str, geometry: GeometryKind) -> CheckedSplit:
    """What is in the annotations at `path`; never raises DataError."""
    key = f"data.{split}"
    try:
        found = read_split(data, path, WithoutTokenizer(), geometry=geometry)
    except DataError as error:
        return CheckedSplit(mistakes=[Mistake.of(error, key)])
    mistakes = [Mistake.of(error, key) for error in found.bad.errors]
    more = found.bad.num_errors - len(mistakes)
    if more:
        remedy = "correct them, or set data.on_bad_record for each kind"
        mistakes.append(
            Mistake(path=key, found=f"{more} more records that cannot be used", wanted="none", remedy=remedy)
        )
    return CheckedSplit(num_samples=len(found.samples), dropped=found.bad.summary(), mistakes=mistakes)


def count_samples(data: DataConfig, path: str, geometry: GeometryKind = "bbox_2d") -> int:
    """Samples of one split. Raises DataError, which lists every record that cannot be used."""
    return len(load_split(data, path, WithoutTokenizer(), geometry=geometry).samples)
