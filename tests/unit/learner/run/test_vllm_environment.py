"""Tests of what an engine inside the learner finds in its environment (R02)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from learner.run.environment import prepare_for_vllm
from shared.addresses import free_port

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
JOIN = """
import sys, datetime
import torch.distributed as dist
address = f"tcp://127.0.0.1:{sys.argv[1]}"
dist.init_process_group("gloo", init_method=address, world_size=1, rank=0, timeout=datetime.timedelta(seconds=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True])
def test_one_rank_under_torchrun_can_make_a_group_of_its_own(*, prepared: bool) -> None:
    """vLLM does that for its engine; unprepared, it waits for a store that is not there."""
    environment = {**os.environ, **TORCHRUN}
    if prepared:
        prepare_for_vllm(environment)
    joined = subprocess.run(
        [sys.executable, "-c", JOIN, str(free_port())], env=environment, capture_output=True, timeout=60, check=False
    )
    assert (joined.returncode == 0) == prepared


def test_several_ranks_keep_torchruns_store() -> None:
    environment = {**TORCHRUN, "WORLD_SIZE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    prepare_for_vllm(environment)
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
