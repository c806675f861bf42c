"""The number of GPUs that a test needs, said where it is skipped for want of them, and the GPU that each of its
programs gets.

`python -m tests.gpu.devices ARGUMENTS` is the learner as one of torchrun's ranks, which may share its GPU with others.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping

import pytest
import torch

FOUND = torch.cuda.device_count() if torch.cuda.is_available() else 0
SHARED = FOUND < 2  # all programs of a test are on one GPU
OTHER = 0 if SHARED else 1  # the GPU of a second program
KV_CACHE_BYTES = 1 << 30
# A server's part of a GPU: its weights and this cache. Without `kv_cache_memory_bytes` vLLM measures what is free while
# it starts, and ends if another program gives memory back meanwhile.
SERVER_MEMORY = {"gpu_memory_utilization": 0.1, "engine_args": {"kv_cache_memory_bytes": KV_CACHE_BYTES}}
PROCESS_SHARE = 0.3  # share of a GPU, for a process's own tensors


def needs_gpus(number: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(number > FOUND, reason=f"needs {number} CUDA GPUs, found {FOUND}")


def rank_environment(rank: int) -> Mapping[str, str]:
    """Return the environment of a rank of a group that NCCL connects: on one GPU each rank passes for a host of its
    own."""
    return {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{rank}-{os.getpid()}"} if SHARED else {}


if __name__ == "__main__":
    os.environ.update(rank_environment(int(os.environ["RANK"])))
    runpy.run_module("learner", run_name="__main__", alter_sys=True)
