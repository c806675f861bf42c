"""The section `custom.extra.rollout_matching`: how rollouts are made. The section's larger subsections have files of
their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from learner.config.modes import ROLLOUT, Rule, overlaps
from learner.config.sections.decoding import DecodingConfig
from learner.config.sections.vllm import VllmConfig
from shared.config.model import Mistake, Section, given, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class RolloutBufferConfig(Section):
    """Learn the rollouts of one accumulation window (the micro-batches of one optimizer step) several times. Only for
    `rollout_matching_sft` and `grpo`."""

    enabled: bool = key("reuse rollouts", False, req="R18")
    m_steps: int = key(
        "optimizer steps that learn the same window's rollouts; an epoch has this many times more steps. A short "
        "window at the end of an epoch is learned once",
        1,
        unit="optimizer steps",
        req="R18",
        ge=1,
    )


class OffloadConfig(Section):
    """Move training state to host memory while colocated vLLM generates. Without colocated vLLM this has no effect. The
    host memory is page-locked and kept between moves."""

    # A 4B model took 86.3 GiB and 2.52 s per step. With its moments offloaded it took 51.1 GiB and 3.97 s. With the
    # model offloaded too, it took 45.4 GiB and 5.35 s.
    enabled: bool = key("offload what the next two keys select", False, req="R20")
    offload_model: bool = key("the trained model", False, req="R20")
    offload_optimizer: bool = key("the optimizer's moments", False, req="R20")


class RolloutMatchingConfig(Section):
    """How rollouts are made."""

    rollout_backend: Literal["vllm", "hf"] = key(
        "`vllm`: vLLM; `hf`: `generate` of the training model itself", "vllm", req="R02"
    )
    # R21 gives this default.
    decode_batch_size: int = key(
        "largest number of sequences that are decoded at once, over all learner ranks; a beam search has `num_beams` "
        "of them per sample. All rollouts of an optimizer step are requested together, however small its micro-batches "
        "are",
        1,
        unit="sequences per rollout GPU and generation call",
        req="R21 R34",
        ge=1,
    )
    decoding: DecodingConfig = key("decoding", DecodingConfig(), req="D7")
    vllm: VllmConfig = key("`rollout_backend: vllm`", VllmConfig(), req="R02")
    rollout_buffer: RolloutBufferConfig | None = key("reuse of rollouts; null: none", None, req="D2 R18")
    offload: OffloadConfig = key("offloading while colocated vLLM generates", OffloadConfig(), req="R20")


def beams_fit(config: RunConfig) -> Iterator[Mistake]:
    """`decode_batch_size` is at least `num_beams`, because a beam search runs `num_beams` sequences for one sample
    (R21, D10)."""
    rollout, beams = config.rollout_matching, config.rollout_matching.decoding.num_beams
    if rollout.decoding.decode_mode == "beam" and rollout.rollout_backend == "hf" and rollout.decode_batch_size < beams:
        wanted, remedy = f"at least num_beams ({beams})", "raise it, or lower decoding.num_beams"
        path = f"{ROLLOUT}.decode_batch_size"
        yield Mistake(path=path, found=given(rollout, "decode_batch_size"), wanted=wanted, remedy=remedy)


def buffer_variant(config: RunConfig) -> Iterator[Mistake]:
    """`rollout_buffer` needs `rollout_matching_sft`, or `grpo` without `stage2_ab`. `stage2_ab_training` refuses the
    key, even if it is null (D2)."""
    buffer, variant = config.rollout_matching.rollout_buffer, config.custom.trainer_variant
    path = f"{ROLLOUT}.rollout_buffer"
    if variant == "stage2_ab_training":
        if "rollout_buffer" in config.rollout_matching.model_fields_set:
            wanted = "no such key: staleness belongs to the asynchronous pipeline there"
            remedy = "remove it; for rollouts ahead of learning set stage2_ab.async_actor_learner.enabled"
            found = "null under" if buffer is None else "rollout reuse under"
            yield Mistake(path=path, found=f"{found} stage2_ab_training", wanted=wanted, remedy=remedy)
    elif variant == "grpo" and config.stage2_ab is not None and buffer is not None and buffer.enabled:
        wanted, remedy = "grpo without the section stage2_ab", "remove one of the two"
        yield Mistake(path=path, found="rollout reuse with stage2_ab", wanted=wanted, remedy=remedy)
    elif variant == "sft" and buffer is not None and buffer.enabled:
        wanted, remedy = "trainer_variant: rollout_matching_sft", "remove it: sft has no rollouts to reuse"
        yield Mistake(path=path, found="rollout reuse under sft", wanted=wanted, remedy=remedy)


def offload_can_be_served(config: RunConfig) -> Iterator[Mistake]:
    """With colocated vLLM, `offload` must not move away a model that learns while rollouts are made (R20)."""
    rollout, offload = config.rollout_matching, config.rollout_matching.offload
    if rollout.rollout_backend != "vllm" or rollout.vllm.mode != "colocate" or not offload.enabled:
        return
    # `enabled` alone moves nothing, so the documented defaults stay legal.
    if not offload.offload_model and not offload.offload_optimizer:
        return
    path = f"{ROLLOUT}.offload.enabled"
    ahead = config.stage2_ab is not None and config.stage2_ab.async_actor_learner.enabled
    if ahead or overlaps(config):
        found = (
            "true, while " + ("the asynchronous learner" if ahead else "packed Channel-B") + " trains during rollouts"
        )
        wanted = "false, because rollouts and learning run at the same time"
        remedy = "set enabled: false (servers need no offloading)" + ("" if ahead else ", or training.packing: false")
        yield Mistake(path=path, found=found, wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (
    beams_fit,
    buffer_variant,
    offload_can_be_served,
)
