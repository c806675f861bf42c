"""Checks whether a sample fits a packed row at any step, and whether all samples together fit the run's rows. Training
samples are checked before the first step.

In: samples. Out, from `RowLimit`: the length of a sample that is too long, or None. Out, from `carry_overflow`: the
number of micro-steps after which the packing buffer must overflow, or None.

A step learns at most `max_new_tokens` tokens of the model's own answer, with at most all objects of the sample
appended. So a sample's longest sequence is its prompt, `max_new_tokens` tokens, and all its objects. No pixels are
decoded: the processor computes an image's number of tokens from its size. An answer is tokenized only if an upper bound
of its number of tokens does not fit a row.
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

_FEWEST_COORDINATES = 4  # min tokens of an object: a box has four coordinates, a polygon more
_CONTAINER_BYTES = 16
_OBJECT_BYTES = 64  # max bytes of an object's keys, quotes and brackets
_NUMBER_BYTES = 16  # max bytes of a coordinate: "<|coord_999|>, "
_ESCAPED_BYTES = 6  # max bytes that one byte of a description becomes if it is escaped: `\u0001`


@dataclass(frozen=True, kw_only=True)
class RowLimit:
    """Checks that samples fit rows of `max_tokens` tokens. `max_new_tokens`: max tokens of a rollout; 0 if no rollouts
    are learned."""

    encoder: PromptEncoder
    task: Task
    max_tokens: int
    max_new_tokens: int = 0

    def __call__(self, sample: Sample) -> str | None:
        """Return the sample's length as text if it is too long, else None. Raises DataError for wrong turns or
        images."""
        prompt = self.encoder.num_tokens(sample)
        before = prompt + self.max_new_tokens
        # Most samples fit even with the longest answer that their objects may need, so their answers are not tokenized.
        if _are_detected(sample.objects) and before + _most_tokens(sample.objects) <= self.max_tokens:
            return None
        answer = len(self.task.ground_truth(sample, LossConfig()).token_ids)
        if before + answer <= self.max_tokens:
            return None
        rollout = f", up to {self.max_new_tokens} of a rollout (max_new_tokens)" if self.max_new_tokens else ""
        parts = f"a prompt of {prompt}{rollout}, and {answer} for {len(sample.objects)} objects"
        return f"{before + answer} tokens: {parts} (global_max_length: {self.max_tokens})"


def fewest_tokens(sample: Sample, encoder: PromptEncoder) -> int:
    """Return the fewest tokens that the sample can have with any rollout: the prompt, the coordinates of every object,
    and the end token."""
    coordinates = _FEWEST_COORDINATES * len(sample.objects) if _are_detected(sample.objects) else 0
    return encoder.num_tokens(sample) + coordinates + 1


def _are_detected(objects: Iterable[object]) -> bool:
    """Return True if all objects are detection objects: their tokens can be bounded without a tokenizer."""
    return all(isinstance(obj, DetectionObject) for obj in objects)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """An overflow: more segments wait for a row than a rank may carry over to the next micro-step."""

    micro_steps: int  # the overflow happens after this many micro-steps, or earlier
    carried: int  # at the overflow, at least this many segments wait on some rank


def carry_overflow(
    fewest: Sequence[int], sampler: DistributedSampler, *, row_tokens: int, micro_steps: int, most_carried: int
) -> Overflow | None:
    """Return the overflow that is certain if each rank learns one row per micro-step (D6); None if no overflow is
    certain. `fewest[i]`: lower bound of the number of tokens of sample i. The check is made after 1, 2, 4, ...
    micro-steps and at the run's end. The check assumes that the rows of all ranks hold the shortest segments, and are
    filled to the last token.
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
    """Return an upper bound of the objects' tokens: their number of bytes, because a token has at least one byte."""
    sizes = (
        _OBJECT_BYTES + _ESCAPED_BYTES * len(obj.desc.encode(errors="replace")) + _NUMBER_BYTES * len(obj.bins)
        for obj in objects
    )
    return _CONTAINER_BYTES + sum(sizes)
