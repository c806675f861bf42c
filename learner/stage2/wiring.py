"""The driver of a `stage2_ab_training` run, made of its configuration. Called by `learner.build`."""

from __future__ import annotations

from dataclasses import replace

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from learner.data import Batches
from learner.policy.parallel import Ranks
from learner.rows import RowMaker
from learner.segments import SegmentSource
from learner.stage2.channel_b import BufferedB, OverlappedB
from learner.stage2.driver import ChannelB, Stage2Driver


def step_plan(plan: Plan) -> Plan:
    """The plan that the data follows: a dataloader batch is the rank's share of a whole step (R31)."""
    share = plan.effective_batch_size // plan.world_size
    return replace(plan, per_device_train_batch_size=share, gradient_accumulation_steps=1)


def make_driver(
    config: RunConfig,
    plan: Plan,
    *,
    ranks: Ranks,
    batches: Batches,
    channel_a: SegmentSource,
    rollouts: SegmentSource,
    row_maker: RowMaker,
    capacity: int,
) -> Stage2Driver:
    """`rollouts` makes Channel-B's segments; `capacity` is how many samples the backend decodes at once for this rank;
    `batches` follows `step_plan`."""
    assert config.stage2_ab is not None, "only for stage2_ab_training"
    channel_b: ChannelB = BufferedB(batches, rollouts, row_maker)
    if plan.overlap:
        deadline_s = config.training.collective_timeout_s
        channel_b = OverlappedB(batches, rollouts, row_maker, capacity=capacity, deadline_s=deadline_s)
    return Stage2Driver(
        b_ratio=config.stage2_ab.schedule.b_ratio,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        ranks=ranks,
        batches=batches,
        channel_a=channel_a,
        row_maker=row_maker,
        channel_b=channel_b,
    )
