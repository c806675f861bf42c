"""The section `reward`: scores of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from learner.config.modes import Rule
from shared.config.model import Mistake, Section, dotted, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


DETECTION_REWARDS = ("f1", "f1_miou", "soft_iou", "count", "class_only", "format")


class RewardConfig(Section):
    """Scores of rollouts, reported as metrics. Only `grpo` learns from rewards."""

    functions: list[str] = key(
        "import paths of functions, `my_package.my_module:my_reward`. Each scores every rollout. Its mean is the "
        "metric `reward/my_reward` of the step and of the evaluation. `reward` is the mean of their weighted sum",
        [],
        req="R38",
    )
    weights: dict[str, float] = key(
        "weight of each reward in the sum, by name: functions of `functions` (1 if unnamed here) and rewards of the "
        "task. Detection has `f1` (at IoU 0.5), `f1_miou` (mean over IoU 0.50 to 0.95), `soft_iou`, `format`, `count` "
        "and `class_only`, each from 0 to 1; every match is one-to-one, so a duplicate costs. Empty under `grpo`, "
        "without functions: `f1: 1`",
        {},
        req="R37",
    )


def rewards_exist(config: RunConfig) -> Iterator[Mistake]:
    """`grpo` needs a reward. Detection has a default. Another task needs `reward.functions`, or, if the task defines
    rewards itself, `reward.weights` for them (R37 R38)."""
    if config.custom.trainer_variant != "grpo":
        return
    own_task = config.task.type not in ("detection", "key_value")
    if config.task.type == "detection" or config.reward.functions or (own_task and config.reward.weights):
        return
    found = f"no reward with task.type: {config.task.type}"
    wanted = "one, because grpo compares rollouts by it"
    remedy = "name functions in reward.functions"
    yield Mistake(path="reward.functions", found=found, wanted=wanted, remedy=remedy)


def weights_are_of_rewards(config: RunConfig) -> Iterator[Mistake]:
    """Each name in `reward.weights` is a function of `reward.functions` or a reward of the task. For a task of your
    own, this is checked when it scores its first answer (R37 R38)."""
    if config.task.type not in ("detection", "key_value"):
        return
    of_task = DETECTION_REWARDS if config.task.type == "detection" else ()
    known = [*(path.rpartition(":")[2] for path in config.reward.functions), *of_task]
    if not known and config.custom.trainer_variant == "grpo":
        return  # the rule `rewards_exist` reports a missing reward
    for name in config.reward.weights:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it, or name its function in reward.functions"
            wanted = f"one of {', '.join(known)}" if known else "a name of a function in reward.functions"
            path = dotted(("reward", "weights", name))
            yield Mistake(path=path, found="an unknown reward", wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (rewards_exist, weights_are_of_rewards)
