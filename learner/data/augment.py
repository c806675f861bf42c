"""`data.augment` chooses at random how a photograph is altered in an epoch, and computes its objects' new coordinates.

In: training samples, and an epoch. Out: samples with a `View` (how the picture is cut out, turned and colored), and
with the objects, regions and size of the augmented picture. This module reads no pixels. `learner.data.views` makes the
picture, in a data worker or before a request to a server.

Invariants: a sample's view follows from (seed, epoch, sample id), so it is the same on every rank, in every worker and
after a resume. Every transform is a crop, a mirror, a quarter turn or a resize. So a box stays an exact box, and the
box around a polygon is transformed like the polygon. No object reaches beyond its picture.

If an object is cut off (`_LEAST_SHARE`) or tiny (`_LEAST_SIDE`), its visible part becomes an ignore region: it is not
taught, and a prediction there is neither right nor wrong. Objects outside the picture are dropped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from learner.config.plan import Plan
from learner.config.schedule import scheduled_channel
from learner.config.schema import RunConfig
from learner.config.sections.augment import AugmentConfig, stays_upright
from learner.records import DetectionObject, Sample, View
from learner.tasks.detection.bins import canonical_order, has_area, to_bins, to_pixels, within
from shared.errors import DataError

log = logging.getLogger(__name__)

Augmented = Callable[[int, int, int], Sample]  # (index, epoch, position) -> the sample, altered for that epoch
_TRIES = 8  # max random views tried for a photograph with objects, if none shows an object
_LEAST_SHARE = 0.35  # min fraction of an object's area inside the picture; an object with less becomes an ignore region
_LEAST_SIDE = 4.0  # min length of an object's shorter side, in pixels; a smaller object becomes an ignore region


class Augmenter:
    """Alters samples. `too_long` returns the length, as text, of an altered sample that does not fit a packed row; its
    photograph is then used unaltered. Raises DataError for samples that do not have exactly one image of known size."""

    def __init__(
        self,
        samples: Sequence[Sample],
        config: AugmentConfig,
        *,
        seed: int,
        too_long: Callable[[Sample], str | None] = lambda _: None,
    ) -> None:
        self._samples, self._config, self._seed, self._too_long = samples, config, seed, too_long
        for sample in samples:
            require_augmentable(sample)
        self._told = False

    def __call__(self, index: int, epoch: int) -> Sample:
        """Return sample `index`, altered for `epoch`."""
        sample = self._samples[index]
        # Python's own hash of a text differs between processes, but all ranks must see the same sample.
        digest = hashlib.blake2b(sample.sample_id.encode(), digest_size=8).digest()
        rng = np.random.default_rng([self._seed, epoch, int.from_bytes(digest, "little")])
        for _ in range(_TRIES):
            seen = seen_as(sample, draw_view(sample, rng, self._config))
            if seen.objects or not sample.objects:
                return seen if self._fits(seen) else sample
        return sample

    def _fits(self, seen: Sample) -> bool:
        found = self._too_long(seen)
        if found is not None and not self._told:
            self._told = True
            log.warning(
                "sample %s: its augmented picture does not fit a row (%s), so it is seen as it is; others like it are "
                "not logged",
                seen.sample_id,
                found,
            )
        return found is None


def augmented(
    config: RunConfig,
    plan: Plan,
    samples: Sequence[Sample],
    *,
    too_long: Callable[[Sample], str | None] = lambda _: None,
    rollouts: bool = False,
) -> Augmented | None:
    """Return the function that alters training samples, or None if photographs are used unaltered. `rollouts`: True in
    the thread that makes rollouts ahead. Only steps that learn ground truth use altered pictures, unless
    `data.augment.rollouts` is set."""
    augment, stage2 = config.data.augment, config.stage2_ab
    if augment is None or (rollouts and not augment.rollouts):
        return None
    augmenter = Augmenter(samples, augment, seed=config.training.seed, too_long=too_long)
    # If rollouts are made ahead of learning, `position` is not the number of a step and does not tell the channel. In
    # that case the argument `rollouts` tells which pictures are altered.
    b_ratio = 0.0 if stage2 is None or augment.rollouts or plan.async_actor_learner else stage2.schedule.b_ratio

    def seen(index: int, epoch: int, position: int) -> Sample:
        """Return the altered sample. Without the asynchronous actor-learner `position` is the step. Steps that learn
        rollouts (Channel-B) get the unaltered photograph."""
        return samples[index] if scheduled_channel(position, b_ratio) == "B" else augmenter(index, epoch)

    return seen


def require_augmentable(sample: Sample) -> None:
    """Raises DataError for a sample that does not have exactly one image of known size."""
    if len(sample.images) != 1 or min(sample.width, sample.height) < 2:
        raise DataError(
            f"data.augment: sample {sample.sample_id!r} can't be augmented",
            found=f"{len(sample.images)} images, {sample.width} x {sample.height} pixels",
            wanted="one image of known size, which the boxes refer to",
            remedy="set data.augment: null, or leave such samples out",
        )


# ---- views -----------------------------------------------------------------------------------------------------------


def draw_view(sample: Sample, rng: np.random.Generator, config: AugmentConfig) -> View:
    """Return a random view of the sample's photograph."""
    turns = int(rng.integers(1, 4)) if rng.random() < config.quarter_turn else 0
    mirrored = bool(rng.random() < config.horizontal_flip)
    if (turns or mirrored) and any(stays_upright(obj.desc) for obj in (*sample.objects, *sample.ignored)):
        turns, mirrored = 0, False
    width, height = sample.width, sample.height
    share = rng.uniform(config.smallest_crop, 1.0)
    # The picture keeps the photograph's proportions, even if it is turned, because the model knows only these
    # proportions.
    size = max(2, round(width * share)), max(2, round(height * share))
    shape = size[::-1] if turns % 2 else size
    # The window is `share` times as wide and high as the largest window of this shape in the photograph.
    most = min(width / shape[0], height / shape[1]) * share
    across, down = (min(max(1, round(side * most)), whole) for side, whole in zip(shape, (width, height), strict=True))
    left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
    brightness, contrast, saturation = (1.0 + float(rng.uniform(-config.colors, config.colors)) for _ in range(3))
    return View(
        size=size,
        window=(left, top, left + across, top + down),
        quarter_turn=turns % 2 == 1,
        flip_horizontal=mirrored != (turns >= 2),
        flip_vertical=turns >= 2,
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        photograph=(width, height),
    )


