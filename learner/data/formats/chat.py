"""Turns rows of other programs into rows of the project's JSONL. The module reads ms-swift's `objects`, and
conversations of Qwen, LLaVA and LLaMA-Factory whose last answer has the boxes.

In: a row of JSON. Out: a row in the form that `jsonl` reads, and the unit of its boxes. An answer may have three forms:

    [{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}]          also in ```json fences
    <ref>cat</ref><box>(x1,y1),(x2,y2)</box>                 thousandths; also <|object_ref_start|> and <|box_start|>
    <ref-object><bbox>                                       ms-swift, with `objects: {"ref": [...], "bbox": [...]}`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from learner.data.formats.strict import numbers
from learner.records import Unit
from shared.config.model import show

RowKind = Literal["own", "chat"]
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_BOX_KEYS, _NAME_KEYS = ("bbox_2d", "bbox", "box"), ("label", "desc", "category", "class", "name", "sub_label")
_IMAGE = re.compile(r"(?:Picture \d+: *)?<img>(.*?)</img>\n?", re.DOTALL)  # an image in a prompt of Qwen-VL
_MARKED = re.compile(
    r"(?:<ref>|<\|object_ref_start\|>)(?P<name>.*?)(?:</ref>|<\|object_ref_end\|>)|"
    r"(?:<box>|<\|box_start\|>)(?P<box>.*?)(?:</box>|<\|box_end\|>)",
    re.DOTALL,
)
_PLACE = re.compile(r"<ref-object>|<bbox>")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
Box = dict[str, Any]


def row_kind(row: Mapping[str, Any]) -> RowKind | None:
    """Return the kind of a row: the project's own or a conversation; None if no reader knows it."""
    if not {"messages", "conversations"} & row.keys():
        return "own" if "objects" in row else None
    # ms-swift's `objects` are a mapping of columns, the project's own are a list.
    return "chat" if isinstance(row.get("objects", {}), Mapping) else "own"


def own_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], Unit]:
    """Return the row as a row of the project's JSONL, and the unit of its boxes. Raises ValueError."""
    images = [_path(image) for key in ("images", "image") for image in _listed(row.get(key))]
    turns = [_turn(turn, images) for turn in _listed(row.get("messages") or row.get("conversations"))]
    if not turns or turns[-1]["role"] != "assistant":
        raise ValueError("no assistant's turn at the end, which has the boxes")
    if isinstance(row.get("objects"), Mapping):
        objects, unit = _of_swift(row["objects"], turns, len(images))
    else:
        objects, unit = boxes_in(turns[-1]["content"])
    kept = {key: row[key] for key in ("id", "width", "height", "sizes") if row.get(key) is not None}
    return {**kept, "messages": turns, "images": images, "objects": objects}, unit


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _path(image: object) -> str:
    """Return an image as a string. ms-swift also writes {"path": ...}. Raises ValueError."""
    found = image.get("path") or image.get("bytes") if isinstance(image, Mapping) else image
    if not isinstance(found, str):
        raise ValueError(f"{show(image)} instead of an image's path")
    return found


def _turn(turn: object, images: list[str]) -> dict[str, str]:
    """Return a turn's role and text. Images in the turn are added to `images`. Raises ValueError."""
    if not isinstance(turn, Mapping):
        raise ValueError(f"{show(turn)} instead of a turn")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if role not in _ROLES:
        raise ValueError(f"the role {show(role)} instead of user, assistant or system")
    text = "".join(_part(part, images) for part in _listed(content))
    images += _IMAGE.findall(text)
    return {"role": _ROLES[role], "content": _IMAGE.sub("<image>", text)}


