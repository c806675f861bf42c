"""The key `rollouts`: short names of the keys below `custom.extra.rollout_matching` that most runs set.

A short name stands for one long name (`SHORT`). Loading writes the value of the short name to the key of the long name
before anything is checked, and then empties the mapping. All other code reads the long names. If a file sets both
names, their values must be equal. A wrong value is reported by the name in the file.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel

from learner.config.modes import ROLLOUT, Rule
from learner.config.sections.servers import SERVER
from shared.config.model import Mistake, show
from shared.config.parse import Document

if TYPE_CHECKING:
    from learner.config.schema import RunConfig

KEY = "rollouts"
ShortName = Literal["servers", "mode", "backend", "max_new_tokens", "temperature", "batch_size"]
LONG = (
    f"{SERVER}.servers",
    f"{ROLLOUT}.vllm.mode",
    f"{ROLLOUT}.rollout_backend",
    f"{ROLLOUT}.decoding.max_new_tokens",
    f"{ROLLOUT}.decoding.temperature",
    f"{ROLLOUT}.decode_batch_size",
)
SHORT: Mapping[str, str] = dict(zip(get_args(ShortName), LONG, strict=True))
MEANING = f"short names of keys below `{ROLLOUT}`: " + ", ".join(
    f"`{short}` is `{long.removeprefix(ROLLOUT + '.')}`" for short, long in SHORT.items()
)


def spelled_out(values: Mapping[str, object]) -> tuple[Mapping[str, object], dict[str, str]]:
    """Return a configuration in which each short name's value is written to its long name, if the long name has no
    value. Also return the short names of the long names that were written, by long name."""
    filled, written = copy.deepcopy(values), dict[str, str]()
    for name, value in _given(values.get(KEY)).items():
        at: object = filled
        *above, last = SHORT[name].split(".")
        for part in above:
            at = at.setdefault(part, {}) if isinstance(at, dict) else None
        if isinstance(at, dict) and last not in at:
            at[last], written[SHORT[name]] = copy.deepcopy(value), f"{KEY}.{name}"
    if isinstance(filled, Document):
        for long, short in written.items():
            lines = {long + at.removeprefix(short): line for at, line in filled.lines.items() if at.startswith(short)}
            filled.lines = {**filled.lines, **lines}
    return filled, written


def by_names_in_file(mistakes: Sequence[Mistake], written: Mapping[str, str]) -> list[Mistake]:
    """Return the mistakes, with the short name in place of a long name whose value a short name wrote."""
    longs = [next((long for long in written if mistake.path.startswith(long)), "") for mistake in mistakes]
    return [
        replace(mistake, path=written.get(long, "") + mistake.path.removeprefix(long))
        for mistake, long in zip(mistakes, longs, strict=True)
    ]


def short_names_agree(config: RunConfig) -> Iterator[Mistake]:
    """A short name of `rollouts` has the value of its long name, where both are set."""
    for name, value in _given(config.rollouts).items():
        long = functools.reduce(getattr, SHORT[name].split("."), config)
        plain = [one.model_dump() if isinstance(one, BaseModel) else one for one in long] if name == "servers" else long
        if value != plain:
            found = f"{show(value)}, and {SHORT[name]} is {show(plain)}"
            yield Mistake(path=f"{KEY}.{name}", found=found, wanted="one value", remedy="remove one of the two")


def _given(names: object) -> dict[str, Any]:
    given = names if isinstance(names, Mapping) else {}
    return {name: given[name] for name in SHORT if given.get(name) is not None}


RULES: tuple[Rule, ...] = (short_names_agree,)
