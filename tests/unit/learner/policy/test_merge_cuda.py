"""The merge in one kernel, run by triton's interpreter in a process of its own: triton reads its setting at import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

KERNEL = """
import torch
from learner.policy import merge_cuda
from learner.policy.pass_graph import Notes

torch.manual_seed(0)
for num_out, num_in, rank in ((192, 160, 4), (130, 100, 40), (1, 3, 1)):
    for base_dtype in (torch.bfloat16, torch.float32):
        base, a, b = torch.randn(num_out, num_in).to(base_dtype), torch.randn(rank, num_in), torch.randn(num_out, rank)
        for dtype in (torch.bfloat16, torch.float32):
            expected = merge_cuda.by_torch(base, a, b, 0.5, dtype)
            for i, tiling in enumerate(merge_cuda.TILINGS):
                found = merge_cuda._merge_lora(base, a, b, 0.5, dtype, i)
                assert found.dtype == dtype, found.dtype
                near = {"rtol": 2**-7, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(found, expected, **near)

for number in range(3):  # each of base, A and B
    notes = Notes([(base, a, b)[number]])
    with notes.noting():
        merged = merge_cuda._merge_lora(base, a, b, 0.5, dtype, 0)
    assert notes.depends(merged), number
assert not Notes([torch.zeros(1)]).depends(merged)
print("right")
"""


def test_the_kernel_merges_every_shape_and_is_seen_by_a_capture() -> None:
    """Also where weights fill no tile and ranks no block. A pass that is captured must know that a merged weight
    depends on weights, or it would repeat what was read of it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip().endswith("right"), done.stderr[-2000:]