def _part(part: object, images: list[str]) -> str:
    """Return a part of a turn as text. If the part is an image, it is added to `images`. Raises ValueError."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    image = (part.get("image") or part.get("image_url")) if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and (image or part.get("type") == "image"):
        if image:
            images.append(_path(image.get("url") if isinstance(image, Mapping) and "url" in image else image))
        return "<image>"
    raise ValueError(f"{show(part)} instead of a text or an image")


def boxes_in(answer: str) -> tuple[list[Box], Unit]:
    """Return the objects in an answer. Raises ValueError if the answer has no list of objects; the list may be
    empty."""
    found = list(_marked(answer))
    if found:
        return found, "thousandths"
    # The list may be in a code fence or between words.
    start, end = min((at for mark in "[{" if (at := answer.find(mark)) >= 0), default=-1), max(map(answer.rfind, "]}"))
    try:
        listed = json.loads(answer[start : end + 1]) if 0 <= start < end else None
    # Deeply nested JSON ends in a RecursionError.
    except (ValueError, RecursionError):
        listed = None
    if isinstance(listed, dict) and not any(key in listed for key in _BOX_KEYS):
        listed = next((value for value in listed.values() if isinstance(value, list)), None)
    if not isinstance(listed, list | dict):
        raise ValueError(f"no boxes in the answer {answer!r:.80}")
    return [_object(one) for one in _listed(listed)], "pixels"


def _object(one: object) -> Box:
    """Return an object of an answer with its name and box. Raises ValueError."""
    values = next((one[key] for key in _BOX_KEYS if key in one), None) if isinstance(one, Mapping) else None
    name = next((one[key] for key in _NAME_KEYS if key in one), None) if isinstance(one, Mapping) else None
    if values is None or not isinstance(name, str):
        raise ValueError(f"{json.dumps(one)[:80]} instead of an object with bbox_2d and label")
    return {"desc": name, "bbox_2d": values}


def _marked(answer: str) -> Iterator[Box]:
    name = ""
    for match in _MARKED.finditer(answer):
        if match["name"] is not None:
            name = match["name"].strip()
            continue
        values = [float(text) for text in _NUMBER.findall(match["box"])]
        for place in range(0, len(values) - 3, 4):
            yield {"desc": name, "bbox_2d": values[place : place + 4]}


def _of_swift(objects: Mapping[str, Any], turns: list[dict[str, str]], num_images: int) -> tuple[list[Box], Unit]:
    """Read `ref`, `bbox`, `bbox_type` and `image_id`, and fill in the placeholders of `turns`. Raises ValueError."""
    refs, boxes = _listed(objects.get("ref")), [numbers(box) for box in _listed(objects.get("bbox"))]
    if wrong := next((box for box in boxes if len(box) < 4 or len(box) % 2), None):
        raise ValueError(f"bbox {wrong} instead of x1, y1, x2, y2 or a polygon")
    kinds: dict[Any, Unit] = {None: "pixels", "real": "pixels", "norm1": "shares"}
    if (kind := objects.get("bbox_type")) not in kinds:
        raise ValueError(f"bbox_type {show(kind)} instead of real or norm1")
    names = _names(refs, boxes, turns)
    numbers_of_images = _listed(objects.get("image_id")) or [0] * len(boxes)
    if len(numbers_of_images) != len(boxes):
        raise ValueError(f"{len(numbers_of_images)} image_id of {len(boxes)} bbox")
    found: list[Box] = []
    for name, box, image in zip(names, boxes, numbers_of_images, strict=True):
        own = {"desc": name, "bbox_2d" if len(box) == 4 else "poly": box}
        found.append(own | ({"image": int(image) + 1} if num_images > 1 else {}))
    return found, kinds[kind]


def _names(refs: Sequence[Any], boxes: Sequence[list[float]], turns: list[dict[str, str]]) -> list[str]:
    """Return the name of each box. The placeholders in `turns` are replaced by names and boxes, in order. Raises
    ValueError if a box has no name."""
    left_refs, left_boxes, name = list(refs), list(boxes), ""
    by_place: list[str] = []

    def fill(match: re.Match[str]) -> str:
        nonlocal name
        if match[0] == "<ref-object>":
            name = str(left_refs.pop(0)) if left_refs else name
            return name
        by_place.append(name)
        return json.dumps(left_boxes.pop(0)) if left_boxes else match[0]

    for turn in turns:
        turn["content"] = _PLACE.sub(fill, turn["content"])
    if len(refs) == len(boxes):
        return [str(ref) for ref in refs]
    if len(refs) == 1:
        return [str(refs[0])] * len(boxes)
    try:
        listed = [box["desc"] for box in boxes_in(turns[-1]["content"])[0]]
    except ValueError:
        listed = by_place
    if len(listed) != len(boxes) or not all(listed):
        raise ValueError(f"{len(refs)} ref of {len(boxes)} bbox, and an answer that does not say which is which")
    return listed
