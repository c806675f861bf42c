"""The merge in one kernel, run by triton's interpreter in a process of its own: triton reads its setting at import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from learner.policy import merge_cuda

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


@pytest.mark.parametrize(
    ("fault", "tries"), [("no memory", 1), ("slower", 1), ("not contiguous", 0), ("while a graph is captured", 0)]
)
def test_torch_merges_what_is_not_proven(fault: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape is tried once."""
    tried: list[object] = []

    def proven(*given: object) -> None:
        tried.append(given)
        if fault == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(merge_cuda, "_PROVEN", {})
    monkeypatch.setattr(merge_cuda, "_proven", proven)
    captures = fault == "while a graph is captured"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)  # builds for CPU lack it
    base, a, b = torch.randn(8, 6), torch.randn(2, 6), torch.randn(8, 2)
    given = (base.t().contiguous().t() if fault == "not contiguous" else base), a, b
    for _ in range(2):
        assert merge_cuda.merged(*given, 2.0, torch.bfloat16) is None
    assert len(tried) == tries
