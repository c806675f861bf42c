"""`data` as it applies to one split: `val` and `test` may have a format, a reader and a folder of their own."""

from __future__ import annotations

from learner.config.sections.data import DataConfig, SplitConfig


def as_read_for(data: DataConfig, split: str) -> DataConfig:
    """Return `data` with the own keys of `train`, `val` or `test` instead of those of all, and with paths alone."""
    paths = {name: data.path_of(name) for name in ("val", "test")}
    own = {"val": data.val, "test": data.test}.get(split)
    return data.model_copy(update={**paths, **(_own_keys(own) if isinstance(own, SplitConfig) else {})})


def _own_keys(own: SplitConfig) -> dict[str, object]:
    """Return what is given. A format of its own is not read by the run's reader."""
    keys = {
        "format": own.format,
        "reader": own.reader,
        "image_root": own.image_root,
        "coordinates": own.coordinates,
        "prompt": own.prompt,
    }
    without_reader: dict[str, object] = {"reader": None} if own.format is not None else {}
    return without_reader | {name: value for name, value in keys.items() if value is not None}
