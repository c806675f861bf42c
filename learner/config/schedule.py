"""The schedule decides which channel a step runs (R26, R27). It has no side effects.

Invariants: the wanted channel depends only on `global_step` and `b_ratio`, so it is the same after a resume. Of the
first n steps exactly floor(n * b_ratio) want Channel-B. Rank 0 calls `decide_channel` with numbers that are already
reduced over ranks, and broadcasts the decision. The decision holds for the whole accumulation window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from learner.records import Channel
from shared.errors import ConfigError

B_STEP_SKIPPED = "stage2_ab/async/b_step_skipped_due_to_queue"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelDecision:
    """The decision for one optimizer step. `wanted` is the schedule's channel, `channel` the one that runs."""

    wanted: Channel
    channel: Channel

    @property
    def skipped_due_to_queue(self) -> bool:
        return self.wanted != self.channel

    def metrics(self) -> Mapping[str, float]:
        """Return the step's metrics: whether Channel-B ran, and whether a short queue prevented it."""
        return {
            "stage2_ab/channel_b": float(self.channel == "B"),
            B_STEP_SKIPPED: float(self.skipped_due_to_queue),
        }


def exact_ratio(b_ratio: float) -> Fraction:
    """Return `b_ratio` as the decimal number in the YAML file: 0.1 is exactly one tenth, not the nearest double.

    Raises ConfigError outside [0, 1].
    """
    if not 0.0 <= b_ratio <= 1.0:  # false for NaN too
        raise ConfigError(
            "stage2_ab.schedule.b_ratio is not a share",
            found=str(b_ratio),
            wanted="a number in [0, 1]",
            remedy="0 runs Channel-A only, 1 runs Channel-B only",
        )
    return Fraction(str(b_ratio))


def scheduled_channel(global_step: int, b_ratio: float) -> Channel:
    """Return B iff floor((s + 1) * b) > floor(s * b), in exact arithmetic; `global_step` counts completed updates."""
    ratio = exact_ratio(b_ratio)
    return "B" if math.floor((global_step + 1) * ratio) > math.floor(global_step * ratio) else "A"


def decide_channel(global_step: int, b_ratio: float, *, feasible: bool = True) -> ChannelDecision:
    """Return the schedule's channel, or A if B is not feasible.

    With the asynchronous actor-learner a B step takes `gradient_accumulation_steps` packs from each rank's queue. The
    step is feasible if all ranks have enough packs of one share. Without the asynchronous actor-learner B is always
    feasible.
    """
    wanted = scheduled_channel(global_step, b_ratio)
    return ChannelDecision(wanted=wanted, channel=wanted if feasible else "A")
