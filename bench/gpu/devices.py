"""Which GPUs of the host a benchmark's programs get: only such as it may use itself.

In: numbers as torch counts in this process. Out: what `CUDA_VISIBLE_DEVICES` of another program needs: numbers of the
host, or whatever names this program's own has. Called by all that start programs on GPUs.
"""

from __future__ import annotations

import os


def visible(*indices: int) -> list[str]:
    """The host's names of this program's own GPUs `indices`."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    return [allowed.split(",")[i] if allowed else str(i) for i in indices]
