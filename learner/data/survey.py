"""Describes a split for people: classes, boxes, sizes, probable mistakes, and photographs that two splits share.

In: the samples of `read_split`. Out: a `Survey`, and lines of text. Only `shared_images` reads image files. To find
equal photographs, it reads the first 64 kB of each file whose length occurs in two splits.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from learner.config.sections.model import ModelConfig
from learner.data.splits import Split
from learner.data.units import PixelLimits, resized
from learner.records import Sample
from learner.tasks.detection.bins import bounding_box
from shared.generation import places_images
from shared.reading import is_file, json_in

_HEAD_BYTES = 1 << 16
_MAX_NAMED = 12
_SMALL_SIDE_PX = 12.0  # a smaller box covers at most a few patches of the model's encoder
_RARE = 5  # min boxes of a class; a class with fewer is reported.
# Min photographs to evaluate on; with fewer there is a warning. With 200 scenes the interval around F1 is 0.03
# (README.md), so with 20 scenes it is about 0.1, as large as the gain from training.
LEAST_HELD_OUT = 20
_MISPLACED = ("no_area", "outside_image")
# Of boxes read in a wrong unit, most were misplaced: 464 of 513 YOLO labels in pixels, 358 of 476 COCO boxes given as
# corners. If more than this fraction of the boxes is misplaced, the unit is probably wrong.
_MOST_MISPLACED = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The counts that describe one split. `sizes` are the smallest, the median and the largest (width, height) in
    pixels, by area."""

    num_samples: int
    num_images: int
    num_empty: int  # samples without objects
    num_ignored: int  # ignore regions
    num_unplaced: int  # samples whose prompt has no `<image>` placeholder
    asked_again: Sequence[str]  # photographs of samples that repeat an earlier sample's question, with other objects
    classes: Mapping[str, int]
    boxes_per_image: tuple[int, float, int]  # the fewest boxes of an image, the median, and the most
    sizes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    smallest_side_px: float  # median of the boxes' shorter sides, in pixels
    told: Sequence[str]  # a line for each kind of bad record and action
    num_misplaced: int  # boxes that were cut or left out because they have no area or lie outside
    num_left_out: int  # number of misplaced boxes that were left out
    hint: str  # names a unit that fits the boxes' numbers better; empty if there is no such unit
    num_errors: int

    @property
    def num_boxes(self) -> int:
        return sum(self.classes.values())

    @property
    def num_given(self) -> int:
        """Return the number of boxes in the annotations."""
        return self.num_boxes + self.num_left_out


