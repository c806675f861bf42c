"""The section `data.augment`: other pictures of the same photographs, with boxes and polygons that follow."""

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
    """Training photographs are seen differently in each epoch: cropped, resized, in other colors and, where asked for,
    flipped, turned, or four in one picture. Boxes and polygons follow exactly. A picture depends on `training.seed`,
    the epoch and the sample's id alone. Evaluations see photographs as they are."""

    rollouts: bool = key(
        "rollouts see augmented pictures too; servers get them as PNG. false: only steps that learn ground truth", False
    )
    probability: float = key("share of the samples that are augmented", 1.0, gt=0.0, le=1.0)
    smallest_crop: float = key("a crop keeps between this share and all of each side; 1: no crops", 0.6, gt=0.0, le=1.0)
    stretch: float = key("one side is stretched against the other by at most this", 0.1, ge=0.0, lt=1.0)
    scale: list[float] = key(
        "least and largest number of pixels that a pixel of the photograph becomes, per side. Models with "
        "`model.max_pixels` shrink what is larger",
        [1.0, 1.0],
    )
    horizontal_flip: float = key(
        "probability to mirror left and right. Only if no class and no prompt depends on it", 0.0, ge=0.0, le=1.0
    )
    vertical_flip: float = key("probability to mirror top and bottom", 0.0, ge=0.0, le=1.0)
    quarter_turn: float = key(
        "probability of a quarter turn; the picture keeps the photograph's shape", 0.0, ge=0.0, le=1.0
    )
    keep_upright: list[str] | None = key(
        "photographs with an object of one of these classes are neither mirrored nor turned. null: of classes that are "
        "numbers or single letters, or named with left, right, up, down, arrow, digit, letter or text; []: of none",
        None,
    )
    min_visibility: float = key(
        "an object stays a label if the crop shows at least this share of its area. Of others the part that can be "
        "seen becomes an ignore region",
        0.35,
        ge=0.0,
        le=1.0,
    )
    min_side: float = key(
        "an object whose shorter side is below this becomes an ignore region", 4.0, unit="pixels", ge=0.0
    )
    brightness: float = key("brightness changes by a factor within 1 plus or minus this", 0.2, ge=0.0, lt=1.0)
    contrast: float = key("contrast changes by such a factor", 0.2, ge=0.0, lt=1.0)
    saturation: float = key("saturation changes by such a factor", 0.2, ge=0.0, lt=1.0)
    hue: float = key("hue changes by at most this share of the circle", 0.0, ge=0.0, le=0.5)
    mosaic: float = key(
        "probability that the picture is made of crops of four photographs with the same prompt", 0.0, ge=0.0, le=1.0
    )


def depends_on_orientation(name: str) -> bool:
    """Return True if a class may become another one, or none, when it is mirrored or turned; by its name."""
    return _ORIENTED.fullmatch(name.strip()) is not None


def stays_upright(name: str, config: AugmentConfig) -> bool:
    """Return True if a photograph with an object of this class is neither mirrored nor turned."""
    return depends_on_orientation(name) if config.keep_upright is None else name in config.keep_upright


def augmentation_has_objects(config: RunConfig) -> Iterator[Mistake]:
    """`data.augment` goes with `task.type: detection`, whose labels follow the pixels."""
    if config.data.augment is not None and config.task.type != "detection":
        wanted, remedy = "task.type: detection, whose labels follow the pixels", "set data.augment: null"
        yield Mistake(path="data.augment", found=f"task.type: {config.task.type}", wanted=wanted, remedy=remedy)


def augmentation_has_steps(config: RunConfig) -> Iterator[Mistake]:
    """`data.augment` without `rollouts: true` goes with runs that learn ground truth in some step."""
    augment = config.data.augment
    if augment is not None and not augment.rollouts and not learns_ground_truth(config):
        yield Mistake(
            path="data.augment.rollouts",
            found="false, in a run that learns rollouts in every step",
            wanted="true, or steps that learn ground truth",
            remedy="set data.augment.rollouts: true to augment rollouts, or data.augment: null",
        )


def augmentation_scale(config: RunConfig) -> Iterator[Mistake]:
    """`data.augment.scale` is two numbers above 0, the smaller one first."""
    augment = config.data.augment
    if augment is None:
        return
    scale = augment.scale
    if len(scale) != 2 or not 0 < scale[0] <= scale[1]:
        wanted, remedy = "two numbers above 0, the smaller one first", "write it as [0.75, 1.25]"
        yield Mistake(path="data.augment.scale", found=str(scale), wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (augmentation_has_objects, augmentation_has_steps, augmentation_scale)
