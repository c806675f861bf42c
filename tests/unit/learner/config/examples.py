"""Small configurations for the tests of `learner/config`, and what is wrong with a changed one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from learner.config.load import config_of
from learner.config.schema import RunConfig
from shared.config.model import ConfigErrors, Mistake

ROLLOUT = "custom.extra.rollout_matching"
SERVER = f"{ROLLOUT}.vllm.server"

_REMOVE = object()
REMOVE: Any = _REMOVE  # a value in `changed` that takes the key out


def minimal() -> dict[str, Any]:
    """Return only what is required, for rollout matching against one server."""
    return {
        "model": {"path": "some/model"},
        "data": {"train": "train.jsonl"},
        "training": {"output_dir": "runs/x", "max_steps": 10},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "extra": {
                "rollout_matching": {
                    "vllm": {
                        "mode": "server",
                        "server": {"servers": [{"base_url": "http://h:8000", "group_port": 9000}]},
                    }
                }
            },
        },
    }


def stage2() -> dict[str, Any]:
    """Return only what `stage2_ab_training` requires."""
    return changed(
        minimal(),
        {
            "custom.trainer_variant": "stage2_ab_training",
            "stage2_ab.schedule.b_ratio": 0.5,
            "training.effective_batch_size": 8,
        },
    )


def everything() -> dict[str, Any]:
    """Return a configuration in which every section is present, with every key written out."""
    copies = {"width": 640, "height": 480}
    data = changed(
        stage2(),
        {
            "model.lora": {},
            f"{ROLLOUT}.vllm.enable_lora": True,
            f"{SERVER}.discovery": "servers.txt",
            "data.coordinates": copies,
            "data.val": {"path": "val.jsonl"},
            "data.test": {"path": "test.jsonl"},
            "data.on_bad_record": {"no_area": "drop"},
            "data.augment": {},
            "labels.complete": {},
            "data.retain": [{"name": "old", "val": "old.jsonl", "task": {}}],
            "training.eval_steps": 5,
        },
    )
    full = config_of(data).model_dump(mode="json")
    # The paired form of the same section is the one thing that can't stand beside the other.
    for name in ("base_url", "group_port"):
        del full["custom"]["extra"]["rollout_matching"]["vllm"]["server"][name]
    del full["custom"]["extra"]["rollout_matching"]["rollout_buffer"]
    return full


def changed(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `data` with values set at dotted paths."""
    result = copy.deepcopy(dict(data))
    for path, value in changes.items():
        *sections, name = path.split(".")
        at = result
        for section in sections:
            at = at.setdefault(section, {})
        if value is _REMOVE:
            del at[name]
        else:
            at[name] = value
    return result


def valid(data: Mapping[str, Any], changes: Mapping[str, Any] | None = None, world_size: int | None = 1) -> RunConfig:
    return config_of(changed(data, changes or {}), world_size=world_size)


def mistakes(
    data: Mapping[str, Any], changes: Mapping[str, Any] | None = None, world_size: int | None = 1
) -> list[Mistake]:
    with pytest.raises(ConfigErrors) as caught:
        config_of(changed(data, changes or {}), world_size=world_size)
    return list(caught.value.mistakes)


def only_mistake(data: Mapping[str, Any], changes: Mapping[str, Any], world_size: int | None = 1) -> Mistake:
    (mistake,) = mistakes(data, changes, world_size)
    return mistake
