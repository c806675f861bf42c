"""Helpers for the checks of all programs (such as `--check`): collect mistakes, and make the last line that a check
prints."""

from __future__ import annotations

from collections.abc import Callable

from shared.config.model import ConfigErrors, Mistake
from shared.errors import ProjectError

READY = "ready"


def mistakes_of(check: Callable[[], object], key: str = "") -> list[Mistake]:
    """Return the mistakes that `check` raises; [] if it raises none. Any other error of the project becomes a mistake
    of `key`; without `key` it is raised."""
    try:
        check()
    except ConfigErrors as errors:
        return list(errors.mistakes)
    except ProjectError as error:
        if not key:
            raise
        return [Mistake.of(error, key)]
    return []


def verdict(num_wrong: int, num_warnings: int) -> str:
    """Return the last line that a check prints: `ready`, `ready, with 2 warnings`, `not ready: 2 things are wrong`."""
    if num_wrong:
        return f"not ready: {num_wrong} thing{'s are' if num_wrong > 1 else ' is'} wrong"
    return f"{READY}, with {num_warnings} warning{'s' if num_warnings > 1 else ''}" if num_warnings else READY
