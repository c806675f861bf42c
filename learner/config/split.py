"""Returns the section `data` for one split: `val` and `test` may have keys of their own, such as another format."""

from __future__ import annotations

from learner.config.sections.data import DataConfig, SplitConfig


def as_read_for(data: DataConfig, split: str) -> DataConfig:
    """Return the section for reading the split `train`, `val` or `test`. Keys that the split sets replace the same keys
    of `data`. In the result, `val` and `test` are only paths."""
    paths = {name: data.path_of(name) for name in ("val", "test")}
    own = {"val": data.val, "test": data.test}.get(split)
    return data.model_copy(update={**paths, **(_own_keys(own) if isinstance(own, SplitConfig) else {})})


def _own_keys(own: SplitConfig) -> dict[str, object]:
    """Return the keys that the split sets, with their values."""
    keys = {name: getattr(own, name) for name in ("format", "image_root", "coordinates", "prompt")}
    return {name: value for name, value in keys.items() if value is not None}
