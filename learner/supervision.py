"""Which tokens of a segment are learned, and the check that they may be.

In: a segment's labels and loss weights. Out: the supervised indices. The invariant: each lies in the assistant span,
and behind a token that predicts it. Called when a segment is built (`target.py`) and again before it is learned
(`policy/packed.py`), for whatever came between. No torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.records import Segment
from shared.errors import LossError

IGNORED = -100  # the label of a token that is not learned


def check_supervision(segment: Segment) -> NDArray[np.int64]:
    """Indices of the segment's supervised tokens (label set, weight positive).

    Raises LossError where one lies outside the assistant span, or where labels and weights contradict each other.
    """
    labels, weights = segment.labels, segment.loss_weights
    first = max(segment.prompt_length, 1)
    if (labels[:first] != IGNORED).any() or (weights[:first] != 0).any():
        bad = int(np.flatnonzero((labels[:first] != IGNORED) | (weights[:first] != 0))[0])
        raise _error("a supervised index lies outside the assistant span", segment, bad, f"an index >= {first}")
    wrong = ~np.isfinite(weights) | (weights < 0) | ((labels == IGNORED) & (weights != 0))
    wrong |= (labels < 0) & (labels != IGNORED)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise _error(
            "a label or its weight is not usable",
            segment,
            bad,
            "a token id or -100 (ignored, weight 0), a finite weight >= 0",
        )
    return np.flatnonzero((labels != IGNORED) & (weights > 0))


def _error(what: str, segment: Segment, index: int, wanted: str) -> LossError:
    return LossError(
        what,
        found=f"label {segment.labels[index]}, weight {segment.loss_weights[index]} at index {index} of sample "
        f"{segment.sample_id!r}, whose prompt has {segment.prompt_length} of {len(segment)} tokens",
        wanted=wanted,
        remedy="this is a defect of the target builder: please report the sample",
    )
