"""Reads a YAML file into a `RunConfig`, and writes a `RunConfig` as YAML. `load_config` is called before anything else
is loaded, `write_resolved` when the run begins.

`load_config` raises ConfigErrors, which lists every mistake: wrong YAML, retired keys, unknown keys, wrong types, and
keys that contradict each other. If the run uses servers, the result has a list of servers, also if the file uses the
other form. Paths in a configuration are relative to the working directory. Paths in `base:` are relative to the file
that has the `base:`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.config.modes import colocates, uses_servers
from learner.config.plan import tensor_parallel_size, topology_rules
from learner.config.schema import RULES, RunConfig
from learner.config.sections.data import DataConfig, SplitConfig
from learner.config.sections.labels import LabelsConfig
from learner.config.sections.loss import LossConfig
from learner.config.sections.reward import RewardConfig
from learner.config.sections.rollouts import by_names_in_file, spelled_out
from learner.config.sections.servers import paired_servers
from shared.config.kinds import for_program
from shared.config.model import ConfigErrors, shown
from shared.config.parse import load_alone, load_yaml, parse, write_yaml

_ROLLOUT = "custom.extra.rollout_matching"
_CHANNEL_B = "stage2_ab.channel_b"
_DECODING = ("temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty", "decode_mode", "num_beams")


# Keys of earlier versions, which are refused: dotted path -> (what is wanted instead, what to do), for the error.
RETIRED: dict[str, tuple[str, str]] = {
    # R22: one key limits the sequences of every generation call.
    f"{_ROLLOUT}.rollout_generate_batch_size": (
        f"{_ROLLOUT}.decode_batch_size",
        f"remove it and set {_ROLLOUT}.decode_batch_size, the sequences per rollout GPU in one generation call",
    ),
    f"{_ROLLOUT}.rollout_infer_batch_size": (
        f"{_ROLLOUT}.decode_batch_size",
        f"remove it and set {_ROLLOUT}.decode_batch_size; how many requests a rank sends at once follows from it",
    ),
    f"{_ROLLOUT}.post_rollout_pack_scope": (
        "no packing scope",
        "remove post_rollout_pack_scope: packing is per micro-step (per step in Channel-B), there is no window scope",
    ),
    # D20 removed this key.
    f"{_ROLLOUT}.best_of": (
        "labels.complete",
        "remove it: one rollout per sample was never worse. If labels leave objects out, labels.complete adds what "
        "several answers agree on",
    ),
    "data.reader": ("data.format", "move it to data.format, which names a format or a reader"),
    "data.max_samples": (
        "a part of data.train",
        "remove it and set data.train: PATH[:10%]",
    ),
    "logging.tensorboard": ("logging.trackers", "remove it; TensorBoard is one of logging.trackers"),
    # D7 moved these keys into a section.
    **{
        f"{_ROLLOUT}.{name}": (f"{_ROLLOUT}.decoding.{name}", f"move it to {_ROLLOUT}.decoding.{name}")
        for name in _DECODING
    },
    # D3 removed these keys.
    f"{_CHANNEL_B}.mode": (
        "no mode",
        "remove it: Channel-B learns a fixed number of rollouts per step; for rollouts ahead of learning set "
        "stage2_ab.async_actor_learner.enabled",
    ),
    f"{_CHANNEL_B}.async": (
        "stage2_ab.async_actor_learner",
        "remove it and set stage2_ab.async_actor_learner.enabled (and its version_window, queue_limit)",
    ),
    f"{_CHANNEL_B}.rollouts_per_step": (
        "training.effective_batch_size",
        "remove it and set training.effective_batch_size, which is the rollouts per optimizer step",
    ),
    f"{_CHANNEL_B}.enable_pipeline": (
        "no switch",
        f"remove it: with {_ROLLOUT}.vllm.mode: server and training.packing: true, rollouts and learning overlap; for "
        "rollouts ahead of the step set stage2_ab.async_actor_learner.enabled",
    ),
    f"{_CHANNEL_B}.rollout_decode_batch_size": (
        f"{_ROLLOUT}.decode_batch_size",
        f"remove it and set {_ROLLOUT}.decode_batch_size",
    ),
    # R26 replaced this key.
    "stage2_ab.schedule.pattern": (
        "stage2_ab.schedule.b_ratio",
        "remove it and set stage2_ab.schedule.b_ratio, the share of Channel-B steps (pattern AAB is 0.3333)",
    ),
}

RESOLVED_NAME = "config.yaml"


def load_config(
    path: str | Path,
    *,
    world_size: int | None = None,
    env: Mapping[str, str] = os.environ,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration in the file `path`. `overrides`: texts `path.to.key=VALUE` of the command line, which
    replace the file's values. `world_size`: number of ranks, to check and fill in keys that depend on it; None: they
    are not checked.

    Raises ConfigErrors.
    """
    return config_of(for_program(load_yaml(path, env, overrides), "learner"), world_size=world_size)


