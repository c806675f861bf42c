"""Tests of what may be supervised: tokens of the assistant span that something predicts."""

from __future__ import annotations

import numpy as np
import pytest

from learner.records import Segment
from learner.tasks.supervision import check_supervision
from shared.errors import LossError


def segment_with(labels: list[int], weights: list[float], prompt_length: int = 2) -> Segment:
    return Segment(
        sample_id="s",
        input_ids=np.arange(len(labels)),
        labels=np.array(labels),
        loss_weights=np.array(weights, np.float32),
        prompt_length=prompt_length,
    )


def test_supervised_indices_are_those_with_label_and_weight() -> None:
    found = check_supervision(segment_with([-100, -100, 4, -100, 6, 7], [0, 0, 1, 0, 0, 0.5]))
    assert found.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("labels", "weights"),
    [
        ([-100, 3, -100, -100], [0, 1, 0, 0]),  # a label in the prompt
        ([-100, -100, 3, -100], [0, 0.5, 1, 0]),  # a weight in the prompt
        ([-100, -100, 3, -100], [0, 0, 1, 1]),  # a weight without a label
        ([-100, -100, 3, 4], [0, 0, 1, -1]),  # a negative weight
        ([-100, -100, 3, 4], [0, 0, 1, float("nan")]),
        ([-100, -100, 3, 4], [0, 0, 1, float("inf")]),
        ([-100, -100, 3, -1], [0, 0, 1, 1]),  # -1 is neither a token nor ignored
    ],
)
def test_supervision_outside_the_assistant_span_raises(labels: list[int], weights: list[float]) -> None:
    """Every supervised index must lie in the assistant span; the trainer raises if one does not."""
    with pytest.raises(LossError, match="sample 's'"):
        check_supervision(segment_with(labels, weights))


def test_the_first_token_of_a_segment_can_not_be_supervised() -> None:
    """Nothing in its segment predicts it, even with an empty prompt."""
    with pytest.raises(LossError):
        check_supervision(segment_with([3, 4], [1, 1], prompt_length=0))
