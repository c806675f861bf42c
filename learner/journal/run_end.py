"""Whether a run ends by its steps or by `training.max_minutes`."""

from __future__ import annotations


def ends_by_time(*, done: int, total_steps: int, seconds: float, minutes: float | None) -> bool:
    """Return True if `minutes` end a run before its last step, at the pace of the `done` of `total_steps` steps that
    took `seconds`; True too before the first step. Steps and seconds are counted since the start or the last resume,
    which gives the run all minutes anew."""
    return minutes is not None and seconds * total_steps >= 60.0 * minutes * done
