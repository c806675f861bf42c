"""Configuration files of both programs: YAML in, a frozen pydantic model out, or every mistake at once.

    document = load_yaml("run.yaml")                       # a dict that knows the line of each key
    document = load_yaml("run.yaml", overrides=["a.b=1"])  # values of the command line win
    config = parse(RunConfig, document)                    # raises ConfigErrors
    print(dump_yaml(config.model_dump(mode="json")))       # reads back as the same configuration

`parse` finds as much as possible in one pass: mistakes of the YAML, retired keys, unknown and ill-typed keys, then
mistakes between keys. A rule is `rule(config) -> iterable of Mistake`. This module imports nothing heavier than
pydantic.
"""

from __future__ import annotations

import copy
import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.config.model import (
    ROOT,
    ConfigErrors,
    Hidden,
    KeyPath,
    Mistake,
    dotted,
    hide,
    item_of,
    mistake_of,
    section_of,
)
from shared.config.yaml import Parsed, add_numbers, read_alone, read_composed

__all__ = ["ConfigErrors", "Document", "Mistake", "dump_yaml", "load_alone", "load_yaml", "parse", "write_yaml"]

Model = TypeVar("Model", bound=BaseModel)
Retired = Mapping[str, tuple[str, str]]  # dotted path of a retired key -> (what is wanted, what to do)


class Document(dict[str, object]):
    """The values of a configuration and their lines. Keeps the mistakes found while reading the YAML, for `parse`."""

    def __init__(self, parsed: Parsed, source: str) -> None:
        assert isinstance(parsed.value, dict), "only a mapping is read"
        super().__init__(parsed.value)
        self.lines = parsed.lines
        self.mistakes = tuple(parsed.mistakes)
        self.bad = frozenset(parsed.bad)
        self.secrets = dict(parsed.secrets)
        self.source = source


def load_yaml(path: str | Path, env: Mapping[str, str] = os.environ, overrides: Sequence[str] = ()) -> Document:
    """Return the file with its bases, variables filled in, and `path.to.key=VALUE` overrides applied.

    Raises ConfigErrors if the file is not a YAML mapping at all.
    """
    return Document(read_composed(Path(path), env, overrides), str(path))


def load_alone(path: Path) -> Document:
    """Return a file that no user named, such as one in a model's folder. The file's bases are not read and its `${VAR}`
    are not filled in (D24). Raises ConfigErrors."""
    return Document(read_alone(path), str(path))


def parse(
    model: type[Model],
    data: Mapping[str, object],
    source: str | Path = "",
    *,
    retired: Retired | None = None,
    rules: Iterable[Callable[[Model], Iterable[Mistake]]] = (),
) -> Model:
    """Return `data` as a `model`. Raises ConfigErrors with every mistake.

    A `retired` key is refused with its own advice. `rules` check keys against each other. Rules get a valid
    configuration, or a view of an invalid one that refuses to show wrong values.
    """
    document = data if isinstance(data, Document) else Document(Parsed(value=dict(data)), str(source))
    values, mistakes = _without_retired(document, retired or {})
    bad: set[KeyPath] = set(document.bad)
    config: Model | None = None
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        found = [mistake_of(model, values, detail) for detail in error.errors(include_url=False)]
        mistakes += _one_each([(path, m) for path, m, _ in found if not _inside(path, document.bad)])
        bad.update(path for _, _, paths in found for path in paths)
    view = config if config is not None and not bad else cast(Model, _RawValues(model, values, (), bad))
    # A rule stops when it reads a wrong value, so no mistake is listed twice.
    for rule in rules:
        mistakes += _follow(rule, view)
    if config is None or mistakes:
        placed = [_without_secrets(_placed(mistake, document.lines), document.secrets) for mistake in mistakes]
        raise ConfigErrors(f"{document.source or 'the configuration'} is wrong", mistakes=placed)
    hide(config, document.secrets)
    return config


def _follow(rule: Callable[[Model], Iterable[Mistake]], view: Model) -> list[Mistake]:
    mistakes: list[Mistake] = []
    with suppress(UntrustedValueError):
        # `extend` keeps the mistakes that the rule yields before it reads a wrong value.
        mistakes.extend(rule(view))
    return mistakes


def _without_retired(document: Document, retired: Retired) -> tuple[dict[str, object], list[Mistake]]:
    """Return the values without retired keys and sections that held only such keys, and all mistakes so far."""
    values: dict[str, object] = copy.deepcopy(dict(document))
    mistakes = list(document.mistakes)
    for path, (wanted, remedy) in retired.items():
        if _remove(values, path.split(".")):
            mistakes.append(Mistake(path=path, found="a retired key", wanted=wanted, remedy=remedy))
    return values, mistakes


