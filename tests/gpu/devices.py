"""How many GPUs a test needs, said where it is skipped for want of them."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(number: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return pytest.mark.skipif(found < number, reason=f"needs {number} CUDA GPUs, found {found}")
