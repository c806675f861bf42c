"""What pydantic found wrong in a file of rows, in our words: what, found, wanted.

Used for annotations and results, whose readers add the place. `shared.config.model` has the words for YAML files.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic_core import ErrorDetails

_MOST = 200  # characters of what was found
_WORDS = {
    "list_type": "a list",
    "dict_type": "an object with keys",
    "model_type": "an object with keys",
    "model_attributes_type": "an object with keys",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number that is finite",
    "bool_type": "true or false",
}


class Fault(NamedTuple):
    """Three of the four parts of an error. `where`: the keys and indices that lead to the value, joined by dots; ""
    for the whole row."""

    where: str
    what: str
    found: str
    wanted: str


def fault_of(detail: ErrorDetails, *, whole: str = "the record") -> Fault:
    """Return one of pydantic's errors in our words. `whole` names what the row is."""
    where = ".".join(map(str, detail["loc"]))
    kind, given = detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind == "json_invalid":
        text = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
        shown = f"{context.get('error', 'wrong text')}: {' '.join(text.split())}" if text.strip() else "nothing"
        return Fault(where, "not JSON", shown[:_MOST], "one JSON object")
    if kind == "missing":
        found = f"only {', '.join(map(str, given))}" if given else "no keys"
        return Fault(where, f"{where} is missing", found[:_MOST], f"a value for {where}")
    if kind in ("too_short", "too_long"):
        bound = "at least" if kind == "too_short" else "at most"
        limit = context["min_length" if kind == "too_short" else "max_length"]
        wanted = f"{bound} {limit} {'item' if limit == 1 else 'items'}"
    else:
        wanted = _WORDS.get(kind) or detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return Fault(where, f"{where or whole} is wrong", repr(given)[:_MOST], wanted)
