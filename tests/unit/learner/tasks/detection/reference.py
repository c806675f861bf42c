"""A slow, obvious parser to compare with: character by character, then `json` on one object at a time.

It knows text only (no tokens), so it reads answers whose coordinate tokens are real ones.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

SPACE = " \t\n\r"
COORD = re.compile(r"<\|coord_(0|[1-9]\d{0,2}|0\d{1,2})\|>")


@dataclass
class ReferenceEntry:
    end: int  # offset in characters
    number: int
    outcome: Any  # (desc, kind, bins), a reason, or "?" where json can't read the object


@dataclass
class ReferenceAnswer:
    opened: bool = False
    closed: bool = False
    lost: bool = False  # something was cut off
    entries: list[ReferenceEntry] = field(default_factory=list)


def parse(text: str, *, indexed: bool, digits: bool, num_images: int = 1) -> ReferenceAnswer:
    """Parse an answer. Outcomes of several images end with the number of their image."""
    answer = ReferenceAnswer()
    opener, closer = ("{", "}") if indexed else ("[", "]")
    pos = skip(text, 0)
    if text[pos : pos + 1] != opener:
        return answer
    answer.opened = True
    pos = skip(text, pos + 1)
    if text[pos : pos + 1] == closer:
        answer.closed = True
        return answer
    seen: set[int] = set()
    while True:
        if pos >= len(text):
            return answer
        found = entry_start(text, pos, indexed)
        end = None if found is None else balanced_end(text, found[1])
        if found is None or end is None:
            answer.lost = True
            return answer
        name, start = found
        number, outcome = 0, classify(text[start:end], indexed, digits, num_images)
        if indexed:
            number = int(name[7:]) if re.fullmatch(r"object_[1-9][0-9]{0,17}", name) else 0
            if not number or number in seen:
                outcome = "key_invalid"
            seen.add(number)
        answer.entries.append(ReferenceEntry(end, number, outcome))
        pos = skip(text, end)
        if text[pos : pos + 1] == closer:
            answer.closed = True
            return answer
        if text[pos : pos + 1] != ",":
            answer.lost = pos < len(text)
            return answer
        pos = skip(text, pos + 1)


def skip(text: str, pos: int) -> int:
    while pos < len(text) and text[pos] in SPACE:
        pos += 1
    return pos


def entry_start(text: str, pos: int, indexed: bool) -> tuple[str, int] | None:
    """Return the entry's name and the offset of its "{"."""
    name = ""
    if indexed:
        if text[pos : pos + 1] != '"':
            return None
        end = text.find('"', pos + 1)
        name = text[pos + 1 : end]
        if end < 0 or "\\" in name or any(ord(c) < 32 for c in name):
            return None
        pos = skip(text, end + 1)
        if text[pos : pos + 1] != ":":
            return None
        pos = skip(text, pos + 1)
    return (name, pos) if text[pos : pos + 1] == "{" else None


def balanced_end(text: str, pos: int) -> int | None:
    open_brackets, in_string = "", False
    while pos < len(text):
        char = text[pos]
        if in_string:
            if char == "\\":
                pos += 1
            in_string = char != '"'
        elif char == '"':
            in_string = True
        elif char in "{[":
            open_brackets += char
        elif char in "}]":
            if open_brackets[-1] + char not in ("{}", "[]"):
                return None
            open_brackets = open_brackets[:-1]
            if not open_brackets:
                return pos + 1
        pos += 1
    return None


def classify(text: str, indexed: bool, digits: bool, num_images: int) -> Any:
    """The object, or why it is dropped; "?" where it is not JSON."""
    pieces = re.split(r'("(?:[^"\\]|\\.)*")', text, flags=re.DOTALL)
    for i in range(0, len(pieces), 2):  # outside strings
        if "$" in pieces[i]:
            return "?"
        pieces[i] = COORD.sub(r'{"$": "\1"}', pieces[i])
    try:
        pairs = json.loads("".join(pieces), object_pairs_hook=tuple)
    except ValueError:
        return "?"
    names = [name for name, _ in pairs]
    if any(nested(value) for _, value in pairs) or any("\\" in json.dumps(n, ensure_ascii=False) for n in names):
        return "?"
    if len(set(names)) < len(names):
        return "key_invalid"
    fields = dict(pairs)
    desc_name = "desc" if indexed else "label"
    desc = fields.pop(desc_name, None)
    if not isinstance(desc, str) or not desc.strip() or any(0xD800 <= ord(c) < 0xE000 for c in desc):
        return "missing_desc"
    image = fields.pop("image", None) if num_images > 1 else None
    kinds = [name for name in fields if name in ("bbox_2d", "poly")]
    if len(fields) > len(kinds) or len(kinds) > 1:
        return "unknown_geom"
    if not kinds or not isinstance(fields[kinds[0]], list):
        return "missing_geom"
    outcome = judge_geometry(desc, kinds[0], fields[kinds[0]], digits)
    if num_images == 1 or isinstance(outcome, str):
        return outcome
    return (*outcome, image) if type(image) is int and 1 <= image <= num_images else "image_invalid"


def nested(value: Any) -> bool:
    """Return whether it is a dict, or a list that is not flat: what the parser does not read as a field."""
    if isinstance(value, list):
        return any(isinstance(v, list | str) or (isinstance(v, tuple) and not is_coord(v)) for v in value)
    return isinstance(value, tuple) and not is_coord(value)


def is_coord(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 1 and value[0][0] == "$"


def judge_geometry(desc: str, kind: str, values: list[Any], digits: bool) -> Any:
    bins = []
    for value in values:
        if digits and type(value) is int and 0 <= value <= 999:
            bins.append(value)
        elif not digits and is_coord(value) and str(int(value[0][1])) == value[0][1]:
            bins.append(int(value[0][1]))
        else:
            return "non_coord_token"
    if (len(bins) != 4) if kind == "bbox_2d" else (len(bins) < 6 or len(bins) % 2):
        return "wrong_arity"
    xs, ys = bins[0::2], bins[1::2]
    ordered = kind == "poly" or (xs[0] < xs[1] and ys[0] < ys[1])
    sound = ordered and len(set(xs)) > 1 and len(set(ys)) > 1
    return (desc, kind, tuple(bins)) if sound else "bbox_invalid"