def _remove(values: dict[str, object], keys: list[str]) -> bool:
    head, *rest = keys
    if head not in values:
        return False
    below = values[head]
    if rest and not (isinstance(below, dict) and _remove(below, rest)):
        return False
    if not rest or not below:
        del values[head]
    return True


def _inside(path: KeyPath, bad: Iterable[KeyPath]) -> bool:
    return any(path[: len(root)] == root for root in bad if root)


def _one_each(found: list[tuple[KeyPath, Mistake]]) -> list[Mistake]:
    """Return one mistake per key, and none for a section if a key inside it has one."""
    # pydantic reports a mistake for every member of a union, and only the first of these is kept.
    first = dict(reversed(found))
    sections = {path[:depth] for path in first for depth in range(len(path))}
    return [mistake for path, mistake in reversed(first.items()) if path not in sections]


def _placed(mistake: Mistake, lines: Mapping[str, str]) -> Mistake:
    """Return the mistake with the line of its key, or of the nearest section around the key if the key is not in the
    file."""
    return mistake if mistake.at else replace(mistake, at=_line_of(mistake.path, lines))


def _without_secrets(mistake: Mistake, secrets: Mapping[str, str]) -> Mistake:
    found = mistake.found
    for text, written in secrets.items():
        found = found.replace(text, written) if text else found
    return replace(mistake, found=found)


def _line_of(path: str, lines: Mapping[str, str]) -> str:
    # If the command line sets keys of a section that the file lacks, the section itself has no line.
    if path not in lines:
        below = next((at for key, at in lines.items() if key.startswith((f"{path}.", f"{path}["))), None)
        if path and below is not None:
            return below
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return lines.get(path or ROOT, "")


# ---- partly-wrong --------------------------------------------------------------------------------------------------


# Adapters are kept, because making them again took half of the time of reading a configuration with mistakes.
@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[object]:
    return TypeAdapter(annotation)


class UntrustedValueError(Exception):
    """A rule has read a value that is itself wrong."""


class _RawValues:
    """Raw values that can be read like a model. Reading a value at a `bad` path raises UntrustedValueError."""

    def __init__(self, model: type[BaseModel], values: Mapping[str, object], path: KeyPath, bad: set[KeyPath]) -> None:
        self._model, self._values, self._path, self._bad = model, values, path, bad

    @property
    def model_fields_set(self) -> set[str]:
        return set(self._values) & set(self._model.model_fields)

    def __getattr__(self, name: str) -> object:
        here = (*self._path, name)
        if here in self._bad or () in self._bad:
            raise UntrustedValueError(dotted(here))
        field = self._model.model_fields.get(name)
        if field is None:
            return self._from_class(name)
        if name not in self._values:
            return field.get_default(call_default_factory=True)
        return self._shown(self._values[name], field.annotation, here)

    def _from_class(self, name: str) -> object:
        attribute = getattr(self._model, name)
        if isinstance(attribute, property):
            return cast(Callable[[object], object], attribute.fget)(self)
        return types.MethodType(attribute, self) if isinstance(attribute, types.FunctionType) else attribute

    def _shown(self, value: object, annotation: object, path: KeyPath) -> object:
        if path in self._bad:
            raise UntrustedValueError(dotted(path))
        section, item = section_of(annotation), item_of(annotation)
        if section is not None and isinstance(value, dict):
            return _RawValues(section, value, path, self._bad)
        if isinstance(value, list) and section_of(item) is not None:
            return [self._shown(entry, item, (*path, index)) for index, entry in enumerate(value)]
        if any(bad[: len(path)] == path for bad in self._bad):
            raise UntrustedValueError(dotted(path))
        return _adapter(annotation).validate_python(value)


# ---- writing -------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or our own reader would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        return True


add_numbers(_Dumper)


def dump_yaml(values: Mapping[str, object]) -> str:
    """Return YAML that `load_yaml` reads back as `values`: plain mappings, lists, strings, numbers, booleans, nulls."""
    escaped = _escape(values)
    return yaml.dump(escaped, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _escape(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    if isinstance(value, Hidden):
        return str(value)
    return value.replace("${", "$${") if isinstance(value, str) else value


def write_yaml(path: Path, values: Mapping[str, object], header: str = "") -> None:
    """Write `values` to `path`, below `header` as comment lines. Raises OSError."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    path.write_text(comment + dump_yaml(values), encoding="utf-8")
