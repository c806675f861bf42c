"""A YAML file to a `RunConfig` and back: `load_config` before anything else is loaded, `write_resolved` into the run.

Raises ConfigErrors with every mistake: of the YAML, retired keys, unknown and ill-typed keys, and the rules between
keys. What comes out holds `servers` as a list where servers are used, whichever form the file has. Paths in a
configuration are relative to the working directory, those of `base:` to the file that names them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.config.legacy import RETIRED
from learner.config.rules import RULES, uses_servers
from learner.config.schema import RunConfig
from learner.config.servers import paired_servers
from learner.config.topology import topology_rules
from shared.config_io import load_yaml, parse, write_yaml

RESOLVED_NAME = "config.yaml"


def load_config(path: str | Path, *, world_size: int | None = None, env: Mapping[str, str] = os.environ) -> RunConfig:
    """The configuration in `path`. With `world_size`, what depends on the number of ranks is checked too.

    Raises ConfigErrors.
    """
    return config_of(load_yaml(path, env), world_size=world_size)


def config_of(data: Mapping[str, Any], *, world_size: int | None = None) -> RunConfig:
    """The configuration that a mapping (or `config_io.Document`) says. Raises ConfigErrors."""
    rules = RULES if world_size is None else (*RULES, *topology_rules(world_size))
    return _one_server_form(parse(RunConfig, data, retired=RETIRED, rules=rules))


def write_resolved(config: RunConfig, run_dir: Path) -> Path:
    """Every key with its value as `run_dir/config.yaml`, from which the run can be repeated. Raises OSError."""
    path, partial = run_dir / RESOLVED_NAME, run_dir / f".{RESOLVED_NAME}.partial"
    header = "Resolved configuration of this run: bases merged, variables filled in, defaults written out."
    run_dir.mkdir(parents=True, exist_ok=True)
    write_yaml(partial, config.model_dump(mode="json"), header)
    partial.replace(path)
    return path


def _one_server_form(config: RunConfig) -> RunConfig:
    if not uses_servers(config):
        return config
    rollout = config.rollout_matching
    forms = {"servers": paired_servers(rollout.vllm.server), "base_url": None, "group_port": None}
    server = rollout.vllm.server.model_copy(update=forms)
    vllm = rollout.vllm.model_copy(update={"server": server})
    extra = config.custom.extra.model_copy(update={"rollout_matching": rollout.model_copy(update={"vllm": vllm})})
    return config.model_copy(update={"custom": config.custom.model_copy(update={"extra": extra})})
