"""Converts boxes to pixels from the unit of their numbers, and finds the unit that fits a split's boxes (D23).

A `Reach` gets the objects of a split one by one, with the numbers in the file. The `hint` of the `Reach` names another
unit if that unit fits much better. A single box proves little, so all boxes of a split are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.config.sections.data import Coordinates, ResizedCopy
from learner.records import Size, Unit

_PER_SIDE: dict[Unit, float] = {"shares": 1.0, "percent": 100.0, "thousandths": 1000.0}
_ALL = 0.98  # min fraction of the boxes that are inside their photographs, if the unit is right.
# If less than this fraction of the boxes is inside the photographs, the unit or many boxes are wrong.
_FEW = 0.9
# In the right unit, boxes reach at least to the fraction `_FAR` of a side. In a wrong unit, boxes reach at most to
# `_NEAR`.
_FAR, _NEAR = 0.75, 0.55
# Min number of boxes for a hint: `_LEAST` if the other unit fits far better, `_MANY` if it only fits better.
_LEAST, _MANY = 3, 20
_ALL_OF, _EVERY = 20_000, 16  # the first 20,000 boxes are all counted, of later boxes only every 16th
_LARGE = 1_000_000  # number of pixels; a photograph with fewer pixels is rarely a shrunk copy.
# Factor by which a rounded coordinate may exceed the image's side, or a rounded area the max area.
_TOLERANCE = 1.005
# Sides that labelling tools shrink photographs to, and `max_pixels` of Qwen-VL's processors.
_SQUARES = (320, 416, 512, 640, 800)
_LIMITS = tuple(number * 28 * 28 for number in (256, 512, 768, 1024, 1280, 2048, 3072, 4096, 8192, 12288, 16384))


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelLimits:
    """The limits of a processor like Qwen-VL's. The processor resizes each side to a multiple of `factor` pixels, the
    side of a visual token's square, so that width x height is between `least` and `most` pixels."""

    least: int = 1
    most: int
    factor: int = 32


def resized(size: Size, limits: PixelLimits) -> Size:
    """Return a photograph's size (width, height) as the processors of Qwen-VL models resize it."""
    factor, area = limits.factor, max(1, size[0] * size[1])
    # `round` and `floor` are as in the processor (a test compares the sizes); other rounding was up to one token off.
    across, down = (max(1, round(side / factor)) for side in size)
    if across * down * factor**2 > limits.most:
        shrink = math.sqrt(area / limits.most)
        across, down = (max(1, math.floor(side / shrink / factor)) for side in size)
    elif across * down * factor**2 < limits.least:
        grow = math.sqrt(limits.least / area)
        across, down = (math.ceil(side * grow / factor) for side in size)
    return across * factor, down * factor


def sides_in(unit: Coordinates, size: Size, said: Size | None = None) -> tuple[float, float]:
    """Return the width and the height of an image of `size` pixels in `unit`. `said` is the width and height in the
    record."""
    if unit == "resized":
        return said or size
    if isinstance(unit, ResizedCopy):
        return _sides_of(unit, size)
    return size if unit == "pixels" else (_PER_SIDE[unit],) * 2


def _sides_of(copy: ResizedCopy, size: Size) -> Size:
    if copy.width is not None and copy.height is not None:
        return copy.width, copy.height
    most = copy.max_pixels or 1  # a rule of the configuration requires `max_pixels` here
    return resized(size, PixelLimits(least=min(copy.min_pixels, most), most=most, factor=copy.factor))


def to_pixels(coords: Sequence[float], sides: tuple[float, float], size: tuple[float, float]) -> list[float]:
    """Convert x, y, x, y, ... to pixels. `sides`: the image's width and height in the unit of `coords`; `size`: the
    same in pixels. With `sides` and `size` swapped, pixels are converted to the unit."""
    if sides == size:
        return list(coords)
    return [value * size[i % 2] / sides[i % 2] for i, value in enumerate(coords)]


@dataclass(slots=True)
class _Fit:
    """How well a coordinate unit fits the boxes. `inside`: number of boxes inside their photographs. `across` and
    `along`: the largest x and the largest y. Divided by `side`, these coordinates are fractions of the photograph's
    width and height."""

    side: float = 1.0
    inside: int = 0
    across: float = 0.0
    along: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Count a box that lies inside its photograph. `x` and `y` are the box's largest coordinates."""
        self.inside += 1
        if x > self.across:
            self.across = x
        if y > self.along:
            self.along = y

    @property
    def right(self) -> float:
        return min(1.0, self.across / self.side)

    @property
    def down(self) -> float:
        return min(1.0, self.along / self.side)

    @property
    def least(self) -> float:
        return min(self.right, self.down)

    @property
    def most(self) -> float:
        return max(self.right, self.down)

    def __str__(self) -> str:
        return f"{self.right:.0%} of the widths and {self.down:.0%} of the heights"


