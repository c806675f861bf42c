"""Scenes of real handwritten digits on textured canvases, with the box of every digit.

In: a split's digits (scikit-learn's `load_digits`: 8x8 grey scans of handwriting), a random generator and a `Style`:
few digits side by side ("demo"), or many overlapping digits among shapes that are no digits ("hard"). Out: a `Scene`:
pixels and objects.

Invariants: the same generator state and style give the same scene. Train, val and test never share a digit image, for
any seed. A box is tight around the painted digit, lies inside the canvas, and overlaps other boxes by at most the
style's `max_iou`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Split = Literal["train", "val", "test"]
Box = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels; x2 and y2 are one past the last pixel

SPLITS: tuple[Split, ...] = ("train", "val", "test")
SPLIT_ENDS = (0.7, 0.8, 1.0)  # where train, val and test end, as fractions of each digit's images
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MIN_CONTRAST = 70.0  # min difference in grey levels between a digit and its background
INK = 0.25  # opacity from which a pixel belongs to the digit
PLACEMENT_TRIES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """The settings that decide how hard a scene is."""

    canvas: int  # width and height of a scene, in pixels
    min_height: int  # min height of a drawn digit, in pixels
    max_height: int
    max_digits: int
    max_iou: float  # max IoU of two digits' boxes
    max_distractors: int = 0  # max number of scrambled digits; they are drawn first, so real digits may cover them


StyleName = Literal["demo", "hard"]
STYLES: dict[StyleName, Style] = {
    "demo": Style(canvas=128, min_height=20, max_height=48, max_digits=8, max_iou=0.05),
    # The canvas is as large as in "demo": the shipped checkpoint was trained on this size only, and 160 pixels would
    # give more image tokens.
    "hard": Style(canvas=128, min_height=12, max_height=30, max_digits=30, max_iou=0.25, max_distractors=8),
}
DEMO = STYLES["demo"]
# Permutations of a digit's four quarters in which no quarter keeps its position.
_SCRAMBLES = ((3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2), (3, 0, 1, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneObject:
    desc: str
    box: Box


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scene:
    pixels: NDArray[np.uint8]  # [canvas, canvas, 3]
    objects: tuple[SceneObject, ...]  # objects in the order in which they were drawn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DigitBank:
    """One split's digit images. `indices`: the images' indices in `load_digits`. No image is in two splits."""

    opacity: NDArray[np.float32]  # [N, 8, 8] opacity of each pixel, from 0 to 1
    labels: NDArray[np.int64]  # [N]
    indices: NDArray[np.int64]  # [N]


@cache
def load_bank(split: Split) -> DigitBank:
    """Load the split's digits, stratified by class. The split is fixed: it does not depend on any seed."""
    from sklearn.datasets import load_digits

    data = load_digits()
    which = SPLITS.index(split)
    starts = (0.0, *SPLIT_ENDS)
    # The seed is fixed. With the scenes' seed, a training digit of one build could be a test digit of another build.
    rng = np.random.default_rng(0)
    chosen = []
    for label in range(10):
        members = rng.permutation(np.flatnonzero(data.target == label))
        chosen.append(members[round(starts[which] * len(members)) : round(starts[which + 1] * len(members))])
    indices = np.sort(np.concatenate(chosen))
    opacity = (data.images[indices] / 16.0).astype(np.float32)
    return DigitBank(opacity=opacity, labels=data.target[indices].astype(np.int64), indices=indices)


def draw_scene(rng: np.random.Generator, bank: DigitBank, style: Style = DEMO) -> Scene:
    """Draw 1 to `max_digits` digits on a canvas. A digit for which no free position is found is left out; the first
    digit always has one."""
    canvas = _texture(rng, style.canvas)
    if style.max_distractors:
        _distract(rng, canvas, bank, style)
    objects: list[SceneObject] = []
    for _ in range(int(rng.integers(1, style.max_digits + 1))):
        which = int(rng.integers(len(bank.labels)))
        placed = _place(rng, bank.opacity[which], [o.box for o in objects], style)
        if placed is None:
            continue
        stamp, box = placed
        _paint(rng, canvas, stamp, box)
        objects.append(SceneObject(desc=DIGIT_WORDS[bank.labels[which]], box=box))
    return Scene(pixels=canvas.round().clip(0, 255).astype(np.uint8), objects=tuple(objects))


