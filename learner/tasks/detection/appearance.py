"""Estimates from pixels how many of a model's unlabelled boxes are right (R49, D22).

A find is a box of the model that overlaps no label. In: photographs, their labels, and finds with votes. Out: for each
find the probability that its box is right; `gaps` and `ranking` judge names. No person judges finds. Labels need not be
missing at random, because an object looks the same with and without a label.

1. *Examples.* Labelled boxes are moved. A moved box with an IoU of 0.55 or more with its label is an example of a right
   box. A moved box with an IoU of 0.08 to 0.45 is an example of a misplaced box. Edges at the photograph's border are
   not moved.
2. *Scores.* A logistic regression with an L2 penalty separates right from wrong examples by the pixels in and around
   the box. A class with `OWN_CLASS` labels has its own classifier. All classes with fewer than `OWN_CLASS` labels share
   a classifier, which does not use names. Photographs are divided into `FOLDS` parts. Each part is scored by a
   classifier that was fitted on the other parts.
3. *Shares.* The scores of finds are modelled as a mixture of two distributions: the scores of right examples, and the
   scores of misplaced examples. A share is the weight of one distribution in the mixture. EM estimates the shares
   separately by class, by number of votes, and for boxes at the photograph's border. The probability that a find is
   right is the fraction of the right examples' density in the mixture at the find's score.

There is no estimate if labels are too few, or if a classifier cannot separate its own examples. The estimate cannot
show that labels are complete: on data where no find was right, the estimated fraction of right finds was still 0.06 to
0.34. No side effects.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from threadpoolctl import threadpool_limits

from learner.records import DetectionObject, Sample
from learner.tasks.detection.bins import bounding_box, to_pixels

# With 200 labels in 16 photographs the estimated fraction was up to 0.12 off, in 8 photographs up to 0.35.
MIN_LABELS = 200  # min number of labels for an estimate
MIN_AUC = 0.75  # min AUC on held-out labels; below it there is no estimate
OWN_CLASS = 60  # min right examples of a class with a classifier of its own; smaller classes share a classifier
MOST_LABELS = 6000  # max labels whose pixels are read; more labels do not improve the estimate
FOLDS = 3
ON, BESIDE = (0.55, 1.01), (0.08, 0.45)  # (min, limit) of the IoU with the label, for right and for misplaced examples
_BORDER = 0.0125  # fraction of a side; a box nearer than this to the photograph's border touches it.
# For a crop: its number of cells per side, its side divided by the side of the box, and the min side of the box in
# pixels.
_SIDE, _GROWN, _SHORTEST = 12, 1.5, 4.0
_NUMBERS = 4 * _SIDE**2 + 3  # numbers per crop: three colors and an edge per cell, and the spread of each color
_TRIES = 60
PENALTY = 300.0  # L2 penalty on the classifiers' weights
_BIN_EDGES = np.linspace(-5, 5, 11)  # edges of the bins of the scores' histograms, in logits
_FEWEST_FINDS = 25  # min finds in a group of equal votes; smaller groups are merged
_FEWEST_EXAMPLES = 25
# With a weight of 200 the error in a model's number of right boxes is 9 of about 800. With a weight of 0 the error is
# 13, as large as the difference between two models.
_OF_FIRST = 200.0  # weight, counted in finds, of the first model's shares when the shares of a later model are fitted

Floats = NDArray[np.float64]
Pixels = NDArray[np.float32]
Open = Callable[[str], Image.Image]
# (class, True if the finds touch the border) -> shares of right and misplaced finds
Shares = dict[tuple[str | None, bool], Sequence[float]]

# The matrices are small. If other programs use the cores, several BLAS threads would mostly wait for each other.
_one_thread = threadpool_limits.wrap(limits=1, user_api="blas")


class Crop(NamedTuple):
    """A box's pixels as numbers [D], its class, and whether it touches the photograph's border."""

    name: str
    at_border: bool
    pixels: Pixels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleCrops:
    """All crops of one sample: right examples (`on`), misplaced examples (`beside`), and finds (boxes that overlap no
    label) in the order in which `crops_of` gets them."""

    on: tuple[Crop, ...]
    beside: tuple[Crop, ...]
    finds: tuple[Crop, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Appearance:
    """The result of `Looks.judge`. `probabilities`: for each sample, the probabilities that its finds (boxes without a
    label) are right, in the given order. `shares`: the shares of right and of misplaced finds among the finds with the
    fewest votes. `auc`: how well the classifiers separate held-out examples. `why`: the reason if there is no estimate;
    then `probabilities` is empty."""

    probabilities: tuple[tuple[float, ...], ...] = ()
    shares: Shares = field(default_factory=dict)
    auc: float | None = None
    why: str = ""


# ---- pixels ---------------------------------------------------------------------------------------------------------


def crops_of(sample: Sample, finds: Sequence[DetectionObject], open_image: Open, share: float = 1.0) -> SampleCrops:
    """Cut examples (at labels) and finds (boxes without a label) out of a sample's photographs. Only the fraction
    `share` of the labels is used, chosen by a hash of the labels' names and coordinates. Raises the errors of
    `open_image`."""
    labels = [obj for obj in sample.objects if _seed(sample, obj) < share * 2**32]
    on: list[Crop] = []
    beside: list[Crop] = []
    found: list[Crop | None] = [None] * len(finds)
    for place, source in enumerate(sample.images, 1):
        number = place if len(sample.images) > 1 else None
        own = [i for i, obj in enumerate(finds) if obj.image == number]
        if not own and not any(obj.image == number for obj in labels):
            continue
        picture = _Picture(open_image(source))
        boxes = np.array([picture.box(obj) for obj in sample.objects if obj.image == number]).reshape(-1, 4)
        for obj in labels:
            if obj.image == number:
                rng = np.random.default_rng(_seed(sample, obj))
                for kind, (low, high) in ((on, ON), (beside, BESIDE), (beside, BESIDE)):
                    box = picture.moved(picture.box(obj), rng, low, high)
                    # A box that misses its own object may be on another object. A box on another object is no example
                    # of a misplaced box.
                    if box is not None and (kind is on or _iou(box, boxes).max() < high):
                        kind.append(picture.crop(obj.desc, box))
        for i in own:
            found[i] = picture.crop(finds[i].desc, picture.box(finds[i]))
    return SampleCrops(on=tuple(on), beside=tuple(beside), finds=tuple(one for one in found if one is not None))


def _seed(sample: Sample, obj: DetectionObject) -> int:
    # Python's own hash of a text differs in every process, so the same photographs would give other crops in another
    # process.
    return zlib.crc32(f"{sample.sample_id} {obj.image} {obj.desc} {obj.bins}".encode())


def share_of(num_labels: int) -> float:
    """Return the fraction of the labels whose pixels are read."""
    return min(1.0, MOST_LABELS / max(1, num_labels))


class _Picture:
    """A photograph with a margin of a quarter of its longer side. The margin repeats the border's pixels."""

    def __init__(self, image: Image.Image) -> None:
        values = np.asarray(image.convert("RGB"))
        self.size = np.array([image.width, image.height], dtype=float)
        # A crop is larger than its box, so at the border it needs pixels outside of the photograph.
        self._margin = max(image.size) // 4
        margins = ((self._margin, self._margin), (self._margin, self._margin), (0, 0))
        self._padded = Image.fromarray(np.pad(values, margins, mode="edge"))
        # Colours are measured relative to the photograph's median and contrast, so that the photograph's lighting does
        # not matter.
        flat = values.reshape(-1, 3)
        self._light, self._contrast = np.median(flat, axis=0), flat.std(axis=0) + 1

    def box(self, obj: DetectionObject) -> Floats:
        """Return the object's box x1, y1, x2, y2 in pixels."""
        return np.array(to_pixels(bounding_box(obj), int(self.size[0]), int(self.size[1])))

    def at_border(self, box: Floats) -> NDArray[np.bool_]:
        """Return which of the box's four edges are at the photograph's border."""
        return np.r_[box[:2] < _BORDER * self.size, box[2:] > (1 - _BORDER) * self.size]

    def moved(self, box: Floats, rng: np.random.Generator, low: float, high: float) -> Floats | None:
        """Return the box, moved and stretched until its IoU is in the range; None if `_TRIES` moves give no such
        box."""
        # An object cut by the border looks different at the border, so its examples must be cut there too.
        sides, kept = np.tile(box[2:] - box[:2], 2), self.at_border(box)
        smallest = min(8.0, 0.5 * float(sides.min()))
        for _ in range(_TRIES):
            far = rng.uniform(0.03, 0.25 if low >= 0.5 else 0.9)
            shift, stretch = rng.normal(size=2)[[0, 1, 0, 1]], rng.normal(size=4)
            new = np.clip(np.where(kept, box, box + sides * far * (shift + stretch / 3)), 0, np.tile(self.size, 2))
            if (new[2:] - new[:2]).min() >= smallest and low <= _iou(new, box[None])[0] < high:
                return new
        return None

    def crop(self, name: str, box: Floats) -> Crop:
        """Return the colours and the edges in and around the box, and the spread of the colours."""
        half = np.maximum(box[2:] - box[:2], _SHORTEST) * _GROWN / 2
        middle = (box[:2] + box[2:]) / 2 + self._margin
        low = np.clip(middle - half, 0, None)
        high = np.minimum(middle + half, self._padded.size)
        small = self._padded.resize(
            (2 * _SIDE, 2 * _SIDE), Image.Resampling.BILINEAR, box=(*low.tolist(), *high.tolist())
        )
        colours = (np.asarray(small, dtype=float) - self._light) / self._contrast
        edges = np.hypot(*np.gradient(colours.mean(axis=2)))
        parts = (_halved(colours), _halved(edges) / (edges.mean() + 1e-3), colours.std(axis=(0, 1)))
        return Crop(name, bool(self.at_border(box).any()), np.concatenate(parts).astype(np.float32))


