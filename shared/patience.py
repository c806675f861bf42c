"""Time limits that do not run while this process stands still (SIGSTOP, a machine that was paused).

What is waited for goes on meanwhile, and may be there already. Whoever waits does so in slices of SLICE_S and asks
after each; of a slice that took far longer, only a part counts. So every limit ends, however often there are pauses.
"""

from __future__ import annotations

import time

SLICE_S = 0.05
_MOST_PER_SLICE_S = 4 * SLICE_S  # more is a pause, not a late thread


class Patience:
    """How long to wait yet, in seconds. Not for several threads."""

    def __init__(self, timeout_s: float) -> None:
        self.left_s = timeout_s
        self._asked_at = time.monotonic()

    def is_over(self) -> bool:
        """Call it after every slice."""
        now = time.monotonic()
        self.left_s -= min(now - self._asked_at, _MOST_PER_SLICE_S)
        self._asked_at = now
        return self.left_s <= 0
