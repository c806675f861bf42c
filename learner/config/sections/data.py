"""The section `data`: annotations and images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field

from learner.config.modes import Rule
from learner.config.sections.augment import AugmentConfig
from learner.config.sections.task import TaskConfig
from learner.records import Unit
from shared.config.model import Mistake, Section, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig
    from shared.images import ImageRules


BadKind = Literal[
    "no_area",
    "outside_image",
    "unknown_class",
    "image_missing",
    "image_size",
    "image_shape",
    "duplicate",
    "too_long",
]
BadAction = Literal["error", "drop", "clip"]
_BAD_KINDS: tuple[BadKind, ...] = get_args(BadKind)


Format = Literal["auto", "jsonl", "coco", "voc", "yolo", "labelme", "datasets"]
ReaderPath = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]  # import path of a user's function that reads samples


class ResizedCopy(Section):
    """The resized copy of each photograph in whose pixels the coordinates are given. All copies have one size, or each
    copy has the size to which the processors of Qwen-VL models shrink the photograph."""

    width: int | None = key("width of the copies, if they all have one size", None, unit="pixels", ge=1, req="D23")
    height: int | None = key("height of the copies", None, unit="pixels", ge=1, req="D23")
    max_pixels: int | None = key(
        "the processor's limit, width x height, if copies keep the photograph's shape",
        None,
        unit="pixels",
        ge=1,
        req="D23",
    )
    min_pixels: int = key("the processor's least width x height", 56 * 56, unit="pixels", ge=1, req="D23")
    factor: int = key("each side is a multiple of it: 28 for Qwen2.5-VL, 32 for Qwen3-VL", 28, unit="pixels", ge=1)


Coordinates = Unit | ResizedCopy


class SplitConfig(Section):
    """Annotations of a split, if they differ from the annotations of `train`. A key that is null has the value of the
    same key in `data`."""

    path: str = key("annotations, as for `data.train`", min_length=1, req="R41")
    format: Format | ReaderPath | None = key(
        "as `data.format`, of this split; a task's own reader does not apply then", None, req="R38 R41"
    )
    image_root: str | None = key("as `data.image_root`, of this split", None, req="R41")
    coordinates: Unit | None = key("as `data.coordinates`, of this split; no copy of another size", None, req="D23")
    prompt: str | None = key("as `data.prompt`, of this split", None, req="R41")


class RetainConfig(Section):
    """Other annotations that each evaluation also scores, to see what the model forgets. `data.retain` is not
    learned."""

    name: str = key("what it is called in metrics and reports", pattern=r"^[A-Za-z0-9_.-]+$", req="R44")
    val: str = key("annotations of any format, as for `data.train`", min_length=1, req="R44")
    format: Format = key("as `data.format`", "auto", req="R44")
    image_root: str | None = key("as `data.image_root`", None, req="R44")
    coordinates: Unit | None = key("as `data.coordinates`, of these annotations", None, req="D23")
    prompt: str | None = key("as `data.prompt`, of these annotations", None, req="R44")
    task: TaskConfig | None = key("as the section `task`, for other answers; null: the run's", None, req="R44")


class DataConfig(Section):
    """Annotations and images. Paths are relative to the working directory."""

    train: str = key(
        "training annotations: a JSONL or COCO file, a folder of Pascal VOC XML (or a text file with the "
        "names of some of them), a YOLO `data.yaml:SPLIT`, a folder with splits of any of these (`FOLDER:SPLIT`), or a "
        "Hugging Face data set `FOLDER:SPLIT`. `PATH[:90%]` and `PATH[90%:]` are parts of it",
        min_length=1,
        req="R12 R41",
    )
    val: str | SplitConfig | None = key(
        "annotations that training evaluates on; null: `test`. A path, or a mapping with a `path`, if they have a "
        "format, a prompt or a folder of images of their own",
        None,
        req="R41",
    )
    test: str | SplitConfig | None = key(
        "annotations that are scored once, at the end of a run with `training.eval_on_end`, and by `evaluate`. If only "
        "one of `val` and `test` is given, training evaluates on it. As `val`, a path or a mapping",
        None,
        req="D17",
    )
    format: Format | ReaderPath = key(
        "`auto`: detected from the files, or read by the task's own reader. A data set by its name on the Hugging Face "
        "hub needs `datasets`. Other formats: the import path of a reader of your own, "
        "`my_package.my_module:my_reader`",
        "auto",
        req="R38 R41",
    )
    image_root: str | None = key(
        "relative image paths start here; null: the annotation file's folder (`voc`: `JPEGImages` or `images` near it)",
        None,
    )
    annotation_root: str | None = key(
        "`voc` with a list of names: the folder of the XML files; null: `Annotations` or `voc` near the list", None
    )
    prompt: str | None = key(
        "the user's turn if the annotations have none (all formats but `jsonl`), with `<image>` at the image's place; "
        "null: `<image>Detect every object.`",
        None,
    )
    coordinates: Coordinates | None = key(
        "what the numbers of boxes and polygons are: `pixels` of the upright photograph; `thousandths`, `shares` (0 to "
        "1) or `percent` of its sides; `resized`, pixels of a copy whose width and height the record says; or the "
        "copy itself. null: what the format says, which is shares for YOLO and pixels for the others",
        None,
        req="D23",
    )
    box_format: Literal["xywh", "xyxy"] = key(
        "`coco`, `datasets` and `metadata.jsonl`: boxes as left, top, width, height, or as two corners", "xywh"
    )
    names: list[str] = key(
        "names of classes 0, 1, 2, ... for `datasets` and `metadata.jsonl` that only have their numbers", [], req="R41"
    )
    on_bad_record: BadAction | dict[BadKind, BadAction] = key(
        "what happens to bad records: one rule for all, or one per kind (`error` for kinds that are not named). "
        "`error`: all of them are listed, and nothing starts. `drop`: the object (or, for images and lengths, the "
        "whole sample) is left out, counted and logged. `clip`: boxes that extend beyond the image are cut at its "
        "border; other kinds are dropped. Kinds: `no_area`, an object without area; `outside_image`, one that "
        "extends more than a pixel beyond its image; `unknown_class`, one whose class the annotations do not name;"
        " `duplicate`, one that stands twice; `image_missing`, a missing or unreadable image; `image_size`, one "
        "whose size differs from the annotation (upright, by its EXIF orientation); `image_shape`, one more than "
        "200 times as long as it is wide, or the reverse, which no processor takes; `too_long`, a training sample "
        "that may become longer than `global_max_length`: prompt, labels and, where rollouts are learned, "
        "`max_new_tokens`",
        "error",
        req="R41",
    )
    # Off by default: on blood cells F1 of `sft` was 0.621 without it, 0.607 with mirrors, and 0.456 with crops.
    augment: AugmentConfig | None = key(
        "training photographs are augmented; null: they are seen as they are. `augment: {}` takes the defaults", None
    )
    tile: int | None = key(
        "longer side of tiles: larger photographs are learned whole and in overlapping tiles of their own shape, as "
        "`predict --tile` asks; for small objects. Not with `augment` or `labels.complete`",
        None,
        unit="pixels",
        ge=64,
    )
    retain: list[RetainConfig] = key(
        "other annotation files that each evaluation also scores, with another prompt or task if they need it: what "
        "the model forgets is shown beside what it gains",
        [],
        req="R44",
    )
    shuffle: bool = key("a new order every epoch, derived from `training.seed`", True)
    num_workers: int = key("processes per rank that read and encode images; 0: the learner itself", 0, ge=0)
    allowed_image_hosts: list[str] = key(
        "image URLs may be fetched from these hosts; empty: no URLs. Servers have a list of their own", [], req="D13"
    )
    max_image_pixels: int = key("largest image, width x height", 64_000_000, unit="pixels", ge=1)

    # All samples are compared by default. For an image of 0.05 megapixels this takes 0.4 to 0.8 ms, and processing it
    # takes 0.9 ms.
    pixel_check: Literal["all", "off"] | Annotated[float, Field(ge=0.0, le=1.0)] = key(
        "samples of which each rollout's engine tells what its vision tower was fed, to be compared with what the "
        "learner learns from: `all`, a share of them (0.1: others in every step), or `off`. When a run connects, some "
        "samples are always compared",
        "all",
        req="R45",
    )

    def path_of(self, split: str) -> str | None:
        """Return the path of the annotations of `train`, `val` or `test`; None if the split is not given."""
        named: str | SplitConfig | None = {"train": self.train, "val": self.val, "test": self.test}[split]
        return named.path if isinstance(named, SplitConfig) else named

    @property
    def reader(self) -> str | None:
        """The import path of the user's reader, if `format` is one; None if `format` names a known format."""
        return self.format if ":" in self.format else None

    @property
    def pixel_share(self) -> float:
        """The fraction of the samples that `pixel_check` asks to compare: 1.0 for `all`, 0.0 for `off`."""
        return {"all": 1.0, "off": 0.0}[self.pixel_check] if isinstance(self.pixel_check, str) else self.pixel_check

    @property
    def image_rules(self) -> ImageRules:
        """The rules for opening images. Local files in any folder are allowed, because the user has chosen the data."""
        # Imported here: it loads Pillow, which a check of keys does not need.
        from shared.images import ImageRules

        return ImageRules(hosts=tuple(self.allowed_image_hosts), max_pixels=self.max_image_pixels)

    @property
    def bad_records(self) -> Mapping[BadKind, BadAction]:
        """The action for each kind of bad record, from `on_bad_record`: `error`, `drop` or `clip`."""
        rule = self.on_bad_record
        if isinstance(rule, dict):
            return {kind: rule.get(kind, "error") for kind in _BAD_KINDS}
        other: BadAction = "error" if rule == "error" else "drop"
        return {kind: rule if kind == "outside_image" else other for kind in _BAD_KINDS}


