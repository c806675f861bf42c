"""Whether a sample fits a packed row at any step: asked of all training samples before the first one.

In: a sample. Out: what is too long, or None. What is learned from a rollout is part of an answer of at most
`max_new_tokens`, with at most all objects appended: their sum is the longest that a step can meet. No pixels are
decoded: the processor tells an image's tokens by its size. An answer is tokenized only where an upper bound of its
tokens does not settle it.
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
    """For rows of `max_tokens`. `max_new_tokens`: of a rollout; 0 where none is learned."""

    encoder: PromptEncoder
    task: Task
    max_tokens: int
    max_new_tokens: int = 0

    def __call__(self, sample: Sample) -> str | None:
        """Raises DataError where the sample's turns and images do not fit the model."""
        prompt = self.encoder.num_tokens(sample)
        before = prompt + self.max_new_tokens
        if before + _most_tokens(sample.objects) <= self.max_tokens:
            return None
        answer = len(ground_truth_target(sample, self.task, self.encoder.tokenizer).token_ids)
        if before + answer <= self.max_tokens:
            return None
        rollout = f", up to {self.max_new_tokens} of a rollout (max_new_tokens)" if self.max_new_tokens else ""
        parts = f"a prompt of {prompt}{rollout}, and {answer} for {len(sample.objects)} objects"
        return f"{before + answer} tokens: {parts} (global_max_length: {self.max_tokens})"


def _most_tokens(objects: Iterable[DetectionObject]) -> int:
    """An upper bound: a token has at least one byte."""
    sizes = (
        _OBJECT_BYTES + _ESCAPED_BYTES * len(obj.desc.encode(errors="replace")) + _NUMBER_BYTES * len(obj.bins)
        for obj in objects
    )
    return _CONTAINER_BYTES + sum(sizes)
