"""Turns pydantic's errors about data into parts of our errors: what happened, what was found, what was wanted.

Used for JSON files, rows of annotations and results, and answers over HTTP. The caller adds the location and the
remedy. `shared.config.model` has the words for YAML files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shared.errors import ConfigError
from shared.reading import bytes_beside

Model = TypeVar("Model", bound=BaseModel)


_MOST = 200  # max characters of a value in a message
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
    """A wrong value: its location and three of the four parts of an error (all except the remedy). `where`: the keys
    and indices that lead to the value, joined by dots; "" for the whole row."""

    where: str
    what: str
    found: str
    wanted: str


def fault_of(detail: ErrorDetails, *, whole: str = "the record") -> Fault:
    """Return one of pydantic's errors as a `Fault`. `whole`: the row's name in messages."""
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


class WrongField(NamedTuple):
    found: str
    wanted: str


def first_wrong(error: ValidationError, whole: str) -> WrongField:
    """Return the first mistake in `error`: what was found (with the field's name), and what was wanted. `whole`: the
    name for the data, if no single field is wrong."""
    fault = fault_of(error.errors(include_url=False)[0], whole=whole)
    return WrongField(found=f"{fault.where or whole}: {fault.found}", wanted=fault.wanted)


def read_if_there(model: type[Model], file: Path, *, what: str, remedy: str) -> Model | None:
    """Return a `model` from a JSON file that no user named; None if there is no such file.

    Raises ConfigError, with `what` and `remedy`, if the file cannot be read.
    """
    if not file.is_file():
        return None
    try:
        return model.model_validate_json(bytes_beside(file))
    except OSError as error:
        wanted = "a file of that folder, not a link to another place"
        raise ConfigError(f"{file}: {what}", found=str(error), wanted=wanted, remedy=remedy) from error
    except ValidationError as error:
        raise ConfigError(f"{file}: {what}", **first_wrong(error, "the file")._asdict(), remedy=remedy) from error
