"""Any configuration that a model's own types allow, and values that each key must refuse, read off the model itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from shared.config.model import Section, section_of, walk_keys

BOUNDS = ("ge", "gt", "le", "lt")

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ["${HOME}", "yes", "1e-4", "null", "010", "a: b", "- x", "{}", "", " ", "#", "'", '"', "\x85", "\u2028"]
).filter(bool)


def sections(model: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    """Return any mapping that the model takes, with and without its optional keys."""
    fields = {name: values_of(field.annotation, tuple(field.metadata)) for name, field in model.model_fields.items()}
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    return st.fixed_dictionaries(
        {name: fields[name] for name in fields if name in required},
        optional={name: fields[name] for name in fields if name not in required},
    )


def values_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Return any value that the type allows."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [part for arg in args[1:] for part in (arg.metadata if isinstance(arg, FieldInfo) else [arg])]
        return values_of(args[0], (*metadata, *inner))
    if origin is Union or type(annotation).__name__ == "UnionType":
        return st.one_of([values_of(arg, metadata) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is dict:
        anything = st.none() | st.booleans() | st.integers() | texts
        values = anything if args[1] is Any else values_of(args[1])
        return st.dictionaries(texts if args[0] is str else values_of(args[0]), values, max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return sections(annotation)
    return _numbers(annotation, metadata) if annotation in (int, float) else _others(annotation, metadata)


def _others(annotation: Any, metadata: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    patterns = [item.pattern for item in metadata if getattr(item, "pattern", None)]
    if patterns:
        # ASCII: "²" is a letter to Python's \w and none to pydantic's.
        return st.from_regex(re.compile(patterns[0].removesuffix("$") + r"\Z", re.ASCII))
    paths = texts.filter(lambda text: "\0" not in text).map(lambda text: str(Path(text)))
    return {bool: st.booleans(), str: texts, Path: paths, type(None): st.none()}[annotation]


def _numbers(annotation: Any, metadata: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    bounds = _bounds(metadata)
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if annotation is int:
        return st.integers(low, high)
    open_ends = {"exclude_min": "gt" in bounds, "exclude_max": "lt" in bounds}
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **open_ends)


def _bounds(metadata: tuple[Any, ...]) -> dict[str, Any]:
    return {name: getattr(item, name) for item in metadata for name in BOUNDS if hasattr(item, name)}


def refused(model: type[Section]) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) for every plain key outside lists: other types, NaN, and numbers just out of range."""
    for path, field in walk_keys(model):
        if 0 in path or section_of(field.annotation) is not None:
            continue
        kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
        name = ".".join(map(str, path))
        if get_origin(field.annotation) is dict:
            yield from ((name, value) for value in (1, "a", []))
        elif kinds[0] is bool:
            yield from ((name, value) for value in ("true", "yes", 0, 1, 1.0))
        elif kinds[0] is int and len(kinds) == 1:
            yield from ((name, value) for value in ("1", True, 1.0, 2.5, math.nan))
        elif kinds[0] is float:
            yield from ((name, value) for value in ("0.5", True, math.nan, math.inf))
        elif get_origin(field.annotation) is Literal:
            yield from ((name, value) for value in ("nonsense", 1, True, None))
        elif kinds[0] is str:
            yield from ((name, value) for value in (1, 0.5, True, {}))
        yield from ((name, value) for value in _just_outside(_bounds(tuple(field.metadata)), whole=kinds[0] is int))


def _just_outside(bounds: dict[str, Any], *, whole: bool) -> Iterator[float]:
    for name, bound in bounds.items():
        away = math.inf if name in ("le", "lt") else -math.inf
        if name in ("gt", "lt"):
            yield int(bound) if whole else bound
        else:
            yield bound + (1 if away > 0 else -1) if whole else math.nextafter(bound, away)