def load_found(path: Path) -> tuple[RunConfig, list[str]]:
    """Return the configuration in a `config.yaml` found in a model's folder. The user did not name this file, and may
    not trust it (D24). Only the prompt, the task, limits and the paths of annotations are taken from it. Return also a
    list of what was left out, as texts for a message.

    No module that the file names is imported, no file of its `base:` is read, and no `${VARIABLE}` is filled in. Raises
    ConfigErrors.
    """
    config = config_of(for_program(load_alone(path), "learner"))
    data = DataConfig(
        train=config.data.train,
        val=config.data.path_of("val"),
        test=config.data.path_of("test"),
        prompt=config.data.prompt,
    )
    # The defaults replace sections of the file that could name modules or files.
    kept = {
        "data": data,
        "labels": LabelsConfig(),
        "reward": RewardConfig(),
        "loss": LossConfig(),
        "training": config.training.model_copy(update={"callbacks": []}),
    }
    taken = {"data.prompt": data.prompt, "task": config.task.model_dump(mode="json")}
    filled = [f"${{...}} in {name}" for name, value in taken.items() if "${" in json.dumps(value)]
    return config.model_copy(update=kept), [*_ways_to_read(config.data), *filled]


def _ways_to_read(data: DataConfig) -> list[str]:
    """Return the keys of the file that say how annotations are read, such as `data.format`."""
    names = [name for name in SplitConfig.model_fields if name not in ("path", "prompt")]
    given = [f"data.{name}" for name in names if getattr(data, name) != DataConfig.model_fields[name].default]
    for split, own in (("val", data.val), ("test", data.test)):
        if isinstance(own, SplitConfig):
            given += [f"data.{split}.{name}" for name in names if getattr(own, name) is not None]
    return given


def config_of(data: Mapping[str, object], *, world_size: int | None = None) -> RunConfig:
    """Return the configuration in the parsed YAML `data`, checked as `load_config` does. Raises ConfigErrors."""
    rules = RULES if world_size is None else (*RULES, *topology_rules(world_size))
    # Values given under short names are copied to the long names first, so the checks of the long names cover them.
    filled, written = spelled_out(data)
    try:
        config: RunConfig = parse(RunConfig, filled, retired=RETIRED, rules=rules)
    except ConfigErrors as errors:
        raise ConfigErrors(errors.what, mistakes=by_names_in_file(errors.mistakes, written)) from errors
    # The section `rollouts` (short names) is emptied, because all other code reads the long names only.
    if config.rollouts:
        config = config.model_copy(update={"rollouts": {}})
    # All other code reads only the list `servers`, so the other form is turned into it.
    if uses_servers(config):
        server = config.rollout_matching.vllm.server
        forms = {"servers": paired_servers(server), "base_url": None, "group_port": None}
        return _with_vllm(config, server=server.model_copy(update=forms))
    if colocates(config) and world_size is not None:
        return _with_vllm(config, tensor_parallel_size=tensor_parallel_size(config, world_size))
    return config


def write_resolved(config: RunConfig, run_dir: Path) -> Path:
    """Write every key with its value to `run_dir/config.yaml`, with which the same run can be started again. Return the
    file's path. Raises OSError."""
    values = shown(config)
    if config.custom.trainer_variant == "stage2_ab_training":  # this variant refuses the key, even if it is null (D2)
        del values["custom"]["extra"]["rollout_matching"]["rollout_buffer"]
    path, partial = run_dir / RESOLVED_NAME, run_dir / f".{RESOLVED_NAME}.partial"
    header = "Resolved configuration of this run: bases merged, variables filled in, defaults written out."
    run_dir.mkdir(parents=True, exist_ok=True)
    write_yaml(partial, values, header)
    # A rename shows readers the old file or the whole new one, never half of one.
    partial.replace(path)
    return path


def _with_vllm(config: RunConfig, **values: object) -> RunConfig:
    rollout = config.rollout_matching
    vllm = rollout.vllm.model_copy(update=values)
    extra = config.custom.extra.model_copy(update={"rollout_matching": rollout.model_copy(update={"vllm": vllm})})
    return config.model_copy(update={"custom": config.custom.model_copy(update={"extra": extra})})
