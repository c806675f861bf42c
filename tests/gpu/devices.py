"""How many GPUs a test needs, said where it is skipped for want of them, and which GPU each of its programs gets."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch

FOUND = torch.cuda.device_count() if torch.cuda.is_available() else 0
SHARED = FOUND < 2  # all programs of a test are on one GPU
OTHER = 0 if SHARED else 1  # the GPU of a second program


def needs_gpus(number: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(number > FOUND, reason=f"needs {number} CUDA GPUs, found {FOUND}")


def rank_environment(rank: int) -> Mapping[str, str]:
    """Of a rank of a group that NCCL connects: on one GPU each rank passes for a host of its own."""
    return {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{rank}-{os.getpid()}"} if SHARED else {}
