"""The driver of a `stage2_ab_training` run, made of its configuration. Called by `learner.build`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from learner.data import Batches
from learner.data.encoding import EncoderPool, LocalPool, PromptEncoder, WorkerPool
from learner.pipeline.protocol import Bounds
from learner.policy.parallel import Ranks
from learner.records import Sample
from learner.rows import RowMaker
from learner.segments import SegmentSource
from learner.stage2.ahead import AheadB, Sizes
from learner.stage2.channel_b import BufferedB, OverlappedB
from learner.stage2.driver import ChannelB, Stage2Driver
from learner.stage2.stream import SampleStream


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
    samples: Sequence[Sample],
    encoder: PromptEncoder,
    channel_a: SegmentSource,
    rollouts: SegmentSource,
    row_maker: RowMaker,
    capacity: int,
) -> Stage2Driver:
    """`rollouts` makes Channel-B's segments; `capacity` is how many samples the backend decodes at once for this rank;
    `batches` follows `step_plan`; `samples` are what they walk over."""
    assert config.stage2_ab is not None, "only for stage2_ab_training"
    deadline_s = config.training.collective_timeout_s
    learns_rollouts = config.stage2_ab.schedule.b_ratio > 0
    channel_b: ChannelB = BufferedB(batches, rollouts, row_maker)
    if plan.async_actor_learner and learns_rollouts:
        bounds = Bounds.run_ahead(config.stage2_ab.async_actor_learner, packs_per_step=plan.gradient_accumulation_steps)
        channel_b = AheadB(
            _stream(config, samples, encoder, ranks),
            rollouts,
            row_maker,
            bounds=bounds,
            sizes=Sizes.of(
                bounds,
                samples_per_pack=plan.per_device_train_batch_size,
                packs_per_step=plan.gradient_accumulation_steps,
                capacity=capacity,
            ),
            ranks=ranks,
            deadline_s=deadline_s / 2,  # so that a rank's own account comes before the others' patience ends
        )
    elif plan.overlap:
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


def _stream(config: RunConfig, samples: Sequence[Sample], encoder: PromptEncoder, ranks: Ranks) -> SampleStream:
    own = copy.deepcopy(encoder)  # the producer's thread shares nothing with the one that learns
    pool: EncoderPool = LocalPool(own)
    if config.data.num_workers:
        pool = WorkerPool(
            own,
            num_workers=config.data.num_workers,
            samples_per_micro_batch=config.training.per_device_train_batch_size,
            timeout_s=config.training.collective_timeout_s,
        )
    return SampleStream(
        samples,
        pool,
        seed=config.training.seed,
        shuffle=config.data.shuffle,
        rank=ranks.rank,
        num_ranks=ranks.world_size,
    )
