"""The block sums of `digest.py` on CUDA, in one pass over the bytes.

In: int32 words on a GPU and the column keys. Out: int64 `[blocks, 2]`, launched and not waited for. One program sums
one block by Horner's rule down the columns, so it reads one key per column and no others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.sync.digest import COLUMNS, MULTIPLIERS, ROWS, signed


def block_sums(words: torch.Tensor, column_keys: torch.Tensor) -> torch.Tensor:
    """Of at least one block; the last one may be cut short."""
    num_blocks = max(1, -(-len(words) // (ROWS * COLUMNS)))
    sums = torch.empty(num_blocks, 2, dtype=torch.int64, device=words.device)
    first, second = map(signed, MULTIPLIERS)
    with torch.cuda.device(words.device):
        _sum_block[(num_blocks,)](words, column_keys, sums, len(words), first, second, ROWS, COLUMNS, num_warps=8)
    return sums


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]
    words: torch.Tensor,
    column_keys: torch.Tensor,
    sums: torch.Tensor,
    num_words,
    first,
    second,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    start = block * ROWS * COLUMNS + column
    a = tl.zeros([COLUMNS], tl.int64)
    b = tl.zeros([COLUMNS], tl.int64)
    for row in tl.static_range(ROWS):
        at = start + row * COLUMNS
        word = tl.load(words + at, mask=at < num_words, other=0).to(tl.int64)
        a = a * first + word
        b = b * second + word
    tl.store(sums + 2 * block, tl.sum(a * tl.load(column_keys + column)))
    tl.store(sums + 2 * block + 1, tl.sum(b * tl.load(column_keys + COLUMNS + column)))
