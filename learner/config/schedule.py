"""The schedule: it decides which channel a step runs (R26, R27). Pure: numbers in, a decision out.

Invariants: the channel that the schedule wants depends only on `global_step` and `b_ratio`, so a resume changes
nothing. After any n steps exactly floor(n * b_ratio) of them wanted Channel-B. Rank 0 calls `decide_channel` with
numbers that are already reduced over ranks, and broadcasts the decision. It holds for the whole accumulation window.
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
    """The decision for one optimizer step: the channel `wanted` by the schedule, and the feasible `channel`."""

    wanted: Channel
    channel: Channel

    @property
    def skipped_due_to_queue(self) -> bool:
        return self.wanted != self.channel

    def metrics(self) -> Mapping[str, float]:
        """Return the step's metrics: the channel that ran, and whether a short queue kept Channel-B from running."""
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

    With the asynchronous actor-learner a B step takes `gradient_accumulation_steps` packs of every rank. It is feasible
    if all ranks have those of one share ready. Where rollouts are made in the step, B always is feasible.
    """
    wanted = scheduled_channel(global_step, b_ratio)
    return ChannelDecision(wanted=wanted, channel=wanted if feasible else "A")
