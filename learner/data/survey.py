"""What is in a split, for people: classes, boxes, sizes, what looks wrong, and photographs that two splits share.

In: the samples of `read_split`. Out: a `Survey`, and lines of text. Of images the header has been read already; only
`shared_images` reads from their files, 64 kB of each.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from learner.data.splits import Split
from learner.records import Sample
from learner.tasks.detection.bins import bounding_box

_HEAD_BYTES = 1 << 16
_MAX_NAMED = 12
_SMALL_SIDE_PX = 12.0  # below it, a box is a few patches of the model's encoder at most
_RARE = 5  # boxes of a class


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Counts of one split. `sizes` are (width, height) in pixels, the smallest, the median and the largest by area."""

    num_samples: int
    num_empty: int  # without objects
    num_ignored: int  # ignore regions
    classes: Mapping[str, int]
    boxes_per_image: tuple[int, float, int]  # fewest, median, most
    sizes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    smallest_side_px: float  # the median box's shorter side
    bad: Mapping[str, Mapping[str, int]]
    num_errors: int

    @property
    def num_boxes(self) -> int:
        return sum(self.classes.values())


def survey(split: Split) -> Survey:
    """`split` has one sample at least."""
    samples = split.samples
    counts = [len(sample.objects) for sample in samples] or [0]
    sizes = sorted(((sample.width, sample.height) for sample in samples), key=lambda size: size[0] * size[1])
    sizes = sizes or [(0, 0)]
    sides = [side for sample in samples for side in _sides(sample)]
    return Survey(
        num_samples=len(samples),
        num_empty=counts.count(0),
        num_ignored=sum(len(sample.ignored) for sample in samples),
        classes=dict(Counter(obj.desc for sample in samples for obj in sample.objects).most_common()),
        boxes_per_image=(min(counts), median(counts), max(counts)),
        sizes=(sizes[0], sizes[len(sizes) // 2], sizes[-1]),
        smallest_side_px=median(sides) if sides else 0.0,
        bad=split.bad.summary(),
        num_errors=split.bad.num_errors,
    )


def _sides(sample: Sample) -> Iterator[float]:
    for obj in sample.objects:
        x1, y1, x2, y2 = bounding_box(obj)
        yield min((x2 - x1) * sample.width, (y2 - y1) * sample.height) / 999


def photographs(number: int) -> str:
    """`1 photograph`, `2 photographs`."""
    return f"{number} photograph{'' if number == 1 else 's'}"


def lines_of(found: Survey) -> list[str]:
    """For a terminal."""
    few, middle, many = found.boxes_per_image
    shown = list(found.classes.items())[:_MAX_NAMED]
    classes = ", ".join(f"{name} {count}" for name, count in shown)
    more = f" and {len(found.classes) - _MAX_NAMED} more" if len(found.classes) > _MAX_NAMED else ""
    small, mid, large = (f"{width} x {height}" for width, height in found.sizes)
    return [
        f"{photographs(found.num_samples)}, {found.num_boxes} boxes ({few} to {many} a photograph, median {middle:g})",
        f"{len(found.classes)} classes: {classes}{more}" if len(found.classes) != 1 else f"1 class: {classes}",
        f"photographs of {small}" if small == large else f"photographs from {small} to {large}, median {mid}",
    ]


def warnings_of(found: Survey) -> list[str]:
    """What may be a mistake."""
    warned = [f"{number} {action}: {kind}" for kind, actions in found.bad.items() for action, number in actions.items()]
    if found.num_empty:
        warned.append(f"{photographs(found.num_empty)} without objects: taught as the empty answer")
    if found.num_ignored:
        warned.append(f"{found.num_ignored} ignore regions (difficult, crowd): neither learned nor scored")
    by_lower: dict[str, list[str]] = {}
    for name in found.classes:
        by_lower.setdefault(name.casefold().replace("_", " ").replace("-", " "), []).append(name)
    warned += [f"one class or two? {' and '.join(map(repr, names))}" for names in by_lower.values() if len(names) > 1]
    rare = [name for name, count in found.classes.items() if count < _RARE]
    if rare:
        warned.append(f"fewer than {_RARE} boxes: {', '.join(rare[:_MAX_NAMED])}")
    return warned


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the model sees of a photograph. Sides are multiples of `factor` pixels, a visual token is a square of it."""

    size: tuple[int, int]
    share: float  # of the photograph's pixels
    num_tokens: int


def seen_by_model(size: tuple[int, int], max_pixels: int, factor: int = 32) -> Seen:
    """A photograph of `size` after the processor of Qwen-VL models has shrunk it to at most `max_pixels`."""
    width, height = size
    scale = min(1.0, (max_pixels / max(1, width * height)) ** 0.5)
    across, down = (max(1, int(side * scale / factor + 0.5 * (scale == 1.0))) for side in size)
    share = min(1.0, across * down * factor**2 / max(1, width * height))
    return Seen(size=(across * factor, down * factor), share=share, num_tokens=across * down)


def small_boxes(found: Survey, seen: Seen) -> str | None:
    """A warning if the median box is very small as the model sees it."""
    side = found.smallest_side_px * seen.share**0.5
    if not found.num_boxes or side >= _SMALL_SIDE_PX:
        return None
    return (
        f"the median box is {found.smallest_side_px:.0f} pixels across, {side:.0f} as the model sees it: "
        "raise model.max_pixels, or cut photographs into parts"
    )


def shared_images(splits: Mapping[str, Sequence[Sample]]) -> dict[tuple[str, str], list[str]]:
    """Photographs that are in two splits, by pair of splits: by their content, whatever they are called."""
    where: dict[str, dict[str, str]] = {}  # fingerprint: name by split
    for split, samples in splits.items():
        for image in (image for sample in samples for image in sample.images):
            where.setdefault(_fingerprint(image), {})[split] = image
    found: dict[tuple[str, str], list[str]] = {}
    for names in where.values():
        present = list(names)
        for i, first in enumerate(present):
            for second in present[i + 1 :]:
                found.setdefault((first, second), []).append(names[first])
    return found


def _fingerprint(image: str) -> str:
    """Of a local file, its length and first bytes; of everything else the string."""
    try:
        path = Path(image)
        with path.open("rb") as file:
            return f"{path.stat().st_size} {hashlib.blake2b(file.read(_HEAD_BYTES)).hexdigest()}"
    except (OSError, ValueError):
        return image
