"""The spelling of a detection answer: one `Grammar` per pair of container and coordinate format.

    index_map  {"object_1": {"desc": "seven", "bbox_2d": [C, C, C, C]}, "object_2": {...}}
    array      [{"bbox_2d": [C, C, C, C], "label": "seven"}, ...]

C is a bare `<|coord_k|>` ("tokens") or a plain integer without leading zeros ("digits"), 0..999. Polygons use the key
`poly`. If a sample has several images, each entry gives its image before its geometry, counted from 1:
`"image": 2, "bbox_2d": [...]`. Answers are written with ", " and ": ". Answers are read with any JSON whitespace and
with fields in any order.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from learner.records import GeometryKind

NUM_BINS = 1000
_CACHED_STRINGS = 1 << 12
GEOMETRY_KINDS: dict[bytes, GeometryKind] = {b"bbox_2d": "bbox_2d", b"poly": "poly"}

# All patterns are possessive (`*+`), so they do not backtrack, and reading any answer takes linear time.
JSON_SPACE = b" \t\n\r"
_WS = rb"[ \t\n\r]*+"
_NAME = rb'"([^"\\\x00-\x1f]*+)"'  # a field's name; it has no escapes, so names are compared byte by byte
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_SCALAR = rb'[^][{}",: \t\n\r]++'

# Groups of a field: its name, a string value, the content of a flat list, another value, and the "," or "}" after it.
_VALUE = rb"(?:(" + _STRING + rb')|\[([^][{}"]*+)\]|(' + _SCALAR + rb"))"
FIELD = re.compile(_WS + _NAME + _WS + b":" + _WS + _VALUE + _WS + rb"([,}])")
# Parts of a text that decide where brackets balance: whole strings, brackets, and a quote that never closes.
BALANCE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}"]', re.DOTALL)
_NUMBER = rb"[1-9][0-9]{0,17}+"
OBJECT_NAME = re.compile(rb"object_(" + _NUMBER + rb")")
IMAGE = b"image"  # name of the field that has the number of the object's image
_IMAGE_NUMBER = rb"[1-9][0-9]{0,2}+"
IMAGE_NUMBER = re.compile(_IMAGE_NUMBER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    opener: str
    closer: str
    indexed: bool  # True: entries have the keys `object_N`
    desc_name: str
    digits: bool
    numbered: bool  # True: each entry has a field `image`
    open_pattern: re.Pattern[bytes]  # the container's start; group 1 is its closing bracket if it is empty
    entry_pattern: re.Pattern[bytes]  # the text up to an object's "{"; group 1 is the object's name, if `indexed`
    next_pattern: re.Pattern[bytes]  # the text after an entry; group 1 is ",", the closing bracket, or empty
    usual_pattern: re.Pattern[bytes]  # a correct entry with fields in the usual order; used for speed
    list_pattern: re.Pattern[bytes]  # matches a list that has only coordinates

    def coordinate_text(self, value: int) -> str:
        """Return bin `value` as it is spelled in an answer."""
        return str(value) if self.digits else f"<|coord_{value}|>"


@lru_cache(maxsize=8)
def grammar_of(container: str, coordinates: str, *, numbered: bool = False) -> Grammar:
    """Return the grammar of `task.container` and `task.coordinates`. `numbered`: True for samples with several
    images."""
    indexed, digits = container == "index_map", coordinates == "digits"
    opener, closer = ("{", "}") if indexed else ("[", "]")
    end = re.escape(closer.encode())
    number = rb"(?:0|[1-9][0-9]{0,2}+)" if digits else rb"<\|coord_[0-9]{1,3}+\|>"
    numbers = _WS + number + rb"(?:" + _WS + b"," + _WS + number + rb")*+" + _WS
    name = _NAME + _WS + b":" + _WS if indexed else b""
    usual_name = rb'"object_(?P<number>' + _NUMBER + rb')"' + _WS + b":" + _WS if indexed else rb"(?P<number>)"
    desc_name = "desc" if indexed else "label"
    desc = rb'"' + desc_name.encode() + rb'"' + _WS + b":" + _WS + rb"(?P<desc>" + _STRING + rb")"
    geometry = rb'"(?P<kind>bbox_2d|poly)"' + _WS + b":" + _WS + rb"\[(?P<list>" + numbers + rb")\]"
    image = rb'"image"' + _WS + b":" + _WS + rb"(?P<image>" + _IMAGE_NUMBER + rb")" + _WS + b"," + _WS
    geometry = (image if numbered else rb"(?P<image>)") + geometry
    first, second = (desc, geometry) if indexed else (geometry, desc)
    fields = rb"\{" + _WS + first + _WS + b"," + _WS + second + _WS + rb"\}(?P<end>)"
    follows = _WS + b"(?P<follows>[," + end + b"]?)"
    return Grammar(
        opener=opener,
        closer=closer,
        indexed=indexed,
        desc_name=desc_name,
        digits=digits,
        numbered=numbered,
        open_pattern=re.compile(_WS + re.escape(opener.encode()) + _WS + b"(" + end + b"?)"),
        entry_pattern=re.compile(_WS + name + rb"\{"),
        next_pattern=re.compile(follows),
        usual_pattern=re.compile(_WS + usual_name + fields + follows),
        list_pattern=re.compile(numbers),
    )


@lru_cache(maxsize=_CACHED_STRINGS)
def decode(string: bytes) -> str | None:
    """Return a JSON string's text; None if it is blank or invalid."""
    try:
        text = string[1:-1].decode()
    except UnicodeDecodeError:
        return None
    if "\\" in text:
        text = json.loads(f'"{text}"')
        if any("\ud800" <= char <= "\udfff" for char in text):
            return None  # the string has half of a surrogate pair
    return text if text.strip() else None
