"""The parts of a configuration: the declaration of a key, its type in words, and mistakes in its value.

- `Section` and `key` declare a configuration. The arguments of `key` go to CONFIG.md and the JSON Schemas.
- `walk_keys` lists every key of a model. `describe` says a type in words, for error messages and for CONFIG.md.
- `Mistake` is one thing that is wrong. A `Mistake` prints as `path.to.key: found ... (file:line); wanted ...; what to
  do`. Paths are dotted, list items are `[0]`. `ConfigErrors` carries all mistakes of a file, one line each.
- `mistake_of` turns one pydantic error into a `Mistake` that names the nearest correct key.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, PydanticUserError, TypeAdapter
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.errors import ConfigError, ProjectError
from shared.masking import as_written, masked
from shared.reading import yaml_of

MAX_FOUND_CHARS = 80
ROOT = "(root)"
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_\-]+")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake in a configuration. `path` is dotted, or a file name if no key is wrong; `at` is `file:line`."""

    path: str
    found: str
    wanted: str
    remedy: str
    at: str = ""

    @classmethod
    def of(cls, error: ProjectError, path: str, *, wanted: str = "", remedy: str = "") -> Mistake:
        """Return an error as a mistake of the key at `path`. `wanted` and `remedy` are used if the error lacks these
        parts."""
        # A mistake's line begins with the key, so the key is removed from the error's text.
        what = error.what.removeprefix(f"{path}: ")
        found = f"{what}: {error.found}" if error.found else what
        return cls(path=path, found=found, wanted=error.wanted or wanted, remedy=error.remedy or remedy)

    def __str__(self) -> str:
        place = f" ({self.at})" if self.at else ""
        return masked(f"{self.path}: found {self.found}{place}; wanted {self.wanted}; {self.remedy}")


class ConfigErrors(ConfigError):  # noqa: N818  (it holds several)
    """Every mistake of a configuration. `str()` gives one line per mistake."""

    def __init__(
        self,
        what: str = "the configuration is wrong",
        *,
        found: str = "",
        wanted: str = "",
        remedy: str = "",
        mistakes: Sequence[Mistake] = (),
    ) -> None:
        super().__init__(what, found=found, wanted=wanted, remedy=remedy)
        self.mistakes = tuple(mistakes)

    @classmethod
    def one(cls, path: str, found: str, wanted: str, remedy: str) -> ConfigErrors:
        """Return the error of a single mistake, see `Mistake`."""
        return cls(mistakes=[Mistake(path=path, found=found, wanted=wanted, remedy=remedy)])

    def __str__(self) -> str:
        return "\n".join(str(mistake) for mistake in self.mistakes) or super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__(), {"mistakes": self.mistakes})


def dotted(path: KeyPath) -> str:
    """Return `("a", "b", 0, "c")` as `a.b[0].c`; keys that are not plain words are quoted. The empty path is `ROOT`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if _PLAIN_KEY.fullmatch(part) else ascii(part)
            text += f".{word}" if text else word
    return text or ROOT


def show(value: object) -> str:
    """Return a value for a message: its type and its text, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, dict):
        return f"a mapping with {len(value)} key(s)"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    kind = {str: "the string ", int: "the integer ", float: "the number "}.get(type(value), "")
    # Python refuses to print an integer with thousands of digits.
    is_huge = isinstance(value, int) and value.bit_length() >= 256
    # Secrets are masked before the text is cut, because half a secret would not be recognized.
    text = f"of {cast(int, value).bit_length()} bits" if is_huge else masked(repr(value))
    return kind + (text if len(text) <= MAX_FOUND_CHARS else text[: MAX_FOUND_CHARS - 3] + "...")


class Section(BaseModel):
    """One section of a configuration, frozen. Unknown keys are refused. No value is converted, except an integer to a
    number. NaN is not accepted as a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    _secrets: dict[str, str] = PrivateAttr(default_factory=dict)


class Hidden(str):
    """A text of the configuration as it was written: `${NAME}` instead of a secret."""


def hide(config: BaseModel, secrets: Mapping[str, str]) -> None:
    """Make `shown` write `${NAME}` in place of each secret text, as the user's file does. `secrets` maps text to
    `${NAME}`."""
    if isinstance(config, Section):
        config._secrets.update(secrets)


def shown(config: Section) -> dict[str, Any]:
    """Return all values as JSON types, without secrets."""
    values: dict[str, Any] = without_secrets(config.model_dump(mode="json"), config._secrets)
    return values


def without_secrets(value: object, secrets: Mapping[str, str]) -> Any:
    """Return the value with each text that is a key of `secrets` replaced by the text in the file (with `${NAME}`), and
    with secrets masked in all other texts."""
    if isinstance(value, dict):
        return {name: without_secrets(one, secrets) for name, one in value.items()}
    if isinstance(value, list):
        return [without_secrets(one, secrets) for one in value]
    if not isinstance(value, str):
        return value
    if value in secrets:
        return Hidden(secrets[value])
    return value if masked(value) == value else Hidden(as_written(value))


def key(meaning: str, default: object = ..., *, unit: str = "", req: str = "", **bounds: Any) -> Any:
    """Return a pydantic field. `meaning`, `unit` and `req` (requirement ids) go to CONFIG.md and the JSON Schema.

    A key without a default is required. `bounds` are pydantic's: `ge`, `gt`, `le`, `lt`, `min_length`, `pattern`.
    """
    extra: JsonDict = {name: text for name, text in (("unit", unit), ("requirement", req)) if text}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def given(section: Section, name: str) -> str:
    """Return a key's number as text for a message, marked as the default if the user did not write it."""
    number = getattr(section, name)
    value = f"{number:g}" if isinstance(number, float) else str(number)
    return value if name in section.model_fields_set else f"the default {value}"


