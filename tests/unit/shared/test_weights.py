"""Buckets and their digests (R09): what is packed comes out again, and no changed byte keeps its digest."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import weights
from shared.errors import SyncError
from shared.wire import TensorSpec

MASK = (1 << 64) - 1


def reference_digest(data: bytes) -> str:
    """The digest as the docstring describes it, in plain integers."""
    hasher = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    for start in range(0, len(data), 4 << 20):
        chunk = data[start : start + (4 << 20)]
        chunk += bytes(-len(chunk) % 4096)
        words = [int.from_bytes(chunk[i : i + 4], "little", signed=True) for i in range(0, len(chunk), 4)]
        keyed = [word * key(i) for i, word in enumerate(words)]
        rows = [sum(keyed[i : i + 1024]) & MASK for i in range(0, len(keyed), 1024)]
        columns = [sum(keyed[i::1024]) & MASK for i in range(1024)]
        hasher.update(b"".join(value.to_bytes(8, "little") for value in rows + columns))
    return hasher.hexdigest()


def key(i: int) -> int:
    x = (i + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def as_buffer(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=9000))
def test_digest_equals_the_reference(data: bytes) -> None:
    assert weights.digest(as_buffer(data)) == reference_digest(data)


def test_digest_equals_the_reference_over_a_chunk_border() -> None:
    buffer = torch.randint(0, 256, ((4 << 20) + 4099,), dtype=torch.uint8, generator=torch.manual_seed(0))
    assert weights.digest(buffer) == reference_digest(buffer.numpy().tobytes())


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=9000), st.data())
def test_every_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert weights.digest(as_buffer(bytes(flipped))) != weights.digest(as_buffer(data))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=3000), st.data())
def test_every_swap_of_two_words_is_seen(words: list[int], draw: st.DataObject) -> None:
    i, j = draw.draw(st.integers(0, len(words) - 1)), draw.draw(st.integers(0, len(words) - 1))
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    before, after = (torch.tensor(w, dtype=torch.int32).view(torch.uint8) for w in (words, swapped))
    assert (weights.digest(before) == weights.digest(after)) == (words[i] == words[j])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 31)), min_size=2, max_size=2, unique=True))
def test_two_flipped_bits_anywhere_in_a_chunk_are_seen(flips: list[tuple[int, int]]) -> None:
    """Sign bits are the hard case: their differences are multiples of 2**31, where a plain 64-bit sum is weak."""
    words = torch.zeros(2**20, dtype=torch.int32)
    clean = weights.digest(words.view(torch.uint8))
    for index, bit in flips:
        words[index] ^= (
            torch.tensor(1 << bit).to(torch.int32) if bit < 31 else torch.tensor(-(2**31), dtype=torch.int32)
        )
    assert weights.digest(words.view(torch.uint8)) != clean


@pytest.mark.parametrize("cut", [1, 2, 4, 16, 4096])
def test_truncation_is_seen_even_of_zeros(cut: int) -> None:
    buffer = torch.zeros(3 * 4096, dtype=torch.uint8)
    assert weights.digest(buffer) != weights.digest(buffer[:-cut])


def test_digest_of_an_unaligned_slice_is_that_of_its_bytes() -> None:
    buffer = torch.arange(5000, dtype=torch.int64).to(torch.uint8)
    assert weights.digest(buffer[3:4999]) == weights.digest(buffer[3:4999].clone())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: compares digests of both devices")
def test_digest_is_the_same_on_cuda() -> None:
    buffer = torch.randint(0, 256, ((44 << 20) + 1237,), dtype=torch.uint8)
    assert weights.digest(buffer) == weights.digest(buffer.cuda())


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
    assert weights.seal(specs, buffer).digest == weights.digest(buffer)


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
