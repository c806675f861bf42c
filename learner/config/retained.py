"""Turns each entry of `data.retain` into a configuration of its own, whose `data.train` are the annotations to score.

All code that reads or checks the annotations of a run can then read and check these annotations too.
"""

from __future__ import annotations

from learner.config.schema import RunConfig
from learner.config.sections.data import RetainConfig


def retained_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return a configuration for each entry of `data.retain`, by name, in the file's order, with the entry's format."""
    return {one.name: _config_of(config, one) for one in config.data.retain}


def _config_of(config: RunConfig, one: RetainConfig) -> RunConfig:
    own: dict[str, object] = {
        "train": one.val,
        "val": None,
        "test": None,
        "format": one.format,
        "image_root": one.image_root,
        "annotation_root": None,
        "coordinates": one.coordinates,
        "prompt": one.prompt,
        "augment": None,
        "retain": [],
    }
    task = one.task if one.task is not None else config.task
    return config.model_copy(update={"data": config.data.model_copy(update=own), "task": task})