_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    type(None): "null",
}


# ---- types ---------------------------------------------------------------------------------------------------------


def describe(annotation: object, metadata: tuple[object, ...] = ()) -> str:
    """Return a type with its bounds in words: `an integer >= 1 or null`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [part for arg in args[1:] for part in (arg.metadata if isinstance(arg, FieldInfo) else [arg])]
        return describe(args[0], (*metadata, *inner))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg, metadata) for arg in args))
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin in (list, tuple):
        return f"a list{_bounds(metadata, 'length')} of ({describe(args[0])})"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    word = _WORDS.get(annotation, "a mapping" if origin is dict or annotation is dict else "a value")
    if annotation is str:
        patterns = [found for item in metadata if (found := getattr(item, "pattern", None))]
        return word + _bounds(metadata, "length") + "".join(f" matching {pattern}" for pattern in patterns)
    return word + (_bounds(metadata, "value") if annotation in (int, float) else "")


def describe_field(field: FieldInfo) -> str:
    return describe(field.annotation, tuple(field.metadata))


def _bounds(metadata: tuple[object, ...], what: Literal["value", "length"]) -> str:
    names = ("ge", "gt", "le", "lt") if what == "value" else ("min_length", "", "max_length", "")
    said = {name: getattr(item, name) for item in metadata for name in names if name and hasattr(item, name)}
    low = said.get(names[0], said.get(names[1]))
    high = said.get(names[2], said.get(names[3]))
    if low is None and high is None:
        return ""
    prefix = " with length" if what == "length" else ""
    if high is None:
        return f"{prefix} {'>=' if names[0] in said else '>'} {low:g}"
    if low is None:
        return f"{prefix} {'<=' if names[2] in said else '<'} {high:g}"
    return f"{prefix} in {'[' if names[0] in said else '('}{low:g}, {high:g}{']' if names[2] in said else ')'}"


# ---- keys ----------------------------------------------------------------------------------------------------------


def _alternatives(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _alternatives(arg)
    else:
        yield annotation


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the model of a field whose type is a section, or None."""
    options = _alternatives(annotation)
    return next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)


def item_of(annotation: object) -> object:
    """Return the type of the items if `annotation` is a list, or None."""
    return next((get_args(one)[0] for one in _alternatives(annotation) if get_origin(one) in (list, tuple)), None)


def mapping_of(annotation: object) -> tuple[object, object]:
    """Return the types of keys and values if `annotation` is a mapping whose keys the user chooses, or (None, None)."""
    return next((get_args(one) for one in _alternatives(annotation) if get_origin(one) is dict), (None, None))


