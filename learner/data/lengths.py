"""Whether a sample's prompt and labels fit a packed row: asked of all training samples before the first step.

In: a sample. Out: what is too long, or None. No pixels are decoded: the processor tells an image's tokens by its size.
An answer is tokenized only where an upper bound of its tokens does not settle it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from learner.data.prompt import PromptEncoder
from learner.records import DetectionObject, Sample
from learner.target.target import ground_truth_target
from learner.tasks.task import Task

_CONTAINER_BYTES = 16
_OBJECT_BYTES = 64  # of the longest key, its quotes and brackets
_NUMBER_BYTES = 16  # "<|coord_999|>, "
_ESCAPED_BYTES = 6  # of one byte of a description, as `\u0001`


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """For rows of `max_tokens`."""

    encoder: PromptEncoder
    task: Task
    max_tokens: int

    def __call__(self, sample: Sample) -> str | None:
        """Raises DataError where the sample's turns and images do not fit the model."""
        prompt = self.encoder.num_tokens(sample)
        if prompt + _most_tokens(sample.objects) <= self.max_tokens:
            return None
        answer = len(ground_truth_target(sample, self.task, self.encoder.tokenizer).token_ids)
        if prompt + answer <= self.max_tokens:
            return None
        total = f"{prompt + answer} tokens: a prompt of {prompt}, and {answer} for {len(sample.objects)} objects"
        return f"{total} (global_max_length: {self.max_tokens})"


def _most_tokens(objects: Iterable[DetectionObject]) -> int:
    """An upper bound: a token has at least one byte."""
    sizes = (
        _OBJECT_BYTES + _ESCAPED_BYTES * len(obj.desc.encode(errors="replace")) + _NUMBER_BYTES * len(obj.bins)
        for obj in objects
    )
    return _CONTAINER_BYTES + sum(sizes)