def prompt_has_a_use(config: RunConfig) -> Iterator[Mistake]:
    """`prompt` is for formats without messages. JSONL rows have their own prompts."""
    data = config.data
    named = {"data": data, "data.val": data.val, "data.test": data.test}
    for path, part in named.items():
        if isinstance(part, DataConfig | SplitConfig) and part.prompt is not None and part.format == "jsonl":
            remedy = "remove it: JSONL rows carry their own messages"
            yield Mistake(path=f"{path}.prompt", found="a prompt for jsonl data", wanted="null", remedy=remedy)


def retained_is_evaluated(config: RunConfig) -> Iterator[Mistake]:
    """`data.retain` needs evaluations, and names that differ (R44)."""
    names = [one.name for one in config.data.retain]
    training = config.training
    if names and not (training.eval_steps or training.eval_on_start or training.eval_on_end):
        wanted, remedy = "evaluations that score it", "set training.eval_on_start and eval_on_end, or eval_steps"
        yield Mistake(path="data.retain", found="no evaluation", wanted=wanted, remedy=remedy)
    for i, name in enumerate(names):
        if name in names[:i]:
            wanted, remedy = "a name of its own", "rename one of them"
            yield Mistake(path=f"data.retain[{i}].name", found=f"{name} twice", wanted=wanted, remedy=remedy)