def walk_keys(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yield every key with its path; a section comes before its keys. The items of a list of sections have index 0."""
    for name, field in model.model_fields.items():
        here = (*path, name)
        yield here, field
        if section := section_of(field.annotation):
            yield from walk_keys(section, here)
        elif section := section_of(item_of(field.annotation)):
            yield from walk_keys(section, (*here, 0))


def _type_at(model: type[BaseModel], path: KeyPath) -> object:
    """Return the type of the value or list item at `path`, with its bounds; None if the schema has no such path."""
    annotation: object = model
    for part in path:
        field = section.model_fields.get(str(part)) if (section := section_of(annotation)) else None
        if field is not None:
            annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        elif isinstance(part, int):
            annotation = item_of(annotation)
        else:
            annotation = mapping_of(annotation)[1]
    return annotation


def _wanted_at(model: type[BaseModel], path: KeyPath) -> str:
    wanted = _type_at(model, path)
    if wanted is not None:
        return describe(wanted)
    return "a valid item" if path and isinstance(path[-1], int) else "a mapping"


# ---- errors --------------------------------------------------------------------------------------------------------


def mistake_of(
    model: type[BaseModel], values: Mapping[str, object], detail: ErrorDetails
) -> tuple[KeyPath, Mistake, tuple[KeyPath, ...]]:
    """Return one error of pydantic as (path, mistake, every path whose value cannot be trusted)."""
    kind = detail["type"]
    path = _real_path(detail["loc"], values, keep_last=kind == "missing")
    name = dotted(path)
    if kind == "extra_forbidden":
        mistake, meant = _unknown(model, path)
        return path, mistake, (path, *meant)
    if kind == "missing":
        key = _first_to_write(model, path)
        wanted = _wanted_at(model, key)
        return key, Mistake(path=dotted(key), found="nothing", wanted=wanted, remedy="add this key"), (path, key)
    wanted = _wanted_at(model, path)
    if detail["loc"][-1] == "[key]" and (of_key := mapping_of(_type_at(model, path[:-1]))[0]) is not None:
        wanted = describe(of_key)
    found, remedy = show(detail["input"]), _remedy(detail["input"], wanted, detail, _type_at(model, path))
    # A validator of the model raised this error, and its text says what is wanted.
    if kind in ("value_error", "assertion_error"):
        wanted = str(detail["ctx"]["error"])
    return path, Mistake(path=name, found=found, wanted=wanted, remedy=remedy), (path,)


def _first_to_write(model: type[BaseModel], path: KeyPath) -> KeyPath:
    """Return the key that the user has to write: a missing section's only required key, otherwise `path` itself."""
    section = section_of(_type_at(model, path))
    required = [name for name, field in section.model_fields.items() if field.is_required()] if section else []
    return _first_to_write(model, (*path, required[0])) if len(required) == 1 else path


def _real_path(loc: tuple[str | int, ...], values: object, *, keep_last: bool) -> KeyPath:
    """Return pydantic's location `loc` without the names of union members, which are not keys. `keep_last`: the last
    part stays although `values` lacks it, because it names a missing key."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        inner = values if isinstance(values, dict) else dict(enumerate(values)) if isinstance(values, list) else {}
        if part in inner:
            values = inner[part]
        elif not (keep_last and index == len(loc) - 1):
            continue
        path.append(part)
    return tuple(path)


# Names of keys in YOLO's trainers, and our keys that mean the same.
OTHER_WORDS: Mapping[str, str] = {
    "epochs": "training.num_train_epochs",
    "imgsz": "model.max_pixels",
    "batch": "training.effective_batch_size",
    "batch_size": "training.effective_batch_size",
    "lr0": "training.learning_rate",
    "lr": "training.learning_rate",
    "weights": "model.path",
    "project": "training.output_dir",
    "freeze": "model.freeze",
    "patience": "training.early_stop_patience",
    "workers": "data.num_workers",
}


def _unknown(model: type[BaseModel], path: KeyPath) -> tuple[Mistake, list[KeyPath]]:
    section, key = section_of(_type_at(model, path[:-1])), str(path[-1])
    known = list(section.model_fields) if section else []
    near = [(*path[:-1], name) for name in difflib.get_close_matches(key, known, n=1)]
    word = [other for other, _ in walk_keys(model) if dotted(other) == OTHER_WORDS.get(key)]
    meant = word or near or [other for other, _ in walk_keys(model) if other[-1] == key][:3]
    remedy = (
        f"did you mean {' or '.join(dotted(p) for p in meant)}?" if meant else "remove it (CONFIG.md lists every key)"
    )
    holder = f"a key of {dotted(path[:-1])}" if path[:-1] else "a top-level key"
    wanted = f"one of {', '.join(known)}" if len(known) <= 12 else holder
    return Mistake(path=dotted(path), found="an unknown key", wanted=wanted, remedy=remedy), meant


def _remedy(value: object, wanted: str, detail: ErrorDetails, annotation: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "write a finite number"
    if isinstance(value, float) and "an integer" in wanted:
        return f"write {int(value)}" if value == int(value) else f"write {math.floor(value)} or {math.ceil(value)}"
    if "true or false" in wanted:
        is_quoted = isinstance(value, str) and value.lower() in ("true", "false")
        return "write true or false, without quotes" if is_quoted else "write true or false"
    takes_text = any(option.startswith(("a string", "a path")) for option in wanted.split(" or "))
    if isinstance(value, str) and not takes_text and detail["type"] not in ("literal_error", "value_error"):
        if _is_right_without_quotes(value, annotation):
            return "write it without quotes (an environment variable can only fill a string)"
        return f"write {wanted}"
    if isinstance(value, str) and detail["type"] == "literal_error":
        options = wanted.split(" or ")
        near = difflib.get_close_matches(value.lower(), options, n=1)
        return f"did you mean {near[0]}?" if near else "choose one of these"
    if isinstance(value, int | float) and not isinstance(value, bool) and "a string" in wanted:
        return "put it in quotes"
    return "change the value"


def _is_right_without_quotes(text: str, annotation: Any) -> bool:
    """Return True if YAML would read the text as a value of this type. YAML 1.1 reads 1e-5 as a string, but our reader
    reads it as a number. So a text that can be converted to a number counts too."""
    try:
        value = yaml_of(text)
        TypeAdapter(annotation).validate_python(value, strict=not isinstance(value, str))
    except (ValueError, PydanticUserError):
        return False
    return True
