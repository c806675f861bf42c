"""`--check` of the annotations: everything that can be known without a tokenizer, an image file or a model.

In: a configuration. Out: how many samples a file has. What needs the tokenizer (whether a description survives it,
how long a prompt is) and the images is checked when training starts. Imports neither torch nor transformers. Called by
`learner/config/check.py` and the doctor.
"""

from __future__ import annotations

from learner.config.schema import DataConfig
from learner.data.readers import load_samples
from learner.records import Sample
from learner.tasks.detection.write import validate_sample


class WithoutTokenizer:
    """The part of `Task.validate` that needs none."""

    def validate(self, sample: Sample) -> None:
        validate_sample(sample, None)


def splits(data: DataConfig) -> dict[str, str]:
    """The annotation file of `train`, and of `val` and `test` where they are given."""
    files = {"train": data.train, "val": data.val, "test": data.test}
    return {split: path for split, path in files.items() if path is not None}


def count_samples(data: DataConfig, path: str) -> int:
    """Samples of one annotation file. Raises DataError with file, line and reason."""
    return len(load_samples(data, path, WithoutTokenizer()))
