"""The merge of a plain LoRA on CUDA, in one kernel.

In: a layer's weight `[out, in]`, the halves B `[out, rank]` and A `[rank, in]` in float32, the scaling. Out: their sum,
rounded. The product stays in registers, so the weight is read once and written once. torch writes and reads the product
in float32 between its two kernels: three times the bytes in all where both weights are bfloat16.

Invariant: the values are torch's to the bit. A product's bits depend on the order of its additions, which cuBLAS does
not promise. So for each shape and type the kernel is proven once against torch's two, with random halves, and timed
beside them. It is used where its bits are the same and it is faster. Nothing is proven while a graph is captured, since
a proof waits for the device; a shape that is not known then is merged by torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("learner.policy")
TIMED = 5  # calls, after one that compiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How the kernel cuts a weight. `dot`: by triton's product of blocks of the rank; otherwise one rank at a time."""

    rows: int
    columns: int
    warps: int
    dot: bool


TILINGS = (
    Tiling(rows=128, columns=128, warps=8, dot=True),
    Tiling(rows=64, columns=128, warps=4, dot=True),
    Tiling(rows=64, columns=128, warps=4, dot=False),
)
_RANKS = 16  # ranks in a block of a product
Key = tuple[torch.device, int, int, int, torch.dtype, torch.dtype]
_PROVEN: dict[Key, int | None] = {}  # index of the fastest tiling that is right; None: torch is faster


def merged(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return `base + scaling * (b @ a)` in `dtype`; None where torch has to do it. `scaling` is a power of two, so that
    its product is exact."""
    if not all(one.is_contiguous() for one in (base, a, b)):
        return None
    key = base.device, *base.shape, len(a), base.dtype, dtype
    if key not in _PROVEN:
        if torch.cuda.is_current_stream_capturing():
            return None
        # Whoever watches operations must not see a proof's.
        with torch.no_grad(), _disable_current_modes(), _current(base):
            try:
                _PROVEN[key] = _proven(base, a, b, scaling, dtype)
            except torch.OutOfMemoryError:
                log.info("merges of %s, rank %d, are by torch: no memory for a proof", [*base.shape], len(a))
                _PROVEN[key] = None
    tiling = _PROVEN[key]
    return None if tiling is None else _merge_lora(base, a, b, scaling, dtype, tiling)


# An operation of torch's, so that whoever watches operations sees what the merged weight is made of (`pass_graph.py`).
@torch.library.custom_op("learner::merge_lora", mutates_args=())
def _merge_lora(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype, tiling: int
) -> torch.Tensor:
    return launch(base, a, b, scaling, dtype, TILINGS[tiling])


def launch(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype, tiling: Tiling
) -> torch.Tensor:
    """Return the merged weight; launched, and not waited for."""
    found = torch.empty_like(base, dtype=dtype)
    num_out, num_in = base.shape
    grid = triton.cdiv(num_out, tiling.rows), triton.cdiv(num_in, tiling.columns)
    with _current(base):
        _merge[grid](
            base,
            a,
            b,
            found,
            num_out,
            num_in,
            scaling,
            RANK=len(a),
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            RANKS=_RANKS,
            DOT=tiling.dot,
            num_warps=tiling.warps,
        )
    return found


def _current(base: torch.Tensor) -> torch.cuda.device:
    """Kernels and events are the current device's."""
    return torch.cuda.device(base.device if base.is_cuda else -1)


def by_torch(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the merged weight by torch's two kernels."""
    delta = b @ a
    return torch.add(base, delta, alpha=scaling, out=torch.empty_like(delta, dtype=dtype))


def _proven(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype) -> int | None:
    """Return the index of the fastest tiling whose bits are torch's; None if torch is faster."""
    # The halves are random, because B is zero at the beginning of a run, and any order gives zero then. The generator
    # is a new one, so training draws what it would have drawn.
    generator = torch.Generator(base.device).manual_seed(0)
    a, b = (torch.randn(one.shape, generator=generator, device=base.device) for one in (a, b))
    zeros = torch.zeros_like(base)
    best, best_ms = None, _milliseconds(partial(by_torch, base, a, b, scaling, dtype))
    torch_ms = best_ms
    for i, tiling in enumerate(TILINGS):
        try:
            # Without a weight below and in float32, no bit of the product is rounded away.
            same = torch.equal(launch(zeros, a, b, 1.0, torch.float32, tiling), b @ a) and torch.equal(
                launch(base, a, b, scaling, dtype, tiling), by_torch(base, a, b, scaling, dtype)
            )
            ms = _milliseconds(partial(launch, base, a, b, scaling, dtype, tiling))
        except Exception as error:  # triton raises errors of any type where it cannot compile
            log.info("%s is not usable for merges: %s: %s", tiling, type(error).__name__, str(error)[:200])
            continue
        log.info("a merge of %s, rank %d, by %s: %.3f ms, bits as torch: %s", [*base.shape], len(a), tiling, ms, same)
        if same and ms < best_ms:
            best, best_ms = i, ms
    chosen = "torch" if best is None else TILINGS[best]
    log.info("merges of %s, rank %d, are by %s: %.3f ms, torch %.3f", [*base.shape], len(a), chosen, best_ms, torch_ms)
    return best


def _milliseconds(work: Callable[[], torch.Tensor]) -> float:
    """Return the fastest of a few calls, on the device."""
    work()
    found = []
    for _ in range(TIMED):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    base: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    merged,
    num_out,
    num_in,
    scaling,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DOT:
        for first in range(0, RANK, RANKS):
            rank = first + tl.arange(0, RANKS)
            b_mask = (row < num_out)[:, None] & (rank < RANK)[None, :]
            a_mask = (rank < RANK)[:, None] & (column < num_in)[None, :]
            left = tl.load(b + row[:, None] * RANK + rank[None, :], mask=b_mask, other=0.0)
            right = tl.load(a + rank[:, None].to(tl.int64) * num_in + column[None, :], mask=a_mask, other=0.0)
            # In float32, not in the shorter type of the tensor cores.
            product = tl.dot(left, right, product, input_precision="ieee")
    else:
        for one in range(RANK):
            left = tl.load(b + row * RANK + one, mask=row < num_out, other=0.0)
            right = tl.load(a + column + one * num_in, mask=column < num_in, other=0.0)
            product += left[:, None] * right[None, :]
    at = row[:, None] * num_in + column[None, :]
    mask = (row < num_out)[:, None] & (column < num_in)[None, :]
    value = tl.load(base + at, mask=mask, other=0.0).to(tl.float32) + product * scaling
    tl.store(merged + at, value.to(merged.dtype.element_ty), mask=mask)
