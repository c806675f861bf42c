"""Predicts whether a run ends after its last step, or earlier by `training.max_minutes`."""

from __future__ import annotations


def ends_by_time(*, done: int, total_steps: int, seconds: float, minutes: float | None) -> bool:
    """Return True if `minutes` will end the run before its last step: `done` of `total_steps` steps took `seconds`, and
    later steps are expected to take as long. Before the first step, return True. Steps and seconds are counted since
    the run began or was last resumed."""
    # Both steps and seconds count from the last resume, because a resumed run gets its full `minutes` again.
    return minutes is not None and seconds * total_steps >= 60.0 * minutes * done
