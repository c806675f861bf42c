"""Makes a configuration for each entry of `data.retain` (annotations of another kind, which evaluations score too).

In the made configuration, `data.train` names the annotations of the entry. So all code that reads or checks a run's
training annotations can read or check the entry's annotations.
"""

from __future__ import annotations

from learner.config.schema import RunConfig
from learner.config.sections.data import RetainConfig


def retained_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configurations by the entries' names, in the order of `data.retain`. Keys of an entry, such as its
    format and task, replace the run's keys."""
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