def copies_have_a_size(config: RunConfig) -> Iterator[Mistake]:
    """A resized copy has a width and a height, or a processor's limit (D23)."""
    copy, sizes = config.data.coordinates, ("width", "height", "max_pixels")
    if isinstance(copy, ResizedCopy):
        given = [name for name in sizes if getattr(copy, name) is not None]
        if given not in (["width", "height"], ["max_pixels"]):
            yield Mistake(
                path="data.coordinates",
                found=", ".join(given) or "none of them",
                wanted="width and height, or max_pixels",
                remedy="give the size that the photographs had when boxes were made",
            )


def boxes_are_clipped(config: RunConfig) -> Iterator[Mistake]:
    """Only boxes beyond the image can be clipped."""
    rule = config.data.on_bad_record
    for kind, action in rule.items() if isinstance(rule, dict) else ():
        if action == "clip" and kind != "outside_image":
            path, wanted = f"data.on_bad_record.{kind}", "error or drop"
            yield Mistake(path=path, found="clip", wanted=wanted, remedy="only outside_image can be clipped")


def tiles_stand_alone(config: RunConfig) -> Iterator[Mistake]:
    """`data.tile` is for detection, and not with `augment` or `labels.complete`."""
    if config.data.tile is None:
        return
    others = {
        "data.augment": config.data.augment is not None,
        "labels.complete": config.labels.complete is not None,
        f"task.type: {config.task.type}": config.task.type == "key_value",
    }
    for name in (name for name, is_set in others.items() if is_set):
        wanted, remedy = "photographs as they are", "remove one of the two"
        yield Mistake(path="data.tile", found=f"{config.data.tile} with {name}", wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (
    prompt_has_a_use,
    retained_is_evaluated,
    copies_have_a_size,
    boxes_are_clipped,
    tiles_stand_alone,
)
