"""Reads one configuration from YAML files, with the line of every key: bytes in, `(value, lines, mistakes)` out.

PyYAML reads the text. Types follow YAML 1.2's core schema, with forms that people use: `1e-4` is a number, `true`
and `false` are the only booleans (`yes`, `on` and `no` are strings), `010` is ten, dates are strings. The reader
refuses, with their line: duplicate keys, keys that are not strings, tags, merge keys, several documents, and values
nested deeper or with more items than a configuration needs (this also stops recursive aliases and alias bombs). Only
`ConfigErrors` are raised.

`base: other.yaml` (or a list) names files relative to the file that contains the key. Bases are read first. Later files
win: mappings merge key by key, other values are replaced. `${VAR}` inside a string value becomes the environment
variable's text and stays a string; `$${` is a literal `${`.

An override is `path.to.key=VALUE` from the command line, VALUE in YAML. An override is applied over the file: a mapping
is merged, other values are replaced. In messages an override's location is `COMMAND_LINE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, overload

import yaml
from yaml.resolver import BaseResolver

from shared.config.model import ConfigErrors, KeyPath, Mistake, dotted, show
from shared.masking import is_secret, remember
from shared.reading import bytes_beside

V = TypeVar("V")
MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_VALUES = 20_000

INT = re.compile(r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$")
FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
NUMBER_START = list("-+.0123456789")

_Resolver = TypeVar("_Resolver", bound=BaseResolver)


class _Composer(yaml.BaseLoader):
    """PyYAML's parser up to the node tree, with this module's rules for scalars: `BaseLoader` has no such rules."""


def add_numbers(resolver: type[_Resolver]) -> None:
    """Tell a PyYAML resolver which plain scalars are numbers. Loader and dumper must agree."""
    resolver.add_implicit_resolver("tag:yaml.org,2002:int", INT, NUMBER_START)
    resolver.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, NUMBER_START)


add_numbers(_Composer)
_Composer.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Composer.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _number(text: str) -> float:
    word = text.lower().replace("_", "")
    return float(word.replace(".inf", "inf").replace(".nan", "nan"))


def _integer(text: str) -> int:
    word = text.lower().replace("_", "")
    base = 16 if "0x" in word else 8 if "0o" in word else 10
    return int(word, base)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_SCALARS: dict[str, Callable[[str], object]] = {
    "tag:yaml.org,2002:str": str,
    "tag:yaml.org,2002:int": _integer,
    "tag:yaml.org,2002:float": _number,
    "tag:yaml.org,2002:bool": _boolean,
    "tag:yaml.org,2002:null": lambda text: None,
}
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass
class Parsed:
    """The content of one file. `lines` maps dotted paths to `file:line`; values at `bad` paths cannot be trusted.
    `secrets` maps each text that holds a secret variable's value to the text in the file, which holds `${NAME}`."""

    value: object = None
    lines: dict[str, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    bad: set[KeyPath] = field(default_factory=set)
    secrets: dict[str, str] = field(default_factory=dict)


def parse_text(raw: bytes, file: str) -> Parsed:
    """Return the values of one YAML document. Raises ConfigErrors if the document cannot be read at all."""
    builder = _Builder(file)
    node = _compose(raw, file)
    if node is not None:
        builder.parsed.value = builder.build(node, ())
    return builder.parsed


def _compose(raw: bytes, file: str) -> yaml.Node | None:
    if len(raw) > MAX_BYTES:
        raise ConfigErrors.one(
            file,
            f"more than {MAX_BYTES} bytes",
            f"at most {MAX_BYTES} bytes",
            "check that this is the configuration file",
        )
    try:
        # `utf-8-sig` drops a byte order mark, which some editors write.
        return _Composer(raw.decode("utf-8-sig")).get_single_node()
    except UnicodeDecodeError as error:
        raise ConfigErrors.one(
            file, f"a byte that is not UTF-8 at offset {error.start}", "UTF-8 text", "save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise ConfigErrors.one(file, "endless nesting", f"at most {MAX_DEPTH} levels", "close the brackets") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        remedy = "indent with spaces" if "\\t" in str(error.problem) else "fix the line, or quote the text"
        raise ConfigErrors.one(place, f"{error.problem or error.context}", "YAML", remedy) from error
    except yaml.YAMLError as error:
        raise ConfigErrors.one(
            file, str(error).splitlines()[0], "YAML text", "remove the special characters"
        ) from error
    except (ValueError, OverflowError) as error:  # the text has escapes beyond Unicode, such as "\Uffffffff"
        raise ConfigErrors.one(file, str(error), "YAML text", "fix the escape sequence") from error


class _Builder:
    """Builds the values of a node tree. Refuses more than MAX_VALUES values, with aliases expanded."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parsed = Parsed()
        self.num_values = 0

    def build(self, node: yaml.Node, path: KeyPath) -> object:
        self.num_values += 1
        # Values are counted with aliases expanded, because a few lines of aliases can stand for millions of values.
        if self.num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            wanted = f"at most {MAX_VALUES} values and {MAX_DEPTH} levels"
            found = "more than a configuration can hold, aliases expanded"
            raise ConfigErrors.one(self._place(node), found, wanted, "remove the aliases or the nesting")
        self.parsed.lines[dotted(path)] = self._place(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in _COLLECTIONS:
            self._refuse(node, path, f"the tag {node.tag!r}", "plain YAML", "remove the tag")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._mapping(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        construct = _SCALARS.get(node.tag)
        if construct is None:
            self._refuse(node, path, f"the tag {node.tag!r}", "plain YAML", "remove the tag")
            return None
        try:
            return construct(node.value)
        except ValueError:
            kind = node.tag.rpartition(":")[2]
            self._refuse(node, path, "text that does not fit its tag", f"a YAML {kind}", "fix the value")
            return None

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                text = str(key_node.value)[:40] if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self._refuse(key_node, path, f"the key {text!a}, which is not a string", "string keys", "quote the key")
                continue
            key, here = key_node.value, (*path, key_node.value)
            if key == "<<":
                self._refuse(key_node, here, "a merge key", "keys of this section", "compose files with `base:`")
            elif key in values:
                first = self.parsed.lines[dotted(here)].rpartition(":")[2]
                self._refuse(key_node, here, f"the key twice, first in line {first}", "each key once", "remove one")
            else:
                values[key] = self.build(value_node, here)
                self.parsed.lines[dotted(here)] = self._place(key_node)
        return values

    def _refuse(self, node: yaml.Node, path: KeyPath, found: str, wanted: str, remedy: str) -> None:
        mistake = Mistake(path=dotted(path), found=found, wanted=wanted, remedy=remedy, at=self._place(node))
        self.parsed.mistakes.append(mistake)
        self.parsed.bad.add(path)

    def _place(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"


BASE_KEY = "base"
MAX_FILES = 50

_DOLLAR = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_composed(path: Path, env: Mapping[str, str], overrides: Sequence[str] = ()) -> Parsed:
    """Return `path` merged over its bases, with overrides applied and variables filled in. Raises ConfigErrors if a
    file cannot be read at all."""
    reader = _Reader(env)
    merged = reader.read(path, ())
    for override in overrides:
        _override(merged, override)
    # Variables are filled in last, because replaced values need no variables.
    merged.value = reader.fill(merged.value, (), merged)
    return merged


def read_alone(path: Path) -> Parsed:
    """Return the values of a file that no user named. The file's bases are not read and its `${VAR}` are not filled in,
    because whoever wrote the file must not get other files or variables (D24). Raises ConfigErrors if the file cannot
    be read."""
    try:
        raw = bytes_beside(path)
    except OSError as error:
        raise ConfigErrors.one(
            str(path), str(error), "a YAML file of that folder", "name the file that is meant: --config"
        ) from error
    parsed = parse_text(raw, str(path))
    if not isinstance(parsed.value, dict):
        raise ConfigErrors.one(str(path), show(parsed.value), "a mapping of sections", "name another file: --config")
    parsed.value = _unescaped(parsed.value)
    return parsed


def _unescaped(value: object) -> object:
    if isinstance(value, dict):
        return {key: _unescaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    return value.replace("$${", "${") if isinstance(value, str) else value


class _Reader:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.num_files = 0

    def read(self, path: Path, chain: tuple[Path, ...]) -> Parsed:
        """Return one file merged over its bases. `chain` has the files that include it."""
        self.num_files += 1
        if path.resolve() in chain or self.num_files > MAX_FILES:
            names = " -> ".join(p.name for p in (*chain[-3:], path))
            raise ConfigErrors.one(
                str(path), f"files that include each other ({names})", "bases without a cycle", "remove one `base:`"
            )
        parsed = parse_text(_read_bytes(path, is_base=bool(chain)), str(path))
        if not isinstance(parsed.value, dict):
            found = "nothing" if parsed.value is None else show(parsed.value)
            mistakes = [
                *parsed.mistakes,
                *ConfigErrors.one(str(path), found, "a mapping of sections", "write `section:` lines").mistakes,
            ]
            raise ConfigErrors(mistakes=mistakes)
        merged = Parsed(value={})
        for base in self._bases(path, parsed.value, parsed):
            _overlay(merged, self.read(path.parent / base, (*chain, path.resolve())))
        _overlay(merged, parsed)
        return merged

    def _bases(self, path: Path, values: dict[str, object], parsed: Parsed) -> list[str]:
        """Remove `base` from the file's `values`, and return its paths."""
        said = self.fill(values.pop(BASE_KEY, None), (BASE_KEY,), parsed)
        bases = [said] if isinstance(said, str) else said
        if said is None:
            return []
        if not isinstance(bases, list) or not all(
            isinstance(base, str) and base and "\0" not in base for base in bases
        ):
            at = parsed.lines.get(BASE_KEY, str(path))
            wanted, remedy = "a path or a list of paths", "name the files that this one builds on"
            parsed.mistakes.append(Mistake(path=BASE_KEY, found=show(said), wanted=wanted, remedy=remedy, at=at))
            return []
        return bases

    def fill(self, value: object, path: KeyPath, parsed: Parsed) -> object:
        if isinstance(value, dict):
            return {key: self.fill(item, (*path, key), parsed) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item, (*path, index), parsed) for index, item in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            return self._fill_string(value, path, parsed)
        return value

    def _fill_string(self, text: str, path: KeyPath, parsed: Parsed) -> str:
        def one(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, closed = match[1], match[2]
            if not closed or not _NAME.fullmatch(name):
                found, wanted = show(match[0]), "${VAR} with a plain name"
                remedy = "name one environment variable, or write $${ for a literal ${"
            elif name not in self.env:
                found, wanted = f"${{{name}}}, which is not set", f"the environment variable {name}"
                remedy = f"export {name}=..., or write the value into the file"
            else:
                return self.env[name]
            where = dotted(path)
            at = parsed.lines[where]
            parsed.mistakes.append(Mistake(path=where, found=found, wanted=wanted, remedy=remedy, at=at))
            parsed.bad.add(path)
            return match[0]

        filled = _DOLLAR.sub(one, text)
        # Group 1 is None for an escaped `$${`.
        names = [match[1] for match in _DOLLAR.finditer(text) if match[1]]
        secret = [name for name in names if name in self.env and is_secret(name)]
        for name in secret:
            remember(name, self.env[name])
        if secret:
            parsed.secrets[filled] = text
        return filled


def _read_bytes(path: Path, *, is_base: bool) -> bytes:
    """Return a file's bytes, at most one more than a configuration may have. The file that the user names may be a pipe
    (`<(...)`). A base may not: reading a pipe could wait forever."""
    try:
        if is_base and path.exists() and not path.is_file():
            raise ConfigErrors.one(str(path), "no regular file", "a YAML file", "name a file")
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = f"check the path (the working directory is {Path.cwd()})"
        raise ConfigErrors.one(str(path), f"no readable file ({reason})", "a YAML file", remedy) from error


def _overlay(below: Parsed, above: Parsed) -> None:
    """Merge `above` into `below`, in place. Mistakes of both count, even if the value was replaced."""
    below.value = merge(below.value, above.value)
    below.lines |= above.lines
    below.mistakes += above.mistakes
    below.bad |= above.bad


@overload
def merge(below: dict[str, V], above: dict[str, V]) -> dict[str, V]: ...


@overload
def merge(below: object, above: object) -> object: ...


def merge(below: object, above: object) -> object:
    """Return `below` with `above` merged in. Mappings are merged key by key; any other value of `above` replaces the
    value in `below`."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: merge(below.get(key), item) for key, item in above.items()}
    return above


# ---- overrides -----------------------------------------------------------------------------------------------------

COMMAND_LINE = "command line"
_KEY_PATH = re.compile(r"[\w-]+(?:\.[\w-]+|\[[0-9]{1,4}\])*", re.ASCII)
_KEY_PART = re.compile(r"[\w-]+|\[[0-9]+\]", re.ASCII)


class _ValueBuilder(_Builder):
    """Builds the value of an override, whose location in messages is COMMAND_LINE."""

    def _place(self, node: yaml.Node) -> str:
        return COMMAND_LINE


def _override(merged: Parsed, text: str) -> None:
    """Apply `path.to.key=VALUE` to `merged`, in place."""
    name, equals, value = text.partition("=")
    if not equals or not _KEY_PATH.fullmatch(name):
        wanted, remedy = "KEY=VALUE", "write it as training.learning_rate=1e-5, with the key's whole path"
        merged.mistakes.append(Mistake(path=text, found=show(text), wanted=wanted, remedy=remedy, at=COMMAND_LINE))
        return
    path = tuple(int(part[1:-1]) if part.startswith("[") else part for part in _KEY_PART.findall(name))
    builder = _ValueBuilder(COMMAND_LINE)
    builder.parsed.lines[dotted(path)] = COMMAND_LINE
    try:
        # An argument of the command line may hold bytes that are not UTF-8. `_compose` reports it.
        node = _compose(value.encode(errors="surrogateescape"), COMMAND_LINE)
        above = builder.build(node, path) if node is not None else None
    except ConfigErrors as error:
        merged.mistakes += [replace(mistake, path=name, at=COMMAND_LINE) for mistake in error.mistakes]
        merged.bad.add(path)
        return
    try:
        merged.value = _with_value(merged.value, path, above)
    except LookupError as error:
        wanted, remedy = (
            "an item of the list",
            f"use an index that exists, or set the whole list: {name.split('[')[0]}=[...]",
        )
        found = f"no item {error}"
        merged.mistakes.append(Mistake(path=name, found=found, wanted=wanted, remedy=remedy, at=COMMAND_LINE))
        return
    merged.lines |= builder.parsed.lines
    merged.mistakes += builder.parsed.mistakes
    merged.bad |= builder.parsed.bad


def _with_value(below: object, path: KeyPath, value: object) -> object:
    """Return `below` with `value` merged in at `path`, and missing sections added. Raises LookupError with the index if
    a list has no such item."""
    if not path:
        return merge(below, value)
    head, *rest = path
    if isinstance(head, str):
        section = below if isinstance(below, dict) else {}
        return section | {head: _with_value(section.get(head), tuple(rest), value)}
    if not isinstance(below, list) or head >= len(below):
        raise LookupError(head)
    return [*below[:head], _with_value(below[head], tuple(rest), value), *below[head + 1 :]]
