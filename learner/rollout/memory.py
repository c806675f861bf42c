"""Whether an error says that memory did not suffice. Called by the backends that generate beside the training state."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """On CPU torch has no type for it, only words."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
