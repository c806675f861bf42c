"""Says if a sample fits a packed row at any step, and if all of them fit the run's rows. The training samples are
checked before the first step.

In: samples. Out: what is too long, or None; when the packing buffer must overflow, or None. What is learned from a
rollout is part of an answer of at most `max_new_tokens`, with at most all objects appended: their sum is the longest
that a step can meet. No pixels are decoded: the processor tells an image's tokens by its size. An answer is tokenized
only where an upper bound of its tokens does not settle it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from learner.config.sections.loss import LossConfig
from learner.data.prompt import PromptEncoder
from learner.data.sampler import DistributedSampler
from learner.extensions import Task
from learner.records import DetectionObject, Sample

_FEWEST_COORDINATES = 4  # tokens: a box has four numbers, a polygon more
_CONTAINER_BYTES = 16
_OBJECT_BYTES = 64  # the longest key takes so many, with its quotes and brackets
_NUMBER_BYTES = 16  # "<|coord_999|>, "
_ESCAPED_BYTES = 6  # one byte of a description takes so many, as `\u0001`


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """Decides if samples fit rows of `max_tokens`. `max_new_tokens`: of a rollout; 0 where none is learned."""

    encoder: PromptEncoder
    task: Task
    max_tokens: int
    max_new_tokens: int = 0

    def __call__(self, sample: Sample) -> str | None:
        """Raises DataError where the sample's turns and images do not fit the model."""
        prompt = self.encoder.num_tokens(sample)
        before = prompt + self.max_new_tokens
        if _are_detected(sample.objects) and before + _most_tokens(sample.objects) <= self.max_tokens:
            return None
        answer = len(self.task.ground_truth(sample, LossConfig()).token_ids)
        if before + answer <= self.max_tokens:
            return None
        rollout = f", up to {self.max_new_tokens} of a rollout (max_new_tokens)" if self.max_new_tokens else ""
        parts = f"a prompt of {prompt}{rollout}, and {answer} for {len(sample.objects)} objects"
        return f"{before + answer} tokens: {parts} (global_max_length: {self.max_tokens})"


def fewest_tokens(sample: Sample, encoder: PromptEncoder) -> int:
    """Return a lower bound of the sample's segment, whatever the rollout: its prompt, every object's coordinates, the
    end."""
    coordinates = _FEWEST_COORDINATES * len(sample.objects) if _are_detected(sample.objects) else 0
    return encoder.num_tokens(sample) + coordinates + 1


def _are_detected(objects: Iterable[object]) -> bool:
    """Return True if the truth is that of the detection task, whose tokens have bounds. Others are tokenized."""
    return all(isinstance(obj, DetectionObject) for obj in objects)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """More segments must wait than a rank may carry."""

    micro_steps: int  # it happens after so many at the latest
    carried: int  # segments on some rank, at least


def carry_overflow(
    fewest: Sequence[int], sampler: DistributedSampler, *, row_tokens: int, micro_steps: int, most_carried: int
) -> Overflow | None:
    """Return True if one row per micro-step and rank is too little for what `sampler` hands out (D6). `fewest[i]`: a
    lower bound of sample i's segment. It is looked for after 1, 2, 4, ... micro-steps and at the run's end.

    Even if all ranks' rows held the shortest segments and were filled to the last token, so many would be left.
    """
    lengths = np.asarray(fewest)
    points = [*(1 << i for i in range(micro_steps.bit_length()) if 1 << i < micro_steps), micro_steps]
    for point in points:
        epochs, rest = divmod(point, sampler.per_epoch)
        handed_out = [lengths] * epochs + [lengths[sampler.order(epochs)[: rest * sampler.global_batch]]]
        ascending = np.sort(np.concatenate(handed_out))
        fit = int(np.searchsorted(np.cumsum(ascending), point * sampler.num_ranks * row_tokens, side="right"))
        carried = -(-(len(ascending) - fit) // sampler.num_ranks)
        if carried > most_carried:
            return Overflow(micro_steps=point, carried=carried)
    return None


def _most_tokens(objects: Iterable[DetectionObject]) -> int:
    """Return an upper bound: a token has at least one byte."""
    sizes = (
        _OBJECT_BYTES + _ESCAPED_BYTES * len(obj.desc.encode(errors="replace")) + _NUMBER_BYTES * len(obj.bins)
        for obj in objects
    )
    return _CONTAINER_BYTES + sum(sizes)