def survey(split: Split) -> Survey:
    """Return the counts of a split's photographs, boxes and classes, and their sizes."""
    samples = split.samples
    counts = [len(sample.objects) for sample in samples] or [0]
    of_images = [size for sample in samples for size in sample.sizes or ((sample.width, sample.height),)]
    sizes = sorted(of_images, key=lambda size: size[0] * size[1])
    sizes = sizes or [(0, 0)]
    sides = [side for sample in samples for side in _sides(sample)]
    misplaced = [actions for kind, actions in split.bad.summary().items() if kind in _MISPLACED]
    return Survey(
        num_samples=len(samples),
        num_images=len(of_images),
        num_empty=sum(not sample.objects for sample in samples),
        num_ignored=sum(len(sample.ignored) for sample in samples),
        num_unplaced=sum(bool(sample.images) and not places_images(sample.messages) for sample in samples),
        asked_again=[*_asked_again(samples)],
        classes=dict(Counter(obj.desc for sample in samples for obj in sample.objects).most_common()),
        boxes_per_image=(min(counts), median(counts), max(counts)),
        sizes=(sizes[0], sizes[len(sizes) // 2], sizes[-1]),
        smallest_side_px=median(sides) if sides else 0.0,
        told=split.bad.in_words(),
        num_misplaced=sum(sum(actions.values()) for actions in misplaced),
        num_left_out=sum(actions.get("drop", 0) for actions in misplaced),
        hint=split.bad.reach.hint(),
        num_errors=split.bad.num_errors,
    )


def _asked_again(samples: Sequence[Sample]) -> Iterator[str]:
    answers: dict[tuple[tuple[str, ...], str], tuple[object, ...]] = {}
    for sample in samples:
        before = answers.setdefault((sample.images, repr(sample.messages)), sample.objects)
        if sample.images and before != sample.objects:
            yield _called(sample.images[0], sample)


def _sides(sample: Sample) -> Iterator[float]:
    for obj in sample.objects:
        (x1, y1, x2, y2), (width, height) = bounding_box(obj), sample.size_of(obj.image)
        yield min((x2 - x1) * width, (y2 - y1) * height) / 999


def photographs(number: int) -> str:
    """Return `1 photograph`, `2 photographs` and so on."""
    return f"{number} photograph{'' if number == 1 else 's'}"


def _classes(number: int) -> str:
    return "1 class" if number == 1 else f"{number} classes"


def lines_of(found: Survey) -> list[str]:
    """Return the survey as lines for a terminal."""
    few, middle, many = found.boxes_per_image
    shown = list(found.classes.items())[:_MAX_NAMED]
    classes = ", ".join(f"{name} {count}" for name, count in shown)
    more = f" and {len(found.classes) - _MAX_NAMED} more" if len(found.classes) > _MAX_NAMED else ""
    small, mid, large = (f"{width} x {height}" for width, height in found.sizes)
    several = found.num_images > found.num_samples
    plural = "" if found.num_samples == 1 else "s"
    counted = f"{found.num_samples} record{plural} of {found.num_images} photographs" if several else ""
    lines = [
        f"{counted or photographs(found.num_samples)}, {found.num_boxes} boxes ({few} to {many} a "
        f"{'record' if several else 'photograph'}, median {middle:g})",
        f"{_classes(len(found.classes))}: {classes}{more}" if classes else "no classes",
        f"photographs of {small}" if small == large else f"photographs from {small} to {large}, median {mid}",
    ]
    if found.num_unplaced:
        prompts = f"{found.num_unplaced} of {found.num_samples} prompt{plural}"
        lines.append(f"no <image> in {prompts}: the model sees the photograph before the text of the first user turn")
    return lines


def warnings_of(found: Survey, split: str = "train", learned: Collection[str] = ()) -> list[str]:
    """Return lines about probable mistakes. `learned`: the classes of the split `train`, unless `split` is `train`."""
    warned = [*found.told]
    doubtful = ""
    if found.hint:
        warned.append(f"{found.hint}; look at them with `check --draw 8`")
    elif found.num_misplaced > _MOST_MISPLACED * max(1, found.num_given):
        doubtful = f"{found.num_misplaced} of {found.num_given} boxes are no boxes in their photographs"
    elif found.num_boxes and found.smallest_side_px < 1:
        doubtful = "half of the boxes are less than a pixel across"
    if doubtful:
        warned.append(
            f"{doubtful}: their numbers may mean something else than pixels (shares, thousandths), or x2, y2 where "
            "width and height are read; look at them with `check --draw 8`"
        )
    if split != "train" and found.num_samples < LEAST_HELD_OUT:
        chosen = ", or to choose a step of training by" if split == "val" else ""
        warned.append(
            f"{photographs(found.num_samples)} to evaluate on: too few to tell two models apart{chosen} (at least "
            f"{LEAST_HELD_OUT})"
        )
    if found.asked_again:
        warned.append(
            f"{len(found.asked_again)} record{'s' * (len(found.asked_again) > 1)} of a photograph that an earlier one "
            f"has too, with other objects, for example {found.asked_again[0]}: each teaches that the other's are not "
            "there; put all of them in one"
        )
    if found.num_samples and not found.num_boxes:
        so = "the model would learn to find nothing" if split == "train" else "whatever a model finds is wrong"
        warned.append(f"no box at all: {so}")
    elif found.num_empty:
        warned.append(f"{photographs(found.num_empty)} without objects: taught as the empty answer")
    if found.num_ignored:
        warned.append(f"{found.num_ignored} ignore regions (difficult, crowd): neither learned nor scored")
    by_lower: dict[str, list[str]] = {}
    for name in found.classes:
        by_lower.setdefault(name.casefold().replace("_", " ").replace("-", " "), []).append(name)
    warned += [f"one class or two? {' and '.join(map(repr, names))}" for names in by_lower.values() if len(names) > 1]
    if learned and (unknown := [name for name in found.classes if name not in learned]):
        warned.append(f"classes that no photograph to train on has (written otherwise there?): {_listed(unknown)}")
    rare = [name for name, count in found.classes.items() if count < _RARE]
    if rare:
        warned.append(f"fewer than {_RARE} boxes: {_listed(rare)}")
    return warned


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The size at which the model sees a photograph."""

    size: tuple[int, int]
    share: float  # pixels of the resized photograph / pixels of the photograph
    num_tokens: int


def pixel_limits(model: ModelConfig) -> PixelLimits | None:
    """Return the pixel limits that `model` sets. If a limit is null, the checkpoint's limit is taken. None if the
    checkpoint's limits are not known: it is not on this machine, or its processor has no such limits."""
    own = _own_limits(Path(model.path))
    if own is None:
        return None if model.max_pixels is None else PixelLimits(least=model.min_pixels or 1, most=model.max_pixels)
    # The next two lines compute the limits as `shared.generation.limit_pixels` does.
    least = model.min_pixels or min(own.least, model.max_pixels or own.least)
    return PixelLimits(least=least, most=model.max_pixels or max(own.most, least), factor=own.factor)


def _own_limits(folder: Path) -> PixelLimits | None:
    try:
        adapter = folder / "adapter_config.json"
        if adapter.is_file():
            folder = Path(str(json_in(adapter)["base_model_name_or_path"]))
        joined, alone = folder / "processor_config.json", folder / "preprocessor_config.json"
        found = json_in(joined).get("image_processor") if joined.is_file() else None
        found = found or json_in(alone)
        size = found.get("size") or {}
        return PixelLimits(
            least=int(found.get("min_pixels") or size["shortest_edge"]),
            most=int(found.get("max_pixels") or size["longest_edge"]),
            factor=int(found["patch_size"]) * int(found["merge_size"]),
        )
    # The error is reported later, when the model is loaded.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seen_by_model(size: tuple[int, int], limits: PixelLimits) -> Seen:
    """Return how the model sees a photograph of `size` (width, height), resized as the processors of Qwen-VL models
    do."""
    across, down = resized(size, limits)
    share = min(1.0, across * down / max(1, size[0] * size[1]))
    return Seen(size=(across, down), share=share, num_tokens=across * down // limits.factor**2)


def seen_in_words(seen: Seen) -> str:
    """Return one line about the size at which the model sees the largest photograph."""
    size = f"{seen.size[0]} x {seen.size[1]}"
    return f"the model sees the largest as {size}: {seen.share:.0%} of it, {seen.num_tokens} tokens"


def small_boxes(found: Survey, seen: Seen) -> str | None:
    """Return a warning if the median box is very small for the model, else None."""
    side = found.smallest_side_px * seen.share**0.5
    if not found.num_boxes or side >= _SMALL_SIDE_PX or found.smallest_side_px < 1:  # a side below 1 means a wrong unit
        return None
    return (
        f"the median box is {found.smallest_side_px:.0f} pixels across, {side:.0f} as the model sees it: "
        "set a larger model.max_pixels, or cut photographs into parts"
    )


def shared_images(splits: Mapping[str, Sequence[Sample]]) -> dict[tuple[str, str], list[str]]:
    """Return the photographs that two splits share, by pair of splits. Shared photographs have equal content, but their
    names may differ."""
    by_length: dict[int | str, list[tuple[str, str, Sample]]] = {}  # keys: lengths of image files, in bytes
    for split, samples in splits.items():
        for sample in samples:
            for image in sample.images:
                by_length.setdefault(_length(image), []).append((split, image, sample))
    where: dict[str, dict[str, str]] = {}  # fingerprint -> split -> the photograph's name
    for alike in by_length.values():
        # Only files whose length occurs in two splits are read, because files of different lengths differ. Reading all
        # files of 20,000 photographs took 7 s of processor time more.
        if len({split for split, *_ in alike}) == 1:
            continue
        for split, image, sample in alike:
            where.setdefault(_fingerprint(image), {})[split] = _called(image, sample)
    found: dict[tuple[str, str], list[str]] = {}
    for names in where.values():
        present = list(names)
        for i, first in enumerate(present):
            for second in present[i + 1 :]:
                found.setdefault((first, second), []).append(names[first])
    return found


def _called(image: str, sample: Sample) -> str:
    """Return a photograph's path or URL. If the photograph is encoded in its record, return the record's id."""
    named = image[:4].lower() == "http" or is_file(Path(image.removeprefix("file://")))
    return image if named else f"record {sample.sample_id}"


def _length(image: str) -> int | str:
    """Return the length of a local file, otherwise the whole string. Only files of equal length are read later."""
    try:
        return os.stat(image).st_size  # noqa: PTH116  # a path object for each would cost more
    except (OSError, ValueError):
        return image


def _fingerprint(image: str) -> str:
    """Return what identifies a photograph: for a local file its length and first bytes, otherwise the whole string."""
    try:
        with open(image, "rb", buffering=0) as file:  # noqa: PTH123  # a path object for each would cost more
            return f"{os.fstat(file.fileno()).st_size} {hashlib.blake2b(file.read(_HEAD_BYTES)).hexdigest()}"
    except (OSError, ValueError):
        return image
