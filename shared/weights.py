"""Weights on their way from learner to server: which tensors share a bucket, how they lie in it, and its digest.

In: named tensors. Out: contiguous byte buffers (`pack`), views back into them (`unpack`), and a digest of the bytes
that both sides compute on the device where the bytes are. The layout follows from the specs alone, so only specs
travel: tensors in order, each at the next multiple of 16 bytes. Called by the learner's sync and the server's worker.

The digest (Carter-Wegman multilinear hashing, in rows and columns): the bytes are read as 32-bit words, in chunks of
1024 x 1024; word `i` of a chunk is multiplied with a fixed odd 64-bit key `k_i`, wrapping; every row and every column
is summed, wrapping; BLAKE2b over the length and all sums, chunk after chunk, is the digest. A change of one word, or of
any two, always changes a row's or a column's sum; wrapping sums do not depend on the order in which a device adds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch

from shared.errors import SyncError
from shared.wire import Bucket, TensorSpec

ALIGNMENT_BYTES = 16
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

_ROW_WORDS = 1024
_CHUNK_WORDS = 1024 * _ROW_WORDS
_CHUNKS_AT_ONCE = {"cpu": 1, "cuda": 8}  # bounds the temporaries: 8 MiB a chunk; launches cost more than memory on CUDA


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """What travels about a tensor; `dtype` is the one it travels in, where that is not its own."""
    return TensorSpec(name=name, dtype=str(dtype or tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def num_tensor_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize


def num_bucket_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the buffer that holds these tensors, gaps included."""
    end = 0
    for spec in specs:
        end = _aligned(end) + num_tensor_bytes(spec)
    return _aligned(end)


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Cut the tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    plan: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        size = _aligned(num_tensor_bytes(spec))
        if not plan or used + size > bucket_bytes:
            plan.append([])
            used = 0
        plan[-1].append(spec)
        used += size
    return plan


def pack(specs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """The bucket of these tensors: uint8 `[num_bucket_bytes(specs)]` on `device`, cast to the specs' dtypes.

    Raises SyncError where a tensor is missing or has another shape than its spec.
    """
    buffer = torch.zeros(num_bucket_bytes(specs), dtype=torch.uint8, device=device)
    for spec, (_, view) in zip(specs, unpack(buffer, specs), strict=True):
        tensor = tensors.get(spec.name)
        if tensor is None or list(tensor.shape) != spec.shape:
            raise SyncError(
                f"tensor {spec.name!r} does not fit its place in the bucket",
                found="no such tensor" if tensor is None else f"shape {list(tensor.shape)}",
                wanted=f"shape {spec.shape}",
                remedy="plan the buckets from the same tensors that are packed",
            )
        view.copy_(tensor)
    return buffer


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors by name, in order, as views into `buffer` (uint8, 1-D, contiguous).

    Raises SyncError where the buffer's size is not that of the specs.
    """
    if buffer.numel() != num_bucket_bytes(specs):
        raise SyncError(
            "a bucket has the wrong size",
            found=f"{buffer.numel()} bytes",
            wanted=f"{num_bucket_bytes(specs)} bytes for {len(specs)} tensors",
            remedy="plan and unpack with the same specs",
        )
    start = 0
    for spec in specs:
        end = start + num_tensor_bytes(spec)
        yield spec.name, buffer[start:end].view(_dtype(spec)).view(spec.shape)
        start = _aligned(end)


def seal(specs: Sequence[TensorSpec], buffer: torch.Tensor) -> Bucket:
    """The bucket's line of an update plan: its tensors, its size, its digest."""
    return Bucket(tensors=list(specs), num_bytes=buffer.numel(), digest=digest(buffer))


def digest(buffer: torch.Tensor) -> str:
    """128 bits, as 32 hex digits, of the bytes of `buffer` (uint8, 1-D, any device); see the module's docstring.

    Equal bytes give equal digests on every device. Raises TypeError for anything but a 1-D uint8 tensor.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise TypeError(f"digest takes a 1-D uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
    hasher = hashlib.blake2b(buffer.numel().to_bytes(8, "little"), digest_size=16)
    for chunks in _word_chunks(buffer):
        keyed = chunks * _keys(str(buffer.device))[: chunks.shape[1]]
        sums = torch.cat([keyed.sum(dim=2), keyed.sum(dim=1)], dim=1)
        hasher.update(sums.cpu().numpy().tobytes())
    return hasher.hexdigest()


def _word_chunks(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes as int32 words `[chunks, rows, 1024]`: full chunks, then the rest, its last row filled with zeros."""
    num_words = buffer.numel() // 4
    num_full = num_words // _CHUNK_WORDS
    step = _CHUNKS_AT_ONCE.get(buffer.device.type, 1)
    for first in range(0, num_full, step):
        count = min(step, num_full - first)
        piece = buffer[first * _CHUNK_WORDS * 4 : (first + count) * _CHUNK_WORDS * 4]
        yield _words(piece).view(count, _CHUNK_WORDS // _ROW_WORDS, _ROW_WORDS)
    rest = buffer[num_full * _CHUNK_WORDS * 4 :]
    if rest.numel():
        num_rows = -(-rest.numel() // (4 * _ROW_WORDS))
        padded = torch.zeros(num_rows * _ROW_WORDS * 4, dtype=torch.uint8, device=buffer.device)
        padded[: rest.numel()] = rest
        yield _words(padded).view(1, num_rows, _ROW_WORDS)


def _words(piece: torch.Tensor) -> torch.Tensor:
    # A slice at an odd address can't be viewed as words.
    aligned = piece if piece.is_contiguous() and piece.storage_offset() % 4 == 0 else piece.clone()
    return aligned.view(torch.int32)


@lru_cache(maxsize=16)
def _keys(device: str) -> torch.Tensor:
    """Odd int64 keys `[1024, 1024]`: splitmix64 of the word's index (Steele, Lea, Flood 2014)."""
    x = torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return ((x ^ _shifted(x, 31)) | 1).view(-1, _ROW_WORDS).to(device)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift: torch's is arithmetic


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise SyncError(
            f"tensor {spec.name!r} has a type that can't travel",
            found=spec.dtype,
            wanted=f"one of {', '.join(DTYPES)}",
            remedy="cast it before it is sent",
        )
    return dtype
