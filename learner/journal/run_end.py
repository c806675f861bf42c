"""Which end of a run comes first, that of its steps or that of `training.max_minutes`."""

from __future__ import annotations


def ends_by_time(*, done: int, total_steps: int, seconds: float, minutes: float | None) -> bool:
    """Return True if `minutes` end a run before its last step, at the pace of the `done` of `total_steps` steps that
    took `seconds`; True too before the first one. The counts begin where the time does: after a resume all minutes are
    there anew."""
    return minutes is not None and seconds * total_steps >= 60.0 * minutes * done
