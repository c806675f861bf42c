"""Buckets and their seals (R09): what is packed comes out again, and what was changed is no longer sealed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import SyncError
from shared.sync import buckets as weights
from shared.wire import TensorSpec

shapes = st.lists(st.integers(0, 7), max_size=3)
specs_strategy = st.lists(st.tuples(shapes, st.sampled_from(sorted(weights.DTYPES))), max_size=12).map(
    lambda items: [TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, (shape, dtype) in enumerate(items)]
)


@settings(deadline=None)
@given(specs_strategy, st.integers(1, 2000))
def test_plan_keeps_order_and_bounds(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = weights.plan_buckets(specs, bucket_bytes)
    assert [spec for bucket in plan for spec in bucket] == specs
    assert all(bucket for bucket in plan)
    assert all(weights.num_bucket_bytes(bucket) <= bucket_bytes or len(bucket) == 1 for bucket in plan)


def test_what_lies_between_tensors_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels and is digested like all other bytes: nothing of this process's memory may be in it."""
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.full((size,), 255, dtype=dtype))
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(5), "c": torch.ones(1, dtype=torch.bfloat16)}
    specs = [weights.spec_of(name, tensor) for name, tensor in tensors.items()]
    buffer = weights.pack(specs, tensors, "cpu")
    for _, view in weights.unpack(buffer, specs):
        start = view.storage_offset() * view.element_size()
        buffer[start : start + view.nbytes] = 0
    assert not buffer[: weights.num_bucket_bytes(specs)].any()


@settings(deadline=None)
@given(specs_strategy)
def test_what_is_packed_comes_out_again(specs: list[TensorSpec]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        spec.name: torch.randint(0, 2, spec.shape, generator=generator).to(weights.DTYPES[spec.dtype]) for spec in specs
    }
    buffer = weights.pack(specs, tensors, "cpu")
    out = dict(weights.unpack(buffer, specs))
    assert list(out) == [spec.name for spec in specs]
    for name, tensor in tensors.items():
        assert out[name].dtype == tensor.dtype
        assert out[name].shape == tensor.shape
        assert out[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))
        assert out[name].data_ptr() % weights.ALIGNMENT_BYTES == buffer.data_ptr() % weights.ALIGNMENT_BYTES
    weights.seal(buffer, key=b"ours", ver=3, index=1)
    assert weights.is_sealed(buffer, key=b"ours", ver=3, index=1)
    assert not weights.is_sealed(buffer, key=b"ours", ver=3, index=2)
    assert not weights.is_sealed(buffer, key=b"ours", ver=2, index=1)
    weights.seal(buffer, key=b"a stranger's", ver=3, index=1)
    assert not weights.is_sealed(buffer, key=b"ours", ver=3, index=1)
    assert list(dict(weights.unpack(buffer, specs))) == list(tensors)


def test_gaps_are_the_same_in_every_pack() -> None:
    """Fresh memory holds anything; the bytes between tensors are sent and digested too."""
    specs = [weights.spec_of("a", torch.zeros(3)), weights.spec_of("b", torch.zeros(1, dtype=torch.uint8))]
    tensors = {"a": torch.ones(3), "b": torch.ones(1, dtype=torch.uint8)}
    buffers = []
    for filler in (0, 255):
        torch.full((48,), filler, dtype=torch.uint8)
        buffers.append(weights.pack(specs, tensors, "cpu")[: -weights.SEAL_BYTES])
    assert buffers[0].equal(buffers[1])
    assert buffers[0].tolist() == [0, 0, 128, 63] * 3 + [0] * 4 + [1] + [0] * 15


def test_pack_casts_to_the_dtype_that_travels() -> None:
    tensor = torch.randn(5)
    spec = weights.spec_of("w", tensor, torch.bfloat16)
    buffer = weights.pack([spec], {"w": tensor}, "cpu")
    assert dict(weights.unpack(buffer, [spec]))["w"].equal(tensor.bfloat16())


def test_wrong_tensors_are_refused() -> None:
    spec = weights.spec_of("w", torch.zeros(4))
    with pytest.raises(SyncError, match="no such tensor"):
        weights.pack([spec], {}, "cpu")
    with pytest.raises(SyncError, match=r"shape \[1, 4\]"):
        weights.pack([spec], {"w": torch.zeros(1, 4)}, "cpu")
    with pytest.raises(SyncError, match="wrong size"):
        list(weights.unpack(torch.zeros(17, dtype=torch.uint8), [spec]))
    with pytest.raises(SyncError, match="complex64"):
        weights.num_tensor_bytes(TensorSpec(name="c", dtype="complex64", shape=[1]))