def _halved(values: Floats) -> Floats:
    """Return the means over squares of 2 x 2 pixels, flattened."""
    return values.reshape(_SIDE, 2, _SIDE, 2, -1).mean(axis=(1, 3)).ravel()


def _iou(box: Floats, others: Floats) -> Floats:
    """Return the IoU [N] of a box with the boxes `others` [N, 4], in pixels, not rounded."""
    sides = np.clip(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]), 0, None)
    both = sides.prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1) + (box[2:] - box[:2]).prod()
    return np.asarray(both / (areas - both + 1e-9))


# ---- scores ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Line:
    """The N crops of all samples, one after the other: pixels [N, D], class, whether the crop is at the photograph's
    border, and the number of its part for cross-validation (0 to FOLDS - 1)."""

    pixels: Pixels
    names: NDArray[np.str_]
    at_border: NDArray[np.bool_]
    part: NDArray[np.int64]

    @classmethod
    def of(cls, crops: Iterable[tuple[int, Crop]]) -> _Line:
        line = list(crops)
        return cls(
            pixels=np.array([crop.pixels for _, crop in line], dtype=np.float32).reshape(-1, _NUMBERS),
            names=np.array([crop.name for _, crop in line], dtype=np.str_),
            at_border=np.array([crop.at_border for _, crop in line], dtype=bool),
            # All crops of a photograph are in one part, so no classifier scores a photograph that it has seen.
            part=np.array([place % FOLDS for place, _ in line], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.part)


class Looks:
    """Learns from some samples how objects and their surroundings look. Classifiers are fitted when first needed."""

    def __init__(self, samples: Sequence[SampleCrops]) -> None:
        self._on, self._beside = (
            _Line.of((i, crop) for i, own in enumerate(samples) for crop in getattr(own, kind))
            for kind in ("on", "beside")
        )
        kinds, counts = np.unique(self._on.names, return_counts=True)
        self._own_class = set(kinds[counts >= OWN_CLASS].tolist())
        self._groups: dict[str | None, _Group] = {}

    @_one_thread
    def judge(
        self, finds: Sequence[Sequence[Crop]], votes: Sequence[Sequence[int]], first: Shares | None = None
    ) -> Appearance:
        """Estimate for each find (a box that overlaps no label) the probability that it is right. `finds` has a list
        per sample, for the samples that the constructor got. `votes`: the votes of each find; equal numbers if there
        are no votes. `first`: the shares that `judge` returned for another model. The new shares are shrunk towards
        `first`, because with a few hundred finds the error of shares is as large as the difference between models."""
        number_on, own_class = len(self._on), self._own_class
        if number_on < MIN_LABELS or len(self._beside) < MIN_LABELS:
            return Appearance(why=f"{number_on} labels are too few to know how objects look ({MIN_LABELS} are needed)")
        line = _Line.of((i, crop) for i, own in enumerate(finds) for crop in own)
        number = np.array([vote for own in votes for vote in own], dtype=np.int64)
        right, aucs, shares = np.zeros(len(line)), [], Shares()
        for name in (*sorted(own_class), None):
            of_find = _in_group(line.names, name, own_class)
            if name is None and not (of_find.any() or _in_group(self._on.names, None, own_class).any()):
                continue
            if name not in self._groups:
                self._groups[name] = _Group.of(self._on, self._beside, name, own_class)
            group = self._groups[name]
            aucs.append((group.auc(), len(group.on)))
            scores = group.scores(line.pixels[of_find], line.part[of_find])
            for border in (False, True):
                at = of_find.copy()
                at[of_find] = line.at_border[of_find] == border
                known = (first or {}).get((name, border))
                if at.any():
                    right[at], shares[name, border] = group.right(scores[at[of_find]], number[at], border, known)
        auc = float(np.average([one for one, _ in aucs], weights=[weight for _, weight in aucs]))
        if auc < MIN_AUC:
            return Appearance(auc=auc, why=f"objects and what is beside them look too much alike (AUC {auc:.2f})")
        ends = np.cumsum([len(own) for own in finds])[:-1]
        return Appearance(
            probabilities=tuple(tuple(part.tolist()) for part in np.split(right, ends)), shares=shares, auc=auc
        )


def _in_group(names: NDArray[np.str_], name: str | None, own_class: set[str]) -> NDArray[np.bool_]:
    return names == name if name is not None else ~np.isin(names, sorted(own_class))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """The classifiers of one class, and their scores (in logits) of its right (`on`) and misplaced (`beside`) examples.
    `by_part` has one classifier per part of the cross-validation. `on_border` and `beside_border`: whether each example
    touches the border."""

    by_part: Sequence[Callable[[Pixels], Floats]]
    on: Floats
    on_border: NDArray[np.bool_]
    beside: Floats
    beside_border: NDArray[np.bool_]

    @classmethod
    def of(cls, on: _Line, beside: _Line, name: str | None, own: set[str]) -> _Group:
        """Fit a class's classifiers and score its examples. The shared classifier (name None) is fitted on all
        classes."""
        everywhere = name is None
        fit_on = np.ones(len(on), bool) if everywhere else on.names == name
        fit_beside = np.ones(len(beside), bool) if everywhere else beside.names == name
        by_part = [
            logistic(*(line.pixels[mask & (line.part != part)] for line, mask in ((on, fit_on), (beside, fit_beside))))
            for part in range(FOLDS)
        ]
        of_on, of_beside = (_scores(by_part, line.pixels, line.part) for line in (on, beside))
        if everywhere and _in_group(on.names, None, own).sum() >= _FEWEST_EXAMPLES:
            fit_on, fit_beside = _in_group(on.names, None, own), _in_group(beside.names, None, own)
        return cls(
            by_part=by_part,
            on=of_on[fit_on],
            on_border=on.at_border[fit_on],
            beside=of_beside[fit_beside],
            beside_border=beside.at_border[fit_beside],
        )

    def scores(self, pixels: Pixels, part: NDArray[np.int64]) -> Floats:
        """Return the classifiers' logits [F] for F boxes with these pixels [F, D]. `part` [F]: the part of each box's
        photograph; the classifier that was fitted without this part is used."""
        return _scores(self.by_part, pixels, part)

    def auc(self) -> float:
        """Return the probability that a right example has a higher score than a misplaced one."""
        beside = np.sort(self.beside)
        return float(np.searchsorted(beside, self.on).mean() / max(1, len(beside)))

    def right(
        self, scores: Floats, votes: NDArray[np.int64], border: bool, first: Sequence[float] | None
    ) -> tuple[Floats, Sequence[float]]:
        """Return for each find [F] (a box without a label) the probability that it is right. Also return the shares of
        right and of misplaced finds among the finds with the fewest votes. `border`: True if all these finds touch the
        border, False if none does."""
        kinds = [self.on[self.on_border == border], self.beside[self.beside_border == border]]
        if min(map(len, kinds)) < _FEWEST_EXAMPLES:
            # If there are few examples at the border, the examples of the whole photographs are used instead.
            kinds = [self.on, self.beside]
        found, shares = np.zeros(len(votes)), first or ()
        for group in _vote_groups(votes):
            found[group], shares = _right_of_mixture(scores[group], kinds, first)
        return found, shares


def _scores(by_part: Sequence[Callable[[Pixels], Floats]], pixels: Pixels, part: NDArray[np.int64]) -> Floats:
    found = np.zeros(len(pixels))
    for number, score in enumerate(by_part):
        found[part == number] = score(pixels[part == number])
    return found


def _vote_groups(votes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the indices of the finds (boxes without a label), in groups of equal votes. From the most votes down,
    groups are merged until each has `_FEWEST_FINDS` finds; the last group may have fewer."""
    groups, own = [], np.zeros(0, dtype=np.int64)
    for number in sorted(set(votes.tolist()), reverse=True):
        own = np.concatenate([own, np.flatnonzero(votes == number)])
        if len(own) >= _FEWEST_FINDS:
            groups.append(own)
            own = np.zeros(0, dtype=np.int64)
    return [*groups, own] if len(own) else groups


def _right_of_mixture(
    scores: Floats, kinds: Sequence[Floats], first: Sequence[float] | None
) -> tuple[Floats, Sequence[float]]:
    """Return for each score [F] of a find (a box without a label) the probability that the find is right. Also return
    the likeliest shares of right and of misplaced finds. `kinds` has the scores of right examples and of misplaced
    examples."""
    places = np.digitize(scores, _BIN_EDGES)
    # Half an example is added to each bin, because in a bin without examples the probabilities would be 0 / 0.
    density = np.array(
        [np.bincount(np.digitize(kind, _BIN_EDGES), minlength=len(_BIN_EDGES) + 1) + 0.5 for kind in kinds]
    )
    density = density / density.sum(axis=1, keepdims=True)
    likely = density[:, places]  # [kinds, F]
    shares = (
        np.full(len(kinds), 1 / len(kinds)) if first is None else np.array(first[: len(kinds)])
    )  # the file of an older run has a third share
    before = shares * (1.0 if first is None else _OF_FIRST)
    for _ in range(300):
        belongs = shares[:, None] * likely
        belongs /= belongs.sum(axis=0)
        shares = (belongs.sum(axis=1) + before) / (len(scores) + before.sum())
    return np.asarray(belongs[0]), shares.tolist()


def logistic(right: Pixels, wrong: Pixels, penalty: float = PENALTY) -> Callable[[Pixels], Floats]:
    """Fit a penalised logistic regression by Newton's method. The right and the wrong examples have the same total
    weight. Return a function that gives the logits of pixels."""
    values, is_right = np.concatenate([right, wrong]).astype(float), np.r_[np.ones(len(right)), np.zeros(len(wrong))]
    mean, spread = values.mean(axis=0), values.std(axis=0) + 1e-6
    design = np.c_[np.ones(len(values)), (values - mean) / spread]
    penalties = np.r_[1e-3, np.full(values.shape[1], penalty)]
    share = is_right.mean()
    weights = np.where(is_right == 1, 0.5 / share, 0.5 / (1 - share))
    factors = np.zeros(design.shape[1])
    for _ in range(12):
        # Beyond these limits the sigmoid is 0 or 1, and `exp` of larger numbers overflows.
        probable = 1 / (1 + np.exp(-np.clip(design @ factors, -30, 30)))
        curvature = (design * (weights * probable * (1 - probable))[:, None]).T @ design + np.diag(penalties)
        step = np.linalg.solve(curvature, design.T @ (weights * (is_right - probable)) - penalties * factors)
        factors += step
        if abs(step).max() < 1e-3:
            break
    return lambda pixels: np.c_[np.ones(len(pixels)), (pixels - mean) / spread] @ factors
