"""Buckets, in which a learner sends weights to servers: which tensors share a bucket, its layout and its seal.

In: named tensors. Out: contiguous byte buffers (`pack`), and the tensors as views into them (`unpack`). The layout
depends on the specs alone, so only specs are sent with the bytes: tensors in order, each at the next multiple of 16
bytes. The last 16 bytes are the seal: the digest (`digest.py`) of all bytes before it, under the group's key, for the
version and the bucket's index. So the seal does not match if a byte has changed, or if the bucket is of another group,
update or index. Nobody can make a seal without the group's secret. Learner and server compute the seal on the device
that holds the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from shared.errors import SyncError
from shared.sync.digest import digest
from shared.wire import TensorSpec

ALIGNMENT_BYTES = 16
SEAL_BYTES = 16
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


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the name, dtype and shape of a tensor for the other side. `dtype`: the dtype to send the tensor in; None:
    its own dtype."""
    return TensorSpec(name=name, dtype=str(dtype or tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def num_tensor_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize


def num_bucket_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of a bucket with these tensors: tensors and the gaps that align them, but not the seal after
    them."""
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


def pack(
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device | str,
) -> torch.Tensor:
    """Return the bucket of these tensors: uint8 `[num_bucket_bytes(specs) + SEAL_BYTES]` on `device`. Tensors are cast
    to the specs' dtypes. The seal is not yet written.

    Raises SyncError if a tensor is missing or has another shape than its spec.
    """
    buffer = torch.empty(num_bucket_bytes(specs) + SEAL_BYTES, dtype=torch.uint8, device=device)
    views = [view for _, view in unpack(buffer, specs)]
    for spec, view in zip(specs, views, strict=True):
        if gap := -num_tensor_bytes(spec) % ALIGNMENT_BYTES:
            end = view.storage_offset() * view.element_size() + num_tensor_bytes(spec)
            # The digest covers the gaps too, so their bytes must be fixed.
            buffer[end : end + gap] = 0
    if views:
        # One call copies all tensors. Single copies would each need a launch by the host.
        torch._foreach_copy_(views, [_fitting(spec, tensors.get(spec.name)) for spec in specs])
    return buffer


def _fitting(spec: TensorSpec, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None or list(tensor.shape) != spec.shape:
        raise SyncError(
            f"tensor {spec.name!r} does not fit its place in the bucket",
            found="no such tensor" if tensor is None else f"shape {list(tensor.shape)}",
            wanted=f"shape {spec.shape}",
            remedy="plan the buckets from the same tensors that are packed",
        )
    return tensor


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bucket's tensors by name, in order, as views into `buffer` (uint8, 1-D, contiguous).

    Raises SyncError if the buffer's size does not fit the specs.
    """
    if buffer.numel() != num_bucket_bytes(specs) + SEAL_BYTES:
        raise SyncError(
            "a bucket has the wrong size",
            found=f"{buffer.numel()} bytes",
            wanted=f"{num_bucket_bytes(specs) + SEAL_BYTES} bytes for {len(specs)} tensors and their seal",
            remedy="plan and unpack with the same specs",
        )
    start = 0
    for spec in specs:
        end = start + num_tensor_bytes(spec)
        yield spec.name, buffer[start:end].view(_dtype(spec)).view(spec.shape)
        start = _aligned(end)


def seal_key(secret: bytes) -> bytes:
    """Return the 32-byte key with which a group's buckets are sealed, derived from the group's secret."""
    return hmac.digest(secret, b"seal", hashlib.sha256)


def seal(buffer: torch.Tensor, *, key: bytes, ver: int, index: int) -> None:
    """Write the seal into the last bytes of `buffer`, the bucket `index` of the update to version `ver`. Does not wait
    for the device."""
    # The seal goes into the bucket's own memory, so that it is sent with the bytes and the host never waits for it.
    buffer[-SEAL_BYTES:].view(torch.int64).copy_(_seal(buffer, key, ver, index))


def is_sealed(buffer: torch.Tensor, *, key: bytes, ver: int, index: int) -> bool:
    """Return True if the bucket's bytes match its seal. Waits for the device, once."""
    return torch.equal(buffer[-SEAL_BYTES:].view(torch.int64), _seal(buffer, key, ver, index))


def _seal(buffer: torch.Tensor, key: bytes, ver: int, index: int) -> torch.Tensor:
    # Version and index make each nonce unique under one key, which the digest's security needs.
    return digest(buffer[:-SEAL_BYTES], key, struct.pack("<QQ", ver, index))


def digest_of(seals: Iterable[torch.Tensor]) -> str:
    """Return the digest of all weights of an update, made of the seals of its buckets."""
    return hashlib.blake2b(torch.cat(list(seals)).cpu().numpy().tobytes(), digest_size=16).hexdigest()


class WeightsDigest:
    """Keeps the digest of the served base weights. The learner and its servers compute the same digests. `base`: the
    digest before the first update."""

    def __init__(self, base: str = "") -> None:
        self._base = base

    def after(self, mode: Literal["full", "adapter"], digest: str) -> str:
        """Return the digest of the weights that are served after an update. `digest`: of the update's own weights."""
        if mode == "full":
            self._base = digest
            return digest
        # Answers depend on the adapter and on the base weights, so the adapter's digest covers both.
        return hashlib.blake2b(f"{self._base} {digest}".encode(), digest_size=16).hexdigest()


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
        ).as_status(400)
    return dtype
