"""One configuration out of several files: `base:` and `${VAR}`.

`base: other.yaml` (or a list) names files relative to the file that says so; they are read first, later ones win,
mappings merge key by key, everything else is replaced. `${VAR}` inside a string value becomes the environment
variable's text and stays a string; `$${` is a literal `${`. Called by `config_io.load_yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config_errors import ConfigErrors, KeyPath, Mistake, dotted, show
from shared.config_yaml import Parsed, parse_text

BASE_KEY = "base"
MAX_FILES = 50

_DOLLAR = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_composed(path: Path, env: Mapping[str, str]) -> Parsed:
    """`path` merged over its bases, variables filled in. Raises ConfigErrors where a file can't be read at all."""
    reader = _Reader(env)
    merged = reader.read(path, ())
    merged.value = reader.fill(merged.value, (), merged)  # last, so that a value which was replaced needs no variable
    return merged


class _Reader:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.num_files = 0

    def read(self, path: Path, chain: tuple[Path, ...]) -> Parsed:
        """One file over its bases; `chain` holds the files that led here."""
        self.num_files += 1
        if path.resolve() in chain or self.num_files > MAX_FILES:
            names = " -> ".join(p.name for p in (*chain[-3:], path))
            raise _fatal(
                path, f"files that include each other ({names})", "bases without a cycle", "remove one `base:`"
            )
        parsed = parse_text(_read_bytes(path), str(path))
        if not isinstance(parsed.value, dict):
            found = "nothing" if parsed.value is None else show(parsed.value)
            mistakes = [
                *parsed.mistakes,
                *_fatal(path, found, "a mapping of sections", "write `section:` lines").mistakes,
            ]
            raise ConfigErrors(mistakes=mistakes)
        merged = Parsed(value={})
        for base in self._bases(path, parsed):
            _overlay(merged, self.read(path.parent / base, (*chain, path.resolve())))
        _overlay(merged, parsed)
        return merged

    def _bases(self, path: Path, parsed: Parsed) -> list[str]:
        """Takes `base` out of the file's values."""
        said = self.fill(parsed.value.pop(BASE_KEY, None), (BASE_KEY,), parsed)
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

    def fill(self, value: Any, path: KeyPath, parsed: Parsed) -> Any:
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

        return _DOLLAR.sub(one, text)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = f"check the path (the working directory is {Path.cwd()})"
        raise _fatal(path, f"no readable file ({reason})", "a YAML file", remedy) from error


def _fatal(path: Path, found: str, wanted: str, remedy: str) -> ConfigErrors:
    return ConfigErrors(mistakes=[Mistake(path=str(path), found=found, wanted=wanted, remedy=remedy)])


def _overlay(below: Parsed, above: Parsed) -> None:
    """Lay `above` over `below`, in place; mistakes of both count, even where a value is replaced."""
    below.value = _merge(below.value, above.value)
    below.lines |= above.lines
    below.mistakes += above.mistakes
    below.bad |= above.bad


def _merge(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merge(below.get(key), item) for key, item in above.items()}
    return above
