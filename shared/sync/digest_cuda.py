"""Computes the block sums of `digest.py` on CUDA, in one pass over the bytes.

In: int32 words on a GPU and a level's keys. Out: int64 `[blocks, 2]`, without waiting for the kernel. Each program of
the Triton kernel sums one block. The keys are as large as a block, and stay in the device's cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 2  # number of sums per block that the kernel writes


def block_sums(words: torch.Tensor, keys: torch.Tensor, *, rows: int, columns: int) -> torch.Tensor:
    """Return the sums of one or more blocks of `rows` x `columns` pairs; the last block may be shorter."""
    pairs = rows * columns
    num_blocks = max(1, -(-len(words) // (2 * pairs)))
    sums = torch.empty(num_blocks, LANES, dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device):
        _sum_block[(num_blocks,)](words, keys, sums, len(words), keys.stride(0), pairs, rows, columns, num_warps=8)
    return sums


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]
    words: torch.Tensor,
    keys: torch.Tensor,
    sums: torch.Tensor,
    # The arguments have no annotations, because Triton reads `int` as its own 32-bit type.
    num_words,
    num_keys,  # number of keys for each word of a pair
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    # 32 bits would overflow in a buffer of more than 8 GiB.
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    a = tl.zeros([COLUMNS], tl.int64)
    b = tl.zeros([COLUMNS], tl.int64)
    for row in tl.static_range(ROWS):
        pair = row * COLUMNS + column
        at = block * 2 * PAIRS + pair
        first = tl.load(words + at, mask=at < num_words, other=0)
        second = tl.load(words + at + PAIRS, mask=at + PAIRS < num_words, other=0)
        a += (first + tl.load(keys + pair)).to(tl.int64) * (second + tl.load(keys + num_keys + pair)).to(tl.int64)
        b += (first + tl.load(keys + pair + 1)).to(tl.int64) * (second + tl.load(keys + num_keys + pair + 1)).to(
            tl.int64
        )
    tl.store(sums + 2 * block, tl.sum(a))
    tl.store(sums + 2 * block + 1, tl.sum(b))