@dataclass(slots=True)
class Reach:
    """Counts how well the boxes of a split fit each unit. `num_given`: number of all boxes. `num`: number of counted
    boxes: the first 20,000, then every 16th. `fits`: how well each unit fits the counted boxes. `taken`: the fit of the
    unit in which the boxes were read. `corners`: number of boxes that lie inside the photograph if their third and
    fourth numbers are x2 and y2, not width and height."""

    xywh: bool = False  # True if the format has left, top, width, height
    num: int = 0
    num_given: int = 0
    fits: dict[Unit, _Fit] = field(
        default_factory=lambda: {"pixels": _Fit(), **{unit: _Fit(side) for unit, side in _PER_SIDE.items()}}
    )
    taken: _Fit = field(default_factory=_Fit)
    corners: int = 0
    far: tuple[float, float] = (0.0, 0.0)  # the largest x and y of any box, in the file's unit
    largest: Size = (0, 0)  # size of the photograph with the largest area
    has_wide: bool = False  # True if some image is not square
    ends: set[tuple[float, float]] = field(default_factory=set)  # up to `_MANY` different lower right corners of boxes
    units: set[str] = field(default_factory=set)  # units in which the boxes' numbers were read

    def add(self, coords: Sequence[float], size: Size, unit: Coordinates, sides: tuple[float, float]) -> None:
        """Count one object. `sides` are the image's sides in the unit that the object was read in."""
        self.num_given += 1
        if self.num_given > _ALL_OF and self.num_given % _EVERY:
            return
        self.num += 1
        self.units.add(unit if isinstance(unit, str) else "resized")
        x, y = max(coords[0::2]), max(coords[1::2])
        furthest = max(x, y)
        for name, side in _PER_SIDE.items():
            if furthest <= side * _TOLERANCE:
                self.fits[name].add(x, y)
        width, height = size
        if x <= width * _TOLERANCE + 1 and y <= height * _TOLERANCE + 1:
            self.fits["pixels"].add(x / width, y / height)
        if x <= sides[0] * _TOLERANCE + sides[0] / width and y <= sides[1] * _TOLERANCE + sides[1] / height:
            self.taken.add(x / sides[0], y / sides[1])
        if self.xywh and len(coords) == 4:
            across, down = x - coords[0], y - coords[1]
            inside = across <= sides[0] * _TOLERANCE and down <= sides[1] * _TOLERANCE
            self.corners += inside and across > coords[0] and down > coords[1]
        if len(self.ends) < _MANY:
            self.ends.add((x, y))
        self.far = max(self.far[0], x), max(self.far[1], y)
        self.has_wide |= abs(width - height) > 0.1 * width
        if width * height > self.largest[0] * self.largest[1]:
            self.largest = size

    def better(self) -> tuple[Unit, _Fit] | None:
        """Return the unit that fits much better than the unit in use; None if there is none. Units that are fractions
        of a side are tried first."""
        # Units with small numbers come first, because small numbers also fit units with larger numbers.
        units: tuple[Unit, ...] = (*_PER_SIDE, "pixels")
        others = ((unit, self.fits[unit]) for unit in units if {unit} != self.units)
        return next(((unit, fit) for unit, fit in others if self._is_better(fit)), None)

    def _is_better(self, fit: _Fit) -> bool:
        taken, num = self.taken, self.num
        if self.units == {"pixels"} and fit is self.fits["shares"] and num >= _LEAST and fit.inside >= _ALL * num:
            return True  # boxes with numbers this small are never in pixels
        if num < _LEAST or fit.inside < _ALL * num or fit.least < min(0.5, 2 * taken.least):
            return False
        if taken.inside < _FEW * num:
            return fit.least >= 0.5 or fit.most >= _FAR
        wide = taken.most <= _NEAR and fit.least >= (0.6 if len(self.ends) > 2 * _LEAST else _FAR)
        return wide or (num >= _MANY and taken.least <= _FAR and fit.least >= _FEW)

    def hint(self) -> str:
        """Return a warning with the unit that would fit better; empty if there is no doubt."""
        taken = self.taken
        if self.num < _LEAST:
            return ""
        if self.xywh and self.corners >= _ALL * self.num and taken.inside < _FEW * self.num:
            return (
                f"{self.num - taken.inside} of {self.num} boxes reach out of their photographs, and {self.corners} do "
                "not if their numbers are x1, y1, x2, y2: set data.box_format: xyxy"
            )
        copy = f"may be pixels of a smaller copy of the photographs; then set data.coordinates: {self._copy()}"
        found = self.better()
        if self._square() and (found is None or found[1].least < _FEW):
            return f"no box reaches beyond {self._square()} pixels: the numbers {copy}"
        if found is not None:
            unit, fit = found
            return (
                f"the boxes fit {unit} better: so they reach {fit}, {fit.inside} of {self.num} inside their "
                f"photographs; as {' and '.join(sorted(self.units))} {taken}, {taken.inside} inside: set "
                f"data.coordinates: {unit}"
            )
        if self._may_be_copy():
            return f"no box reaches further than {taken}: the numbers {copy}"
        return ""

    def _may_be_copy(self) -> bool:
        """Return True if all boxes stay in a corner of the photographs, so their numbers may be pixels of smaller
        copies."""
        taken, is_large = self.taken, self.largest[0] * self.largest[1] > _LARGE
        # Small photographs rarely have larger originals, so for small photographs many different corners of boxes are
        # required.
        enough = self.num >= 2 * _LEAST and (is_large or len(self.ends) >= _MANY)
        return enough and self.units == {"pixels"} and taken.inside >= _ALL * self.num and taken.most <= _NEAR

    def _copy(self) -> str:
        """Return the likely size of the copies, as a YAML value."""
        if square := self._square():
            return f"{{width: {square}, height: {square}}}"
        area = self.taken.most**2 * self.largest[0] * self.largest[1]
        limit = next((limit for limit in _LIMITS if area <= limit * _TOLERANCE), _LIMITS[-1])
        return f"{{max_pixels: {limit}, factor: 28}} (the processor's limit), or the copies' width and height"

    def _square(self) -> int:
        """Return the side of the square copies on which the boxes were probably labelled: the boxes reach this side in
        x and in y, although some photograph is not square. Return 0 if there is no such side."""
        near = (side for side in _SQUARES if all(0.95 * side <= far <= side * _TOLERANCE for far in self.far))
        large = self.taken.most <= _FAR and self.has_wide and len(self.ends) >= _MANY
        return next(near, 0) if large and self.units == {"pixels"} else 0
