"""`data.augment` decides which other picture of a photograph is seen in an epoch, and where its objects are in it.

In: training samples, and an epoch. Out: samples with a `View`, and with objects, regions and size of the augmented
picture. No pixel is read here: `learner.data.views` makes the picture where it is needed, in a data worker or for a
server.

Invariants: a sample's view follows from (seed, epoch, sample id) and the training samples, so it is the same on every
rank, in every worker and after a resume. Every transform is a crop, a mirror, a quarter turn or a resize. So a box
stays a box, exactly, and a polygon's box is the box transformed. No object reaches out of its picture.

Of an object that is cut off (`min_visibility`) or tiny (`min_side`), the visible part becomes an ignore region: it is
not taught, and a prediction there is neither right nor wrong. What lies outside is dropped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from learner.config.plan import Plan
from learner.config.schedule import scheduled_channel
from learner.config.schema import RunConfig
from learner.config.sections.augment import AugmentConfig, stays_upright
from learner.data.raw import has_area, within
from learner.records import Crop, DetectionObject, Rect, Sample, Size, View
from learner.tasks.detection.bins import canonical_order, to_bins, to_pixels
from shared.errors import DataError

log = logging.getLogger(__name__)

Augmented = Callable[[int, int, int], Sample]  # sample `index` as it is seen in `epoch`, at `position`
_TRIES = 8  # draws until a picture shows an object, if the photograph has some
_MIDDLE = (1 / 3, 2 / 3)  # the point where the four parts of a mosaic meet, as shares of its sides


class Augmenter:
    """`too_long` says of a sample how long it is, if it does not fit a packed row. Such a picture is not used: the
    photograph is seen as it is. Raises DataError for samples that have not one image of known size."""

    def __init__(
        self,
        samples: Sequence[Sample],
        config: AugmentConfig,
        *,
        seed: int,
        too_long: Callable[[Sample], str | None] = lambda _: None,
    ) -> None:
        self._samples, self._config, self._seed, self._too_long = samples, config, seed, too_long
        self._partners: dict[str, list[int]] = {}  # samples that may share a mosaic, by prompt
        for i, sample in enumerate(samples):
            require_augmentable(sample)
            self._partners.setdefault(repr(sample.messages), []).append(i)
        self._told = False

    def __call__(self, index: int, epoch: int) -> Sample:
        """Sample `index` as it is seen in `epoch`."""
        sample = self._samples[index]
        digest = hashlib.blake2b(sample.sample_id.encode(), digest_size=8).digest()
        rng = np.random.default_rng([self._seed, epoch, int.from_bytes(digest, "little")])
        if rng.random() >= self._config.probability:
            return sample
        for _ in range(_TRIES):
            seen = self._drawn(sample, rng)
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

    def _drawn(self, sample: Sample, rng: np.random.Generator) -> Sample:
        config = self._config
        if rng.random() < config.mosaic:
            size, parts = self._mosaic(sample, rng)
        else:
            crop = draw_crop(sample, rng, config)
            size, parts = crop.place[2:], [(crop, sample)]
        colors = {name: _factor(rng, getattr(config, name)) for name in ("brightness", "contrast", "saturation")}
        view = View(
            size=size, crops=tuple(crop for crop, _ in parts), hue=float(rng.uniform(-1, 1)) * config.hue, **colors
        )
        objects: list[DetectionObject] = []
        ignored: list[DetectionObject] = []
        for crop, origin in parts:
            for obj in origin.objects:
                kept, cut = placed(obj, crop, size, config)
                objects += kept
                ignored += cut
            for obj in origin.ignored:
                ignored += _in_picture(obj, moved(obj, crop), crop, size)
        return replace(
            sample,
            objects=canonical_order(objects),
            ignored=tuple(ignored),
            width=size[0],
            height=size[1],
            view=view,
        )

    def _mosaic(self, sample: Sample, rng: np.random.Generator) -> tuple[Size, list[tuple[Crop, Sample]]]:
        """Four crops that fill a picture of the photograph's size: of itself, and of three others."""
        width, height = _scaled((sample.width, sample.height), rng, self._config)
        x, y = (int(side * rng.uniform(*_MIDDLE)) for side in (width, height))
        places: list[Rect] = [(0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height)]
        partners = self._partners[repr(sample.messages)]
        origins = [sample, *(self._samples[partners[i]] for i in rng.integers(len(partners), size=3))]
        order = rng.permutation(4)
        return (width, height), [
            (draw_crop(origins[i], rng, self._config, place=place), origins[i])
            for i, place in zip(order.tolist(), places, strict=True)
        ]


def augmented(
    config: RunConfig,
    plan: Plan,
    samples: Sequence[Sample],
    *,
    too_long: Callable[[Sample], str | None] = lambda _: None,
    rollouts: bool = False,
) -> Augmented | None:
    """Return the way in which training samples are seen; None: as they are. `rollouts`: the thread that makes rollouts
    ahead asks. Only steps that learn ground truth see augmented pictures, unless `data.augment.rollouts` is set."""
    augment, stage2 = config.data.augment, config.stage2_ab
    if augment is None or (rollouts and not augment.rollouts):
        return None
    augmenter = Augmenter(samples, augment, seed=config.training.seed, too_long=too_long)
    b_ratio = 0.0 if stage2 is None or augment.rollouts or plan.async_actor_learner else stage2.schedule.b_ratio

    def seen(index: int, epoch: int, position: int) -> Sample:
        """Return the sample as it is seen. In step, a step has one position, and a rollout sees the photograph
        itself."""
        return samples[index] if scheduled_channel(position, b_ratio) == "B" else augmenter(index, epoch)

    return seen


