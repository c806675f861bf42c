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
from learner.config.schema import RunConfig
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ConfigError

TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"


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
    looks = [partial(_samples, config)] if read_data else []
    looks += [partial(_probed, plan, env.get(TOKEN_VARIABLE))] if probe else []
    for look in looks:
        try:
            report |= look()
        except ConfigErrors as errors:
            mistakes += errors.mistakes
    if mistakes:
        raise ConfigErrors(f"what {path} names can't be used", mistakes=mistakes)
    return report


def _samples(config: RunConfig) -> dict[str, Any]:
    """How many samples each split has, and what is dropped or clipped of it."""
    from learner.data.check import check_split, splits  # here, for keys alone can be checked without

    data, geometry = config.data, config.task.geometry
    checked = {split: check_split(data, split, path, geometry) for split, path in splits(data).items()}
    mistakes = [mistake for found in checked.values() for mistake in found.mistakes]
    if mistakes:
        raise ConfigErrors("annotations can't be used", mistakes=mistakes)
    bad = {split: found.dropped for split, found in checked.items() if found.dropped}
    counts = {split: found.num_samples for split, found in checked.items()}
    return {"samples": counts, "bad_records": bad} if bad else {"samples": counts}


def _probed(plan: Plan, token: str | None) -> dict[str, Any]:
    """Nothing to ask where rollouts do not come from servers."""
    if not plan.servers:
        return {"server_world_sizes": [], "chunk": None}
    from learner.config.probe import probe_servers  # here, so that a plain check does not load an HTTP client

    sizes, chunk = probe_servers(plan, token)
    return {"server_world_sizes": sizes, "chunk": chunk}