def iou(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def _distract(rng: np.random.Generator, canvas: NDArray[np.float32], bank: DigitBank, style: Style) -> None:
    """Paint digits with permuted quarters, which look similar to digits but are no objects."""
    for _ in range(int(rng.integers(style.max_distractors + 1))):
        glyph = bank.opacity[int(rng.integers(len(bank.labels)))]
        quarters = [glyph[:4, :4], glyph[:4, 4:], glyph[4:, :4], glyph[4:, 4:]]
        a, b, c, d = (quarters[i] for i in _SCRAMBLES[int(rng.integers(len(_SCRAMBLES)))])
        placed = _place(rng, np.block([[a, b], [c, d]]), [], style)
        assert placed is not None, "nothing is taken"
        _paint(rng, canvas, *placed)


def _place(
    rng: np.random.Generator, glyph: NDArray[np.float32], taken: list[Box], style: Style
) -> tuple[NDArray[np.float32], Box] | None:
    """Return a glyph of random size and a free position for it; None if all tries fail. Each try chooses from smaller
    sizes."""
    for attempt in range(PLACEMENT_TRIES):
        limit = style.max_height - (style.max_height - style.min_height) * attempt / PLACEMENT_TRIES
        tall, stretch = float(rng.uniform(style.min_height, limit)), float(rng.uniform(0.85, 1.2))
        stamp = _stamp(glyph, height=tall, stretch=stretch)[: style.canvas, : style.canvas]
        height, width = stamp.shape
        x, y = int(rng.integers(style.canvas - width + 1)), int(rng.integers(style.canvas - height + 1))
        box = (x, y, x + width, y + height)
        if all(iou(box, other) <= style.max_iou for other in taken):
            return stamp, box
    return None


def _stamp(glyph: NDArray[np.float32], *, height: float, stretch: float) -> NDArray[np.float32]:
    """Return the glyph's opacity, upscaled to about `height` pixels and cropped tightly."""
    tight = _crop(glyph, threshold=INK)
    rows, columns = tight.shape
    scale = height / rows
    padded = np.pad(tight, 1)
    size = (max(4, round((columns + 2) * scale * stretch)), round((rows + 2) * scale))
    smooth = np.asarray(Image.fromarray(padded).resize(size, Image.Resampling.BICUBIC)).clip(0.0, 1.0)
    return _crop(smooth, threshold=INK)


def _crop(opacity: NDArray[np.float32], *, threshold: float) -> NDArray[np.float32]:
    inked = opacity >= threshold
    rows, columns = np.flatnonzero(inked.any(axis=1)), np.flatnonzero(inked.any(axis=0))
    return opacity[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _paint(rng: np.random.Generator, canvas: NDArray[np.float32], stamp: NDArray[np.float32], box: Box) -> None:
    """Blend the stamp into the canvas in a grey that differs from the background by MIN_CONTRAST or more."""
    x1, y1, x2, y2 = box
    under = canvas[y1:y2, x1:x2]
    ground = float(under.mean())
    darker = ground - MIN_CONTRAST > 0 and (ground + MIN_CONTRAST > 255 or rng.random() < 0.5)
    grey = rng.uniform(0, ground - MIN_CONTRAST) if darker else rng.uniform(ground + MIN_CONTRAST, 255)
    colour = (grey + rng.uniform(-40, 40, size=3)).clip(0, 255).astype(np.float32)
    alpha = stamp[:, :, None]
    under *= 1 - alpha
    under += alpha * colour


def _texture(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Return a canvas [size, size, 3] in grey levels: a gradient, stripes or clouds between two colours, with grain."""
    axis = np.linspace(0, 1, size, dtype=np.float32)
    angle = rng.uniform(0, 2 * np.pi)
    along = axis[None, :] * np.cos(angle) + axis[:, None] * np.sin(angle)
    kind = rng.integers(3)
    if kind == 0:
        mix = (along - along.min()) / (along.max() - along.min())
    elif kind == 1:
        mix = 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(2, 12) * along)
    else:
        cells = int(rng.integers(3, 12))
        clouds = Image.fromarray(rng.random((cells, cells), dtype=np.float32))
        mix = np.asarray(clouds.resize((size, size), Image.Resampling.BICUBIC))
    first = rng.uniform(20, 235, size=3)
    second = (first + rng.uniform(-50, 50, size=3)).clip(0, 255)
    canvas = first + mix[:, :, None] * (second - first)
    grain = rng.normal(0, rng.uniform(0, 6), size=(size, size, 1))
    return (canvas + grain).astype(np.float32)