def require_augmentable(sample: Sample) -> None:
    """Raises DataError for a sample that has not one image of known size."""
    if len(sample.images) != 1 or min(sample.width, sample.height) < 2:
        raise DataError(
            f"data.augment: sample {sample.sample_id!r} can't be augmented",
            found=f"{len(sample.images)} images, {sample.width} x {sample.height} pixels",
            wanted="one image of known size, which the boxes refer to",
            remedy="set data.augment: null, or leave such samples out",
        )


# ---- drawing ---------------------------------------------------------------------------------------------------------


def draw_crop(sample: Sample, rng: np.random.Generator, config: AugmentConfig, place: Rect | None = None) -> Crop:
    """Return a crop of the photograph. `place` None: it is the whole picture, of the crop's size times `scale`, and of
    the photograph's shape, also after a quarter turn: models see shapes that they know."""
    turn, horizontal, vertical = (
        bool(rng.random() < chance) for chance in (config.quarter_turn, config.horizontal_flip, config.vertical_flip)
    )
    if (turn or horizontal or vertical) and _stays_upright(sample, config):
        turn = horizontal = vertical = False
    size = (sample.width, sample.height)
    share, stretch = rng.uniform(config.smallest_crop, 1.0), 1.0 - rng.uniform(0.0, config.stretch)
    shares = (share * stretch, share) if rng.random() < 0.5 else (share, share * stretch)
    if place is None:
        width, height = _scaled((max(1, round(size[0] * share)), max(1, round(size[1] * share))), rng, config)
        place = (0, 0, width, height)
    across, down = place[2] - place[0], place[3] - place[1]
    shape = (down, across) if turn else (across, down)  # the window is as large as the photograph allows
    most = min(size[0] / shape[0], size[1] / shape[1])
    window = _window(size, (shape[0] * most * shares[0], shape[1] * most * shares[1]), rng)
    return Crop(sample.images[0], size, window, place, turn, horizontal, vertical)


def _stays_upright(sample: Sample, config: AugmentConfig) -> bool:
    return any(stays_upright(obj.desc, config) for obj in (*sample.objects, *sample.ignored))


def _window(size: Size, wanted: tuple[float, float], rng: np.random.Generator) -> Rect:
    """Return a part of a picture of `size`, of about the wanted size, in whole pixels."""
    width, height = (min(max(1, round(side)), most) for side, most in zip(wanted, size, strict=True))
    left, top = (int(rng.integers(most - side + 1)) for side, most in ((width, size[0]), (height, size[1])))
    return left, top, left + width, top + height


def _scaled(size: Size, rng: np.random.Generator, config: AugmentConfig) -> Size:
    factor = rng.uniform(config.scale[0], config.scale[1])
    return max(2, round(size[0] * factor)), max(2, round(size[1] * factor))


def _factor(rng: np.random.Generator, most: float) -> float:
    return 1.0 + float(rng.uniform(-most, most))


# ---- objects ---------------------------------------------------------------------------------------------------------


def moved(obj: DetectionObject, crop: Crop) -> list[float]:
    """Return the object's coordinates in the augmented picture, in pixels, wherever they lie. A box has its corners in
    order."""
    left, top, right, bottom = crop.window
    pixels = to_pixels(obj.bins, *crop.size)
    points = [
        _turned((x - left) / (right - left), (y - top) / (bottom - top), crop)
        for x, y in zip(pixels[0::2], pixels[1::2], strict=True)
    ]
    if obj.kind == "bbox_2d":
        (a, b), (c, d) = points
        points = [(min(a, c), min(b, d)), (max(a, c), max(b, d))]
    x0, y0, x1, y1 = crop.place
    return [value for u, v in points for value in (x0 + u * (x1 - x0), y0 + v * (y1 - y0))]


def _turned(u: float, v: float, crop: Crop) -> tuple[float, float]:
    """Return a point of the window, as shares of its sides, after turn and mirrors."""
    if crop.quarter_turn:
        u, v = v, 1.0 - u
    return (1.0 - u if crop.flip_horizontal else u), (1.0 - v if crop.flip_vertical else v)


def placed(
    obj: DetectionObject, crop: Crop, size: Size, config: AugmentConfig
) -> tuple[list[DetectionObject], list[DetectionObject]]:
    """Return the object in a picture of `size`: (as a label, as an ignore region), one of them or neither."""
    coords = moved(obj, crop)
    seen = within(obj.kind, coords, crop.place)
    here = _in_picture(obj, coords, crop, size)
    if not here:
        return [], []
    visible = _area(obj, seen) >= config.min_visibility * _area(obj, coords)
    return (here, []) if visible and _shorter_side(seen) >= config.min_side else ([], here)


def _in_picture(obj: DetectionObject, coords: Sequence[float], crop: Crop, size: Size) -> list[DetectionObject]:
    """Return the part of the object at its crop's place; nothing where it is less than a pixel wide or high."""
    seen = within(obj.kind, coords, crop.place)
    if not seen or _shorter_side(seen) < 1.0:
        return []
    bins = to_bins(seen, *size)
    return [obj._replace(bins=bins)] if bins and has_area(obj.kind, bins) else []


def _shorter_side(coords: Sequence[float]) -> float:
    return min(max(coords[i::2]) - min(coords[i::2]) for i in (0, 1))


def _area(obj: DetectionObject, coords: Sequence[float]) -> float:
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        return (x2 - x1) * (y2 - y1)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in _edges(coords))) / 2


def _edges(coords: Sequence[float]) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    points = list(zip(coords[0::2], coords[1::2], strict=True))
    yield from zip(points, [*points[1:], points[0]], strict=True)
