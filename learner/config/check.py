"""`python -m learner --config F --check`: every mistake at once, or the resolved plan as one JSON object.

No GPU, model or (without `--probe`) server is touched; torch, vllm and transformers are not imported. The command line
has the annotation files read, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from learner.config.load import load_config
from learner.config.plan import Plan, resolve
from learner.config.schema import DataConfig
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ConfigError, DataError
from shared.wire import TOKEN_VARIABLE


def run_check(
    path: str,
    world_size: int | None = None,
    probe: bool = False,
    env: Mapping[str, str] = os.environ,
    *,
    read_data: bool = False,
) -> int:
    """Print the plan for `world_size` ranks (default 1) on stdout and return 0; or print one line per mistake on
    stderr, nothing on stdout, and return 2. With `read_data` the plan has the number of samples of each split."""
    try:
        report = _report(path, 1 if world_size is None else world_size, probe, env, read_data)
    except ConfigErrors as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    print(json.dumps(report, indent=2))
    return 0


def _report(path: str, world_size: int, probe: bool, env: Mapping[str, str], read_data: bool) -> dict[str, Any]:
    """Raises ConfigErrors: those of the file, or else those of everything that it names."""
    if world_size < 1:
        remedy = "give the number of learner ranks"
        mistake = Mistake(path="--world-size", found=str(world_size), wanted="an integer >= 1", remedy=remedy)
        raise ConfigErrors(mistakes=[mistake])
    config = load_config(path, world_size=world_size, env=env)
    plan = resolve(config, world_size)
    report = plan.to_json()
    mistakes: list[Mistake] = []
    looks = [partial(_samples, config.data)] if read_data else []
    looks += [partial(_probed, plan, env.get(TOKEN_VARIABLE))] if probe else []
    for look in looks:
        try:
            report |= look()
        except ConfigErrors as errors:
            mistakes += errors.mistakes
    if mistakes:
        raise ConfigErrors(f"what {path} names can't be used", mistakes=mistakes)
    return report


def _samples(data: DataConfig) -> dict[str, Any]:
    """How many samples each annotation file has."""
    from learner.data.check import count_samples, splits  # here, for keys alone can be checked without

    counts, mistakes = {}, []
    for split, path in splits(data).items():
        try:
            counts[split] = count_samples(data, path)
        except DataError as error:
            mistakes.append(Mistake.of(error, f"data.{split}"))
    if mistakes:
        raise ConfigErrors("annotations can't be used", mistakes=mistakes)
    return {"samples": counts}


def _probed(plan: Plan, token: str | None) -> dict[str, Any]:
    """Nothing to ask where rollouts do not come from servers."""
    if not plan.servers:
        return {"server_world_sizes": [], "chunk": None}
    from learner.config.probe import probe_servers  # here, so that a plain check does not load an HTTP client

    sizes, chunk = probe_servers(plan, token)
    return {"server_world_sizes": sizes, "chunk": chunk}
