"""The digest of a bucket's bytes (R09): as it is described, and no changed byte keeps it."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sync import digest as digest_module
from shared.sync.digest import BLOCK_WORDS, LANES, PAIRS, digest
from tests.examples import examples

MASK = (1 << 64) - 1
BLOCK_BYTES = 4 * BLOCK_WORDS


def reference_digest(data: bytes, key: bytes = b"", nonce: bytes = b"") -> list[int]:
    """Return the digest as the docstring describes it, in plain integers."""
    level, sums = 0, reference_sums(data, key, 0)
    while len(sums) > 1:
        level += 1
        sums = reference_sums(b"".join(value.to_bytes(8, "little") for pair in sums for value in pair), key, level)
    content = len(data).to_bytes(8, "little") + nonce
    pad = hashlib.blake2b(content, key=key, person=b"digest pad", digest_size=16).digest()
    return [(value + int.from_bytes(pad[8 * i : 8 * i + 8], "little")) & MASK for i, value in enumerate(sums[0])]


def reference_sums(data: bytes, key: bytes, level: int) -> list[list[int]]:
    data += bytes(-len(data) % BLOCK_BYTES) or bytes(0 if data else BLOCK_BYTES)
    num_keys = PAIRS + LANES - 1
    seed = hashlib.blake2b(bytes([level]), key=key, person=b"digest keys").digest()
    stream = hashlib.shake_256(seed).digest(8 * num_keys)
    keys = [int.from_bytes(stream[i : i + 4], "little") for i in range(0, len(stream), 4)]
    sums = []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        words = [int.from_bytes(block[i : i + 4], "little") for i in range(0, BLOCK_BYTES, 4)]
        sums.append(
            [
                sum(
                    wrapped(words[p] + keys[p + lane]) * wrapped(words[PAIRS + p] + keys[num_keys + p + lane])
                    for p in range(PAIRS)
                )
                & MASK
                for lane in range(LANES)
            ]
        )
    return sums


def wrapped(value: int) -> int:
    """Return the value as a signed 32-bit number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def as_buffer(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def of(data: bytes | torch.Tensor, key: bytes = b"", nonce: bytes = b"") -> list[int]:
    buffer = data if isinstance(data, torch.Tensor) else as_buffer(data)
    return [value & MASK for value in digest(buffer, key, nonce).tolist()]


@settings(max_examples=10)
@given(st.binary(max_size=9000), st.binary(max_size=64), st.binary(max_size=32))
def test_digest_equals_the_reference(data: bytes, key: bytes, nonce: bytes) -> None:
    assert of(data, key, nonce) == reference_digest(data, key, nonce)


@pytest.mark.parametrize("num_bytes", [2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 4099])
def test_digest_equals_the_reference_over_a_block_s_border(num_bytes: int) -> None:
    buffer = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.manual_seed(0))
    assert of(buffer) == reference_digest(buffer.numpy().tobytes())


def test_threads_share_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: on CPU. Whoever sums a block, its sums land in its place."""
    buffer = torch.randint(0, 256, (7 * BLOCK_BYTES + 12,), dtype=torch.uint8, generator=torch.manual_seed(1))
    alone = of(buffer, b"k")
    monkeypatch.setattr(digest_module, "_BLOCKS_A_THREAD", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    names: set[str] = set()
    sum_blocks = digest_module._sum_blocks

    def noted(*args: Any) -> None:
        names.add(threading.current_thread().name)
        sum_blocks(*args)

    monkeypatch.setattr(digest_module, "_sum_blocks", noted)
    assert of(buffer, b"k") == alone
    assert names - {threading.current_thread().name}


def test_many_blocks_take_a_level_more() -> None:
    """Over 4096 blocks, whose sums fill more than one: a bit in the first and one in the last block count."""
    buffer = torch.zeros(4097 * BLOCK_BYTES, dtype=torch.uint8)
    clean = of(buffer)
    for at in (0, -1):
        buffer[at] = 1
        assert of(buffer) != clean
        buffer[at] = 0


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(min_size=1, max_size=9000), st.data())
def test_every_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert of(bytes(flipped)) != of(data)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=3000), st.data())
def test_every_swap_of_two_words_is_seen(words: list[int], draw: st.DataObject) -> None:
    i, j = draw.draw(st.integers(0, len(words) - 1)), draw.draw(st.integers(0, len(words) - 1))
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    before, after = (torch.tensor(w, dtype=torch.int32).view(torch.uint8) for w in (words, swapped))
    assert (of(before) == of(after)) == (words[i] == words[j])


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 31)), min_size=2, max_size=2, unique=True))
def test_two_flipped_bits_are_seen(flips: list[tuple[int, int]]) -> None:
    """Sign bits are the hard case: their differences are multiples of 2**31, where a plain sum is weak."""
    words = torch.zeros(2**20, dtype=torch.int32)
    clean = of(words.view(torch.uint8))
    for index, bit in flips:
        words[index] ^= (
            torch.tensor(1 << bit).to(torch.int32) if bit < 31 else torch.tensor(-(2**31), dtype=torch.int32)
        )
    assert of(words.view(torch.uint8)) != clean


@pytest.mark.parametrize("cut", [1, 2, 4, 16, 4096])
def test_truncation_is_seen_even_of_zeros(cut: int) -> None:
    buffer = torch.zeros(3 * 4096, dtype=torch.uint8)
    assert of(buffer) != of(buffer[:-cut])


def test_digest_of_an_unaligned_slice_is_that_of_its_bytes() -> None:
    buffer = torch.arange(5000, dtype=torch.int64).to(torch.uint8)
    assert of(buffer[3:4999]) == of(buffer[3:4999].clone())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: compares digests of both devices")
def test_digest_is_the_same_on_cuda() -> None:
    buffer = torch.randint(0, 256, ((44 << 20) + 1237,), dtype=torch.uint8)
    assert of(buffer) == of(buffer.cuda())


@settings(max_examples=20)
@given(*[st.tuples(st.binary(max_size=8), st.binary(max_size=8))] * 2)
def test_another_key_or_nonce_is_another_digest(one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> None:
    assert (of(b"bytes", *one) == of(b"bytes", *other)) == (one == other)


def test_a_key_is_needed_to_change_bytes_and_keep_the_digest() -> None:
    """What the sums' structure would let a stranger do without it: the same change to the sum in every lane."""
    buffer = torch.randint(0, 256, (3 * BLOCK_BYTES,), dtype=torch.uint8, generator=torch.manual_seed(0))
    changes = set()
    for key in (b"", b"ours", b"another"):
        changed = buffer.clone()
        changed.view(torch.int32)[5] += 1
        changes.add(tuple((b - a) & MASK for a, b in zip(of(buffer, key), of(changed, key), strict=True)))
    assert len(changes) == 3


def test_only_bytes_have_a_digest() -> None:
    for wrong in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(TypeError, match="1-D uint8"):
            digest(wrong)


def test_a_digest_stays_what_it_is() -> None:
    """Servers and learners of other releases compare theirs with it: a change is one of the protocol."""
    data = torch.arange(3 * BLOCK_WORDS + 5, dtype=torch.int64).to(torch.uint8)
    found = digest(data, key=b"key", nonce=b"nonce")
    assert found.tolist() == [-221435990828488029, 8594737423413783472]
