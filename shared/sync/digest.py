"""Computes a 128-bit digest of bytes on the device that holds them, about as fast as memory is read.

In: a 1-D uint8 tensor, a key and a nonce. Out: an int64 tensor `[2]` on the same device, the same values on every kind
of device. The call does not wait for the device. Without the key, the digest of other bytes can be guessed with a
chance of at most about 2^-60, if every digest with one key has another nonce. With an empty key (`b""`) the digest only
detects accidents.

The method is the hash NH with its Toeplitz extension, applied as a tree, as in UMAC (Black, Halevi, Krawczyk et al.
1999). The bytes are read as signed 32-bit words, in blocks of 2 x PAIRS words. The last block is filled up with zeros.
Each block gives two sums, one per lane. The sum of lane j adds `(word[p] + key[0, p + j]) * (word[PAIRS + p] + key[1, p
+ j])` for all p. Each factor wraps in 32 bits, the sum in 64. The sums `[blocks, 2]` of all blocks are the bytes of the
next level, which has other keys. Levels are added until one block is left. A pad is added to the two sums of this last
block: a keyed hash of length and nonce (Carter and Wegman). On CUDA one kernel computes the sums (`digest_cuda.py`).
"""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

ROWS, COLUMNS, LANES = 8, 1024, 2
PAIRS = ROWS * COLUMNS
BLOCK_WORDS = 2 * PAIRS

_BLOCKS_AT_ONCE = 8  # blocks summed in one step on CPU; with more, temporaries do not fit its cache
_BLOCKS_A_THREAD = 64  # min blocks per thread; with fewer, a thread costs more than it saves


def digest(buffer: torch.Tensor, key: bytes = b"", nonce: bytes = b"") -> torch.Tensor:
    """Return the digest of a 1-D uint8 tensor. `key` has at most 64 bytes. Raises TypeError for another tensor."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise TypeError(f"digest takes a 1-D uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
    level = 0
    sums = _block_sums(buffer, key, level)
    while len(sums) > 1:
        level += 1
        sums = _block_sums(sums.view(-1).view(torch.uint8), key, level)
    first, second = _pad(key, nonce, buffer.numel())
    return torch.stack((sums[0, 0] + first, sums[0, 1] + second))


def _pad(key: bytes, nonce: bytes, num_bytes: int) -> tuple[int, int]:
    length = struct.pack("<Q", num_bytes)
    content = hashlib.blake2b(length + nonce, key=key, person=b"digest pad", digest_size=16).digest()
    first, second = struct.unpack("<qq", content)
    return first, second


def _block_sums(data: torch.Tensor, key: bytes, level: int) -> torch.Tensor:
    words = _words(data)
    keys = _keys(key, level, words.device)
    if words.is_cuda:
        from shared.sync.digest_cuda import block_sums  # triton takes a second to import, and CPU builds may lack it

        return block_sums(words, keys, rows=ROWS, columns=COLUMNS)
    num_full, block = len(words) // BLOCK_WORDS, BLOCK_WORDS
    found = [_full_block_sums(words[: num_full * block].view(num_full, 2, PAIRS), keys)]
    if num_full * block < len(words) or not num_full:
        rest = words[num_full * block :]
        padded = torch.nn.functional.pad(rest, (0, block - len(rest))).view(1, 2, PAIRS)
        found.append(_full_block_sums(padded, keys))
    return torch.cat(found)


def _full_block_sums(blocks: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sums of int32 `[blocks, 2, PAIRS]` on CPU, on as many threads as torch may use.

    Uses numpy, whose `einsum` multiplies and adds in one pass: torch would write each product to memory first.
    """
    sums = torch.empty(len(blocks), LANES, dtype=torch.int64)
    num_threads = max(1, min(torch.get_num_threads(), len(blocks) // _BLOCKS_A_THREAD))
    if num_threads == 1:
        _sum_blocks(blocks.numpy(), keys.numpy(), sums.numpy())
        return sums
    size = -(-len(blocks) // num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        shares = zip(blocks.split(size), sums.split(size), strict=True)
        list(threads.map(lambda share: _sum_blocks(share[0].numpy(), keys.numpy(), share[1].numpy()), shares))
    return sums


def _sum_blocks(blocks: NDArray[np.int32], keys: NDArray[np.int32], sums: NDArray[np.int64]) -> None:
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = blocks[start : start + _BLOCKS_AT_ONCE]
        for lane in range(LANES):
            first, second = (part[:, i] + keys[i, lane : lane + PAIRS] for i in range(2))  # int32 wraps around.
            # One pass reads 3.6 to 3.9 GB/s per thread. With the products written to memory, the rate was 0.3 to 2.3
            # GB/s.
            np.einsum("bp,bp->b", first, second, out=sums[start : start + len(part), lane], dtype=np.int64)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes as int32, the last word padded with zeros. Copies only if a view is not possible."""
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    # torch views bytes as words only where they begin at a multiple of 4.
    aligned = data if data.is_contiguous() and data.storage_offset() % 4 == 0 else data.clone()
    return aligned.view(torch.int32)


@lru_cache(maxsize=16)
def _keys(key: bytes, level: int, device: torch.device) -> torch.Tensor:
    """Return the keys of one level of the hash tree, int32 `[2, PAIRS + LANES - 1]`: row 0 for the first words of the
    pairs, row 1 for the second words. Lane j uses the keys from index j on."""
    num_keys = 2 * (PAIRS + LANES - 1)
    seed = hashlib.blake2b(bytes([level]), key=key, person=b"digest keys").digest()
    stream = bytearray(hashlib.shake_256(seed).digest(4 * num_keys))
    return torch.frombuffer(stream, dtype=torch.int32).view(2, -1).to(device)