def seen_as(sample: Sample, view: View) -> Sample:
    """Return the sample as `view` shows it, with the objects, ignore regions and size of that picture."""
    placed_objects = [placed(obj, view) for obj in sample.objects]
    return replace(
        sample,
        objects=canonical_order([obj for labels, _ in placed_objects for obj in labels]),
        ignored=(
            *(region for _, regions in placed_objects for region in regions),
            *(region for obj in sample.ignored for region in _in_picture(obj, moved(obj, view), view)),
        ),
        width=view.size[0],
        height=view.size[1],
        view=view,
    )


# ---- objects ---------------------------------------------------------------------------------------------------------


def moved(obj: DetectionObject, view: View) -> list[float]:
    """Return the object's coordinates in the augmented picture, in pixels. The coordinates may lie outside of the
    picture. The corners of a box are sorted."""
    left, top, right, bottom = view.window
    pixels = to_pixels(obj.bins, *view.photograph)
    points = [
        _turned((x - left) / (right - left), (y - top) / (bottom - top), view)
        for x, y in zip(pixels[0::2], pixels[1::2], strict=True)
    ]
    if obj.kind == "bbox_2d":
        (a, b), (c, d) = points
        points = [(min(a, c), min(b, d)), (max(a, c), max(b, d))]
    return [value for u, v in points for value in (u * view.size[0], v * view.size[1])]


def _turned(u: float, v: float, view: View) -> tuple[float, float]:
    """Return a point after the quarter turn and mirrors. The point is given in fractions of the window's width and
    height."""
    if view.quarter_turn:
        u, v = v, 1.0 - u
    return (1.0 - u if view.flip_horizontal else u), (1.0 - v if view.flip_vertical else v)


def placed(obj: DetectionObject, view: View) -> tuple[list[DetectionObject], list[DetectionObject]]:
    """Return the object in the picture as (labels, ignore regions). At most one of the lists has an item."""
    coords = moved(obj, view)
    seen = within(obj.kind, coords, (0, 0, *view.size))
    here = _in_picture(obj, coords, view)
    if not here:
        return [], []
    visible = _area(obj, seen) >= _LEAST_SHARE * _area(obj, coords)
    return (here, []) if visible and _shorter_side(seen) >= _LEAST_SIDE else ([], here)


def _in_picture(obj: DetectionObject, coords: Sequence[float], view: View) -> list[DetectionObject]:
    """Return the part of the object that lies in the picture; [] if that part is less than a pixel wide or high."""
    seen = within(obj.kind, coords, (0, 0, *view.size))
    if not seen or _shorter_side(seen) < 1.0:
        return []
    bins = to_bins(seen, *view.size)
    return [obj._replace(bins=bins)] if bins and has_area(obj.kind, bins) else []


def _shorter_side(coords: Sequence[float]) -> float:
    return min(max(coords[i::2]) - min(coords[i::2]) for i in (0, 1))


def _area(obj: DetectionObject, coords: Sequence[float]) -> float:
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        return (x2 - x1) * (y2 - y1)
    points = list(zip(coords[0::2], coords[1::2], strict=True))
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise([*points, points[0]]))) / 2
