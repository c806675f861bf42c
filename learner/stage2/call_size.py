"""How much of a step's rollouts one generation call brings, by what steps took (R32).

Learning runs beside the calls that follow, so small calls hide more of it. But a server needs about as long for few
answers as for many, up to what it decodes at once: there small calls, one after the other, cost more than they hide.
Which it is depends on model, answers and GPUs, so it is measured: sizes take turns, then the fastest stays.

In: the seconds of each step's rollouts and learning. Out: samples per call. Only time depends on it: a sample's seed
and place do not. Called by `channel_b.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

# A step takes max(rollout, learning) plus what one call brings, so four calls leave at most a quarter of it bare.
CALLS_PER_STEP = 4
TRY_AGAIN_AFTER = 50  # steps, for answers grow and shrink in training
_NEW_SHARE = 0.5  # of the latest step in a size's mean: one that was slow by chance is soon forgotten


def sizes(share: int, capacity: int) -> tuple[int, ...]:
    """Samples of a call that are worth trying, smallest first: a quarter of the share, half of it, all; as far as the
    servers decode `capacity` at once."""
    parts = (CALLS_PER_STEP, CALLS_PER_STEP // 2, 1)
    return tuple(sorted({max(1, min(capacity, -(-share // part))) for part in parts}))


class CallSize:
    """Of one rank. The first step's seconds do not count: in it everything warms up."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # mean per step, by size; none: to be tried
        self._steps = 0

    def choose(self, candidates: Sequence[int]) -> int:
        """The first that has not been tried, else the fastest."""
        untried = [size for size in candidates if size not in self._seconds]
        return untried[0] if untried else min(candidates, key=self._seconds.__getitem__)

    def tell(self, size: int, seconds: float) -> None:
        """What a step of that size took, from its first call to its last row learned."""
        self._steps += 1
        if self._steps == 1:
            return
        mean = self._seconds.get(size, seconds)
        self._seconds[size] = mean + _NEW_SHARE * (seconds - mean)
        if self._steps % TRY_AGAIN_AFTER == 0:
            self._seconds = {size: self._seconds[size]}
