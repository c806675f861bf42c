"""The key `rollouts`: short names for those keys below `custom.extra.rollout_matching` that most runs set.

Each short name stands for one long name, the path of a key (`SHORT`). When a file is loaded, the value of a short name
is first copied to the key with the long name. After the checks `rollouts` is emptied, so all other code reads only the
long names. If a file has both names, their values must be equal. An error about a value uses the name in the file.
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
    """Return a copy of the configuration in which the value of each short name is also at its long name, unless the
    long name has a value. Return also which long names were written: long name -> short name."""
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
            # Mistakes name the line of the short name, because the file has no line with the long name.
            lines = {long + at.removeprefix(short): line for at, line in filled.lines.items() if at.startswith(short)}
            filled.lines = {**filled.lines, **lines}
    return filled, written


def by_names_in_file(mistakes: Sequence[Mistake], written: Mapping[str, str]) -> list[Mistake]:
    """Return the mistakes with the names that the file has: a long name in `written` is replaced by its short name."""
    longs = [next((long for long in written if mistake.path.startswith(long)), "") for mistake in mistakes]
    return [
        replace(mistake, path=written.get(long, "") + mistake.path.removeprefix(long))
        for mistake, long in zip(mistakes, longs, strict=True)
    ]


def short_names_agree(config: RunConfig) -> Iterator[Mistake]:
    """If a short name of `rollouts` and its long name are both set, their values are equal."""
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
