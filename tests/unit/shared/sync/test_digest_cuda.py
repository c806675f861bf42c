"""The kernel of the digest (R09), which Triton's interpreter runs on CPU. On a GPU: tests/gpu/test_sync_cuda.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
ROWS, COLUMNS = 2, 8
PAIRS = ROWS * COLUMNS

# A process of its own: Triton must know before it is imported that it interprets.
PROGRAM = """
import contextlib, json, sys
import torch
from shared.sync.digest_cuda import LANES, block_sums

torch.cuda.device = lambda device: contextlib.nullcontext()
rows, columns, keys, cases = json.load(sys.stdin)
keys, sums = torch.tensor(keys, dtype=torch.int32), []
for words, number in cases:
    longer = torch.tensor(words, dtype=torch.int32)  # what is behind the words belongs to something else
    sums.append(block_sums(longer[:number], keys, rows=rows, columns=columns).tolist())
print(json.dumps([LANES, sums]))
"""


def wrapped(value: int, bits: int) -> int:
    """Return the value as a signed number of so many bits."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def reference(words: list[int], keys: list[list[int]]) -> list[list[int]]:
    """Sums of blocks, as `digest.py` describes them, in plain integers. No word makes one block of zeros."""
    words = words + [0] * (-len(words) % (2 * PAIRS) if words else 2 * PAIRS)
    blocks = [words[start : start + 2 * PAIRS] for start in range(0, len(words), 2 * PAIRS)]
    return [
        [
            wrapped(
                sum(
                    wrapped(block[p] + keys[0][p + lane], 32) * wrapped(block[PAIRS + p] + keys[1][p + lane], 32)
                    for p in range(PAIRS)
                ),
                64,
            )
            for lane in range(2)
        ]
        for block in blocks
    ]


@pytest.mark.slow
def test_the_kernel_sums_blocks_as_the_digest_describes() -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> list[list[int]]:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).tolist()

    keys, words = drawn(2, PAIRS + 1), drawn(1, 200)[0]
    cases = [
        (words, number) for number in (0, 1, PAIRS - 1, PAIRS, PAIRS + 1, 2 * PAIRS, 2 * PAIRS + 1, 6 * PAIRS, 100)
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([ROWS, COLUMNS, keys, cases]),
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lanes, sums = json.loads(done.stdout)
    assert lanes == 2
    assert sums == [reference(words[:number], keys) for _, number in cases]
