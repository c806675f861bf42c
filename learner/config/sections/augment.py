"""The section `data.augment`: training photographs are altered together with their boxes and polygons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from learner.config.modes import Rule, learns_ground_truth
from shared.config.model import Mistake, Section, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


_ORIENTED = re.compile(r"\d+|\w|.*\b(left|right|up|down|arrow|digit|letter|text)\b.*", re.IGNORECASE | re.DOTALL)


class AugmentConfig(Section):
    """Each epoch alters the training photographs: it crops them, changes their colors and, if set, mirrors or turns
    them. Boxes and polygons are moved exactly with the pixels. A picture depends only on `training.seed`, the epoch and
    the sample's id. Evaluations use unaltered photographs."""

    rollouts: bool = key(
        "rollouts see augmented pictures too; servers get them as PNG. false: only steps that learn ground truth", False
    )
    horizontal_flip: float = key(
        "probability to mirror left and right. Only if no prompt depends on it", 0.0, ge=0.0, le=1.0
    )
    quarter_turn: float = key(
        "probability of one, two or three quarter turns; the picture keeps the photograph's shape", 0.0, ge=0.0, le=1.0
    )
    smallest_crop: float = key("a crop keeps between this share and all of each side; 1: no crops", 0.6, gt=0.0, le=1.0)
    colors: float = key(
        "brightness, contrast and saturation each change by a factor within 1 plus or minus this", 0.2, ge=0.0, lt=1.0
    )


def stays_upright(name: str) -> bool:
    """Return True if a photograph with an object of the class `name` must not be mirrored or turned, because the object
    might then belong to another class or to no class. Names of such classes are a number, a single letter, or contain
    one of the words left, right, up, down, arrow, digit, letter, text."""
    return _ORIENTED.fullmatch(name.strip()) is not None


def augmentation_has_objects(config: RunConfig) -> Iterator[Mistake]:
    """`data.augment` needs `task.type: detection`, whose labels follow the pixels."""
    if config.data.augment is not None and config.task.type != "detection":
        wanted, remedy = "task.type: detection, whose labels follow the pixels", "set data.augment: null"
        yield Mistake(path="data.augment", found=f"task.type: {config.task.type}", wanted=wanted, remedy=remedy)


def augmentation_has_steps(config: RunConfig) -> Iterator[Mistake]:
    """`data.augment` without `rollouts: true` needs a run that learns ground truth in some step."""
    augment = config.data.augment
    if augment is not None and not augment.rollouts and not learns_ground_truth(config):
        yield Mistake(
            path="data.augment.rollouts",
            found="false, in a run that learns rollouts in every step",
            wanted="true, or steps that learn ground truth",
            remedy="set data.augment.rollouts: true to augment rollouts, or data.augment: null",
        )


RULES: tuple[Rule, ...] = (augmentation_has_objects, augmentation_has_steps)
