"""The section `grpo`: policy gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from learner.config.modes import ROLLOUT, Rule
from shared.config.model import Mistake, Section, given, key, show

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class GrpoConfig(Section):
    """Policy gradients. The rollouts of one sample are a group. A rollout becomes more likely if its reward is above a
    baseline (by default the group's mean), and less likely if it is below. All batch sizes count rollouts:
    `per_device_train_batch_size` is a multiple of `num_generations`."""

    num_generations: int = key("rollouts of each sample: the group", 8, unit="rollouts", req="R37", ge=2)
    advantage: Literal["group", "rloo", "batch"] = key(
        "what a rollout's reward is compared with: the mean of its group, of the group's other rollouts, or of all "
        "rollouts that are scored together",
        "group",
        req="R37",
    )
    credit: Literal["sequence", "object"] = key(
        "`sequence`: all tokens of a rollout have its advantage; `object`: the tokens of an object have what the "
        "answer gained from that object on, compared with the group's answers at the same object, and the closing "
        "tokens what they gave up. Needs a task that can tell (detection)",
        "sequence",
        req="R37",
    )
    kl_weight: float = key(
        "weight of the divergence from the model without its adapter, per token; above 0 needs `model.lora`",
        0.0,
        unit="1/nats",
        req="R37",
        ge=0.0,
    )


def grpo_has_a_use(config: RunConfig) -> Iterator[Mistake]:
    """The section `grpo` needs `trainer_variant: grpo`, which takes no `loss.function` (R37)."""
    variant = config.custom.trainer_variant
    # The `config.yaml` of a run writes out every section, so a section of defaults is accepted.
    is_set = any(getattr(config.grpo, name) != field.default for name, field in GrpoConfig.model_fields.items())
    if variant != "grpo" and is_set:
        remedy = "remove the section, or set custom.trainer_variant: grpo"
        yield Mistake(path="grpo", found=f"a section that {variant} does not read", wanted="none", remedy=remedy)
    if variant == "grpo" and config.loss.function is not None:
        remedy = "unset it; rewards of your own go into reward.functions"
        wanted = "null: grpo has its own loss"
        yield Mistake(path="loss.function", found=show(config.loss.function), wanted=wanted, remedy=remedy)


def grpo_credit(config: RunConfig) -> Iterator[Mistake]:
    """`grpo.credit: object` needs a task in which single objects earn rewards. `key_value` is no such task (R37)."""
    if config.custom.trainer_variant == "grpo" and config.grpo.credit == "object" and config.task.type == "key_value":
        wanted, remedy = "sequence: key_value has no objects", "set grpo.credit: sequence"
        yield Mistake(path="grpo.credit", found="object with task.type: key_value", wanted=wanted, remedy=remedy)


def grpo_batches(config: RunConfig) -> Iterator[Mistake]:
    """With `grpo`, `per_device_train_batch_size` is a multiple of `num_generations` (R37)."""
    if config.custom.trainer_variant != "grpo":
        return
    size, batch = config.grpo.num_generations, config.training.per_device_train_batch_size
    if batch % size:
        wanted = f"a multiple of grpo.num_generations ({size}): it counts rollouts, and a group stays on one rank"
        remedy = f"set it to {-(-batch // size) * size}, or change grpo.num_generations"
        found = given(config.training, "per_device_train_batch_size")
        yield Mistake(path="training.per_device_train_batch_size", found=found, wanted=wanted, remedy=remedy)


def grpo_whole_step(config: RunConfig) -> Iterator[Mistake]:
    """`advantage: batch` compares a rollout with all rollouts of its step, so all of them must be made before the
    step's first row (D21)."""
    if config.custom.trainer_variant != "grpo" or config.grpo.advantage != "batch":
        return
    stage2, remedy = config.stage2_ab, "set grpo.advantage: group or rloo, or remove this key"
    wanted = "a step whose rollouts are all made before its first row, for grpo.advantage: batch"
    if stage2 is not None and stage2.async_actor_learner.enabled:
        yield Mistake(
            path="stage2_ab.async_actor_learner.enabled",
            found="true: packs are made apart",
            wanted=wanted,
            remedy=remedy,
        )


def grpo_samples(config: RunConfig) -> Iterator[Mistake]:
    """`grpo` needs rollouts that are sampled with the probabilities that it learns: temperature 1, and no token cut off
    (R37)."""
    if config.custom.trainer_variant != "grpo":
        return
    decoding, path = config.rollout_matching.decoding, f"{ROLLOUT}.decoding"
    wanted: tuple[tuple[str, float], ...] = (("temperature", 1.0), ("top_p", 1.0), ("repetition_penalty", 1.0))
    for name, value in wanted:
        if getattr(decoding, name) != value:
            text = f"{value:g}, so that rollouts are drawn by the probabilities that are learned"
            yield Mistake(
                path=f"{path}.{name}", found=given(decoding, name), wanted=text, remedy=f"set it to {value:g}"
            )
    if decoding.top_k > 0 or decoding.mode != "sample":
        name = "top_k" if decoding.top_k > 0 else "decode_mode"
        text = "sampling from all tokens, so that rollouts are drawn by the probabilities that are learned"
        found = str(getattr(decoding, name) if name == "top_k" else decoding.mode)
        # A temperature other than 1.0 was reported above. A wrong decode mode is its consequence, so only the
        # temperature is reported.
        if name == "top_k" or decoding.temperature == 1.0:
            yield Mistake(path=f"{path}.{name}", found=found, wanted=text, remedy="remove the key")


def grpo_reference(config: RunConfig) -> Iterator[Mistake]:
    """`grpo.kl_weight` above 0 needs an adapter, and a model that is not sharded: the reference is the model without
    its adapter (R37)."""
    if config.custom.trainer_variant != "grpo" or config.grpo.kl_weight == 0:
        return
    remedy = "add model.lora, or set grpo.kl_weight: 0"
    if config.model.lora is None and not (Path(config.model.path) / "adapter_config.json").is_file():
        found = f"{given(config.grpo, 'kl_weight')} without an adapter"
        wanted = "model.lora: the reference is the model without its adapter"
        yield Mistake(path="grpo.kl_weight", found=found, wanted=wanted, remedy=remedy)
    elif config.model.sharding != "none":
        found = f"{given(config.grpo, 'kl_weight')} with model.sharding: {config.model.sharding}"
        yield Mistake(path="grpo.kl_weight", found=found, wanted="model.sharding: none", remedy="set grpo.kl_weight: 0")


RULES: tuple[Rule, ...] = (
    grpo_has_a_use,
    grpo_credit,
    grpo_batches,
    grpo_whole_step,
    grpo_samples,
    grpo_reference,
)
