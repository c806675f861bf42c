"""Finds out from a configuration file's top-level keys which program the file is for. In a file for another program
every key is unknown. So one message about the file replaces a long list of unknown keys.
"""

from __future__ import annotations

from typing import Literal

from shared.config.model import ConfigErrors, Mistake
from shared.config.parse import Document

Kind = Literal["server", "learner", "launcher"]
COMMANDS: dict[Kind, str] = {
    "server": "rollout-server",
    "learner": "rollout-learner train",
    "launcher": "rollout-launch",
}
_KEYS: dict[Kind, tuple[str, ...]] = {
    "learner": ("data", "training", "custom"),
    "launcher": ("servers", "learner", "log_dir"),
}
_LEAST = 2  # min number of a program's top-level keys in a file for that program; a single key may be misplaced


def for_program(document: Document, wanted: Kind) -> Document:
    """Return `document`. Raises ConfigErrors with one mistake if it is the configuration of another program."""
    kind, keys = _kind_of(document)
    if kind is None or kind == wanted:
        return document
    mistake = Mistake(
        path=document.source,
        found=f"the configuration of a {kind} ({', '.join(keys)})",
        wanted=f"the configuration of a {wanted}",
        remedy=f"name the {wanted}'s file, or give this one to its own program: "
        f"{COMMANDS[kind]} --config {document.source}",
    )
    raise ConfigErrors(f"{document.source} is for another program", mistakes=[mistake])


def _kind_of(document: Document) -> tuple[Kind | None, list[str]]:
    """Return the program that the file is for, and the keys that show it; None and [] if no keys show it."""
    for kind, names in _KEYS.items():
        keys = [name for name in names if name in document]
        if len(keys) >= _LEAST:
            return kind, keys
    if isinstance(document.get("model"), str) and not any(document.keys() & set(names) for names in _KEYS.values()):
        return "server", ["model is a string"]
    return None, []
