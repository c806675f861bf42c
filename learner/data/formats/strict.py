"""Checks values of annotation files strictly. 640.0 and "640" count as the number 640, because tools write them so.

Each function returns the value, or raises ValueError whose text says what was wanted. The types at the end are for
pydantic models.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated

from pydantic import BeforeValidator

LARGEST = 1e9  # max absolute value of a number: above all coordinates and ids; a product of two is still exact
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_YES = ("1", "1.0", "true", "t", "yes", "y")
_NO = ("0", "0.0", "false", "f", "no", "n", "", "none", "null", "unspecified")


def number(value: object) -> float:
    """Return a finite number. A text with a number is accepted. Raises ValueError."""
    if type(value) in (int, float) and -LARGEST <= value <= LARGEST:  # type: ignore[operator]  # nearly always
        return float(value)  # type: ignore[arg-type]
    wanted = "a number"
    if isinstance(value, str):
        value = value.strip()
        if _NUMBER.fullmatch(value) is None:
            raise ValueError(wanted)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(wanted)
    if isinstance(value, int) and abs(value) > LARGEST:  # a larger integer may not fit a float
        raise ValueError(f"{wanted} of at most {LARGEST:g}")
    found = float(value)
    if not math.isfinite(found) or abs(found) > LARGEST:
        raise ValueError(f"{wanted} of at most {LARGEST:g}")
    return found


def numbers(values: object) -> list[float]:
    """Return a list of numbers. A text is refused, although it can be iterated over. Raises ValueError."""
    if not isinstance(values, list | tuple):
        raise ValueError("a list of numbers")
    return [number(value) for value in values]


def box(values: object) -> tuple[float, float, float, float]:
    if not isinstance(values, list | tuple) or len(values) != 4:
        raise ValueError("four numbers")
    a, b, c, d = numbers(values)
    return a, b, c, d


def whole(value: object) -> int:
    """Return a whole number that is not negative. Raises ValueError."""
    try:
        found = number(value)
    except ValueError as error:
        raise ValueError(str(error).replace("a number", "a whole number")) from error
    if found != int(found) or found < 0:
        raise ValueError("a whole number, not negative")
    return int(found)


def flag(value: object) -> bool:
    """Return True for yes and False for no, in the words of several tools. None, "" and `Unspecified` are no."""
    if value is False or value is True or (type(value) is int and 0 <= value <= 1):
        return bool(value)
    text = "" if value is None else str(value).strip().lower() if isinstance(value, str | int | float) else "?"
    # An unknown word is an error, because to read it as yes or no would silently change what is learned.
    if text not in _YES + _NO:
        raise ValueError("yes or no, as 1 or 0, true or false")
    return text in _YES


def any_flag(values: Mapping[str, object], names: Sequence[str]) -> bool:
    """Return True if one of the flags is set. Raises ValueError if any flag is neither yes nor no."""
    found = False
    for name in names:
        try:
            found |= flag(values.get(name))
        except ValueError as error:
            raise ValueError(f"{name} {values[name]!r:.40} instead of {error}") from error
    return found


def class_name(value: object) -> str:
    """Return a text that is not blank, unchanged. `plain_name` removes the spaces around the text later."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a name: a text that is not blank")
    return value


def plain_name(name: str) -> str:
    """Return a class name as it is taught, shown and compared: without spaces around it, and with spaces in place of
    control characters."""
    # A control character could move a terminal's cursor.
    if not name.isprintable():
        name = "".join(" " if unicodedata.category(character) == "Cc" else character for character in name)
    return name.strip()


def identity(value: object) -> str:
    """Return an id: a text, or a whole number written as 7, 7.0 or "7". Raises ValueError."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64:
        return _digits(value)
    if isinstance(value, float) and abs(value) <= LARGEST and value == int(value):
        return str(int(value))
    raise ValueError("an id: a text or a whole number")


# Returns a number as text. Annotations repeat the ids of images and classes, so the cache saves memory.
_digits = lru_cache(maxsize=1 << 16)(str)


def _size(value: object) -> int:
    found = whole(value)
    if not found:
        raise ValueError("a whole number above 0")
    return found


def _known_size(value: object) -> int | None:
    """Return a number of pixels, or None if it is not known: some tools then write 0 or -1."""
    return None if value is None or value in (-1, "-1") else whole(value) or None


Number = Annotated[float, BeforeValidator(number)]
Size = Annotated[int, BeforeValidator(_size)]
KnownSize = Annotated[int | None, BeforeValidator(_known_size)]
Flag = Annotated[bool, BeforeValidator(flag)]
ClassName = Annotated[str, BeforeValidator(class_name)]
Identity = Annotated[str, BeforeValidator(identity)]
