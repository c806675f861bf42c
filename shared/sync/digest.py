"""A digest of bytes where they are: 128 bits, the same on every device, as fast as the memory can be read.

In: a 1-D uint8 tensor and a salt. Out: an int64 tensor `[2]` on the same device; nothing waits for the device. Equal
bytes, length and salt give equal digests; other bytes give another digest, except with a chance of about 2^-126. It is
made for accidents, not against an adversary, who can compute it too.

Multilinear hashing with fixed odd keys (Carter and Wegman), as a tree. The bytes are read as signed 32-bit words, in
blocks of ROWS x COLUMNS; the last block is filled with zeros. A block's sum in lane j is the sum of
`word[r, c] * MULTIPLIERS[j] ** (ROWS - 1 - r) * column_key[j, c]`, wrapping in 64 bits. The sums `[blocks, 2]` are
bytes again, and so on until one block is left; length and salt are mixed into its two sums. If one word changes, or two
words of one column change by the same amount, their block's sums always change: keys are odd and MULTIPLIERS are 5
modulo 8. On CUDA one kernel makes the sums (`digest_cuda.py`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

ROWS, COLUMNS = 16, 1024
BLOCK_WORDS = ROWS * COLUMNS
MULTIPLIERS = (0x5851F42D4C957F2D, 0x14057B7EF767814D)

_BLOCKS_AT_ONCE = 64  # on CPU: the temporaries are twice the words
_MASK = (1 << 64) - 1


def digest(buffer: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """Raises TypeError for anything but a 1-D uint8 tensor. `salt` has at most 63 bits."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise TypeError(f"digest takes a 1-D uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
    sums = _block_sums(buffer)
    while len(sums) > 1:
        sums = _block_sums(sums.view(-1).view(torch.uint8))
    return sums[0] + signed(mixed(buffer.numel() ^ mixed(salt)))


def _block_sums(data: torch.Tensor) -> torch.Tensor:
    words = _words(data)
    if words.is_cuda:
        from shared.sync.digest_cuda import block_sums  # triton takes a second to import, and CPU builds may lack it

        return block_sums(words, _column_keys(words.device))
    num_full, block = len(words) // BLOCK_WORDS, BLOCK_WORDS
    parts = [*words[: num_full * block].view(num_full, block).split(_BLOCKS_AT_ONCE)]
    if num_full * block < len(words) or not num_full:
        rest = words[num_full * block :]
        parts.append(torch.nn.functional.pad(rest, (0, block - len(rest)))[None])
    keys = _keys(words.device)
    return torch.cat([torch.stack([(part * keys[lane]).sum(dim=1) for lane in range(2)], dim=1) for part in parts])


def _words(data: torch.Tensor) -> torch.Tensor:
    """As int32, the last word filled with zeros; a copy only if a view is not possible."""
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    aligned = data if data.is_contiguous() and data.storage_offset() % 4 == 0 else data.clone()
    return aligned.view(torch.int32)


@lru_cache(maxsize=16)
def _column_keys(device: torch.device) -> torch.Tensor:
    """Odd int64 keys `[2, COLUMNS]`: splitmix64 of 1, 2, ..."""
    keys = [signed(mixed(i) | 1) for i in range(1, 2 * COLUMNS + 1)]
    return torch.tensor(keys, dtype=torch.int64).view(2, COLUMNS).to(device)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> torch.Tensor:
    """The key of each word of a block: int64 `[2, ROWS * COLUMNS]`."""
    powers = [[signed(pow(m, ROWS - 1 - r, 1 << 64)) for r in range(ROWS)] for m in MULTIPLIERS]
    return (torch.tensor(powers)[:, :, None].to(device) * _column_keys(device)[:, None, :]).flatten(1)


def mixed(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014) of a 64-bit number."""
    x = value * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
