"""The section `task`: the form of answers, and matching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from learner.config.modes import Rule
from learner.config.sections.loss import RECOMMENDED, LossConfig
from shared.config.model import Mistake, Section, given, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class TaskConfig(Section):
    """The kind of answers, their spelling, and how they are matched with ground truth. All keys except `type` and
    `options` are for `detection`."""

    type: str = key(
        "`detection`: objects with boxes or polygons; `key_value`: the fields of a document, as a flat JSON object of "
        "texts; or the import path of a task of your own, `my_package.my_module:MyTask`",
        "detection",
        min_length=1,
        req="R38",
    )
    options: dict[str, Any] = key("keys for a task of your own, passed to it as they are", {}, req="R38")
    container: Literal["index_map", "array"] = key(
        'form of an answer. `index_map`: `{"object_1": {"desc": ..., "bbox_2d": [...]}}`; `array`: '
        '`[{"bbox_2d": [...], "label": ...}]`',
        "index_map",
    )
    coordinates: Literal["tokens", "digits"] = key(
        "how coordinates are written, 0 to 999: as `<|coord_k|>` tokens, or as integers in digits", "tokens"
    )
    iou_threshold: float = key(
        "a predicted and a true object match only if their IoU is at least this", 0.5, unit="IoU", ge=0.0, le=1.0
    )
    geometry: Literal["bbox_2d", "poly"] = key(
        "`poly`: objects are polygons if the annotations have an outline (COCO's segmentations, YOLO's segments); "
        "`bbox_2d`: boxes. JSONL says it per object",
        "bbox_2d",
        req="R41",
    )


def detection_keys_have_a_use(config: RunConfig) -> Iterator[Mistake]:
    """With `task.type: key_value`, the keys of the detection task in `task` and `loss` are not set (R38)."""
    if config.task.type != "key_value":
        return
    for path, section, model in (("task", config.task, TaskConfig), ("loss", config.loss, LossConfig)):
        # The preset sets keys of detection that the user has not written.
        by_preset = RECOMMENDED if path == "loss" and config.loss.preset == "recommended" else {}
        for name, field in model.model_fields.items():
            default = by_preset.get(name, field.default)
            if name not in ("type", "options", "function") and getattr(section, name) != default:
                found, wanted = given(section, name), "no such key: key_value does not read it"
                yield Mistake(path=f"{path}.{name}", found=found, wanted=wanted, remedy="remove it")


RULES: tuple[Rule, ...] = (detection_keys_have_a_use,)
