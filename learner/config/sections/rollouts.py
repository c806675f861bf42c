"""The section `rollouts`: short names of the keys below `custom.extra.rollout_matching` that most runs set.

A short name stands for one long name (`SHORT`). Loading writes the value of the short name to the key of the long name
before anything is checked, and then clears the section. All other code reads the long names. If a file sets both names,
their values must be equal.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from learner.config.modes import ROLLOUT, Rule
from learner.config.sections.servers import SERVER, ServerEntry
from shared.config.model import Mistake, Section, key, show

if TYPE_CHECKING:
    from learner.config.schema import RunConfig

SECTION = "rollouts"
SHORT: Mapping[str, str] = {
    "servers": f"{SERVER}.servers",
    "mode": f"{ROLLOUT}.vllm.mode",
    "backend": f"{ROLLOUT}.rollout_backend",
    "max_new_tokens": f"{ROLLOUT}.decoding.max_new_tokens",
    "temperature": f"{ROLLOUT}.decoding.temperature",
    "batch_size": f"{ROLLOUT}.decode_batch_size",
}


class RolloutsConfig(Section):
    """Short names. Each stands for the key that it names; null: the long name says it."""

    servers: list[ServerEntry] | None = key(f"`{SHORT['servers']}`: the rollout servers", None, req="R05")
    mode: Literal["colocate", "server"] | None = key(f"`{SHORT['mode']}`", None, req="R04")
    backend: Literal["vllm", "hf"] | None = key(f"`{SHORT['backend']}`", None, req="R02")
    max_new_tokens: int | None = key(f"`{SHORT['max_new_tokens']}`: longest answer", None, unit="tokens", ge=1)
    temperature: float | None = key(f"`{SHORT['temperature']}`", None, ge=0.0)
    batch_size: int | None = key(f"`{SHORT['batch_size']}`", None, unit="sequences", ge=1)


def spelled_out(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration with the value of each short name copied to its long name, if the long name has none."""
    section = values.get(SECTION)
    if not isinstance(section, dict):
        return values
    given = {name: section[name] for name in SHORT if section.get(name) is not None}
    filled = copy.deepcopy(values)
    for name, value in given.items():
        at: object = filled
        *above, last = SHORT[name].split(".")
        for part in above:
            at = at.setdefault(part, {}) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at.setdefault(last, copy.deepcopy(value))
    return filled


def without_short_names(config: RunConfig) -> RunConfig:
    """Return the configuration with an empty section `rollouts`."""
    return config.model_copy(update={SECTION: RolloutsConfig()}) if _given(config.rollouts) else config


def short_names_agree(config: RunConfig) -> Iterator[Mistake]:
    """A short name of `rollouts` has the value of its long name, where both are set."""
    for name, value in _given(config.rollouts).items():
        long = functools.reduce(getattr, SHORT[name].split("."), config)
        if value != long:
            found = f"{show(value)}, and {SHORT[name]} is {show(long)}"
            yield Mistake(path=f"{SECTION}.{name}", found=found, wanted="one value", remedy="remove one of the two")


def _given(section: RolloutsConfig) -> dict[str, object]:
    values = {name: getattr(section, name) for name in SHORT}
    return {name: value for name, value in values.items() if value is not None}


RULES: tuple[Rule, ...] = (short_names_agree,)
