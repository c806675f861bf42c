"""Which GPUs of the host a benchmark's programs get: only such as it may use itself."""

from __future__ import annotations

import os


def visible(*indices: int) -> list[int]:
    """The host's numbers of this program's own GPUs `indices`, for what it starts."""
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    allowed = [int(number) for number in numbers.split(",")] if numbers else None
    return [allowed[i] for i in indices] if allowed else list(indices)
