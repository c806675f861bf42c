"""Decides which channel a step runs: A (ground truth) or B (rollouts) (R26, R27). The module has no side effects.

Invariants: the scheduled channel depends only on `global_step` and `b_ratio`, so it is the same after a resume. Exactly
floor(n * b_ratio) of the first n steps are scheduled as Channel-B. Rank 0 calls `decide_channel` and broadcasts the
decision. All micro-steps of the optimizer step run the decided channel.
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
    """The decision for one optimizer step. `wanted`: the scheduled channel. `channel`: the channel that runs."""

    wanted: Channel
    channel: Channel

    @property
    def skipped_due_to_queue(self) -> bool:
        return self.wanted != self.channel

    def metrics(self) -> Mapping[str, float]:
        """Return the step's metrics: 1 if Channel-B ran, and 1 if it was scheduled but the queue had too few packs."""
        return {
            "stage2_ab/channel_b": float(self.channel == "B"),
            B_STEP_SKIPPED: float(self.skipped_due_to_queue),
        }


def exact_ratio(b_ratio: float) -> Fraction:
    """Return `b_ratio` as the decimal number in the YAML file: 0.1 is exactly one tenth, not the nearest double.

    Raises ConfigError outside [0, 1].
    """
    if not 0.0 <= b_ratio <= 1.0:  # the comparison is false for NaN too
        raise ConfigError(
            "stage2_ab.schedule.b_ratio is not a share",
            found=str(b_ratio),
            wanted="a number in [0, 1]",
            remedy="0 runs Channel-A only, 1 runs Channel-B only",
        )
    return Fraction(str(b_ratio))


def scheduled_channel(global_step: int, b_ratio: float) -> Channel:
    """Return the scheduled channel of the step after `global_step` completed steps. With s = `global_step` and
    b = `b_ratio` it is B if floor((s + 1) * b) > floor(s * b), in exact arithmetic, else A."""
    # Doubles would shift a Channel-B step: 100 * 0.29 is 28.999999999999996.
    ratio = exact_ratio(b_ratio)
    return "B" if math.floor((global_step + 1) * ratio) > math.floor(global_step * ratio) else "A"


def decide_channel(global_step: int, b_ratio: float, *, feasible: bool = True) -> ChannelDecision:
    """Return the decision for the next step. The step runs the scheduled channel, or A if a step of Channel-B is not
    `feasible`.

    With the asynchronous actor-learner, a step of Channel-B takes `gradient_accumulation_steps` packs (the rollouts of
    a few samples) from each rank's queue. A Channel-B step is feasible if all ranks have rolled out the same share (the
    samples of one step). Without the asynchronous actor-learner a Channel-B step is always feasible.
    """
    wanted = scheduled_channel(global_step, b_ratio)
    return ChannelDecision(wanted=wanted, channel=wanted if feasible else "A")
