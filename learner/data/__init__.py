"""Datasets: annotation files in, micro-batches of samples with their encoded prompts out.

`load_samples` reads and checks everything once, at start-up; `Batches` walks over the samples epoch by epoch. The
latter needs torch and is loaded when it is first asked for, so that `--check` can read annotations without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from learner.data.load import load_samples

if TYPE_CHECKING:
    from learner.data.batches import Batches, MicroBatch

__all__ = ["Batches", "MicroBatch", "load_samples"]


def __getattr__(name: str) -> Any:
    if name in ("Batches", "MicroBatch"):
        from learner.data import batches

        return getattr(batches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
