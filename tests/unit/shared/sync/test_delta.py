"""Changes of a bucket (R09): applied to the old bytes they give the new ones, bit for bit, or an error."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import SyncError
from shared.sync import delta
from shared.sync.buckets import pack, spec_of

SMALL = 64  # words of a segment, so that a small bucket has several


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SEGMENT_WORDS", SMALL)


def changed(old: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Return a copy in which about this share of the 16-bit words differs."""
    random_ = random.Random(seed)
    new = old.clone()
    words = new.view(torch.int16)
    for i in range(len(words)):
        if random_.random() < share:
            words[i] ^= random_.randrange(1, 1 << 15)
    return new


def bucket(num_words: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2 * num_words,), dtype=torch.uint8, generator=generator)


def after(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return what a receiver has that gets the changes, or the whole bucket where those are no shorter."""
    changes = delta.encode(new, old)
    if changes is None:
        return new.clone()
    assert changes.numel() < new.numel()
    kept = old.clone()
    delta.patch(kept, changes)
    return kept


def reference(new: torch.Tensor, old: torch.Tensor) -> int:
    """Return the bytes of the shortest encoding, word by word, as the module's docstring has it."""
    now, before = new.view(torch.int16).tolist(), old.view(torch.int16).tolist()
    total = 0
    for start in range(0, len(now), SMALL):
        words = range(start, min(start + SMALL, len(now)))
        gaps, since, values = 0, 0, 0
        for i in words:
            if now[i] == before[i]:
                since += 1
                continue
            gaps += since // 255 + 1
            values, since = values + 1, 0
        bits, all_words = len(words) // 8, 2 * len(words)
        total += 12 + min(gaps + gaps % 2 + 2 * values, bits + bits % 2 + 2 * values, all_words)
    return -(-total // 16) * 16


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.sampled_from([0.0, 0.004, 0.05, 0.125, 0.3, 0.9, 1.0]) | st.floats(0, 1), st.integers(0))
def test_the_new_bytes_come_out_whatever_share_has_changed(eighths: int, share: float, seed: int) -> None:
    old = bucket(8 * eighths, seed % 1000)
    new = changed(old, share, seed)
    assert torch.equal(after(old, new), new)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 50), st.floats(0, 1), st.integers(0))
def test_it_is_as_short_as_its_forms_allow(eighths: int, share: float, seed: int) -> None:
    old = bucket(8 * eighths, seed % 1000)
    new = changed(old, share, seed)
    changes, wanted = delta.encode(new, old), reference(new, old)
    if changes is None:
        assert wanted >= new.numel()
    else:
        # The form is chosen before places are filled up to an even number: at most a byte a segment is lost.
        assert wanted <= changes.numel() <= wanted + -(-len(new) // (2 * SMALL)) + 16


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.sampled_from([0.0, 0.004, 0.05, 0.125, 0.3]) | st.floats(0, 1), st.integers(0))
def test_a_segment_on_cpu_becomes_what_it_becomes_on_a_gpu(eighths: int, share: float, seed: int) -> None:
    """Numpy's way and torch's give the same bytes, and read each other's."""
    old = bucket(8 * eighths, seed % 1000)
    new = changed(old, share, seed)
    kept = old.clone()
    for now, before, room in zip(*map(delta._segments, (new, old, kept)), strict=True):
        few, wanted = delta._few_changes(now, before), delta._changes(now, before)
        if few is None:  # many words differ, whichever form is the shortest
            assert share > 0.03
            delta._patch_segment(room, *wanted)
            continue
        assert few[0] == wanted[0] == delta._GAPS
        assert torch.equal(few[1], wanted[1])
        assert torch.equal(few[2], wanted[2])
        delta._patch_segment(before.clone(), *few)
        delta._patch_gaps(room, *wanted[1:])
    assert torch.equal(kept, new)


def test_segments_are_shared_by_threads_and_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    old = bucket(64 * SMALL)
    new = changed(old, 0.02, 1)
    found = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        found.append(delta.encode(new, old))
        assert torch.equal(after(old, new), new)
    assert torch.equal(*found)


@pytest.mark.parametrize("place", [0, 1, 63, 64, 254, 255, 256, 511, 1023])
@pytest.mark.parametrize("segment_words", [SMALL, 1 << 20])
def test_one_changed_value_is_found_wherever_it_is(
    place: int, segment_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SEGMENT_WORDS", segment_words)
    old = bucket(1024)
    new = old.clone()
    new.view(torch.int16)[place] ^= 1
    changes = delta.encode(new, old)
    assert changes is not None
    assert changes.numel() <= 12 * -(-1024 // segment_words) + 8 + 16
    assert torch.equal(after(old, new), new)


def test_equal_buckets_have_no_values() -> None:
    old = bucket(1024)
    changes = delta.encode(old.clone(), old)
    assert changes is not None
    assert changes.numel() == 12 * 1024 // SMALL
    assert torch.equal(after(old, old), old)


def test_a_bucket_that_is_new_throughout_travels_whole() -> None:
    old = bucket(512)
    assert delta.encode(old ^ 255, old) is None
    assert delta.encode(bucket(0), bucket(0)) is None


def test_a_segment_that_is_new_throughout_travels_whole_beside_others_that_are_not() -> None:
    old = bucket(8 * SMALL)
    new = old.clone()
    new[2 * SMALL : 4 * SMALL] ^= 255
    changes = delta.encode(new, old)
    assert changes is not None
    assert changes.numel() == 8 * 12 + 2 * SMALL
    assert torch.equal(after(old, new), new)


def test_nan_and_zero_are_compared_by_their_bits() -> None:
    """NaN is not equal to itself, and -0.0 equals 0.0: as numbers both would go wrong."""
    quiet, other = 0x7FC0, 0x7FC1  # two NaN of bfloat16
    old = torch.tensor([quiet, quiet, 0, 0, -32768, 1, 2, 3] * 32, dtype=torch.int16)
    new = old.clone()
    new[1], new[2], new[4] = other, -32768, 0
    old_bytes, new_bytes = old.view(torch.uint8), new.view(torch.uint8)
    assert old.view(torch.bfloat16)[0].isnan()
    changes = delta.encode(new_bytes, old_bytes)
    assert changes is not None
    assert changes.numel() == 64  # 12 a segment, three gaps, filled up to four bytes, and three values, filled up
    assert torch.equal(after(old_bytes, new_bytes), new_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64])
def test_buckets_of_any_type_and_shape(dtype: torch.dtype) -> None:
    before = {"a": torch.arange(21).reshape(3, 7), "b": torch.zeros(0, 4), "c": torch.tensor(5)}
    before = {name: tensor.to(dtype) for name, tensor in before.items()}
    now = before | {"c": torch.tensor(6).to(dtype)}
    specs = [spec_of(name, tensor) for name, tensor in before.items()]
    old, new = (pack(specs, tensors, "cpu")[:-16] for tensors in (before, now))
    assert torch.equal(after(old, new), new)


@settings(deadline=None, max_examples=200)
@given(st.floats(0, 0.4), st.integers(0), st.data())
def test_damaged_changes_are_an_error_or_other_bytes_and_never_reach_beyond(
    share: float, seed: int, data: st.DataObject
) -> None:
    """The seal tells other bytes. Here: nothing but SyncError is raised, and nothing beside the bucket is written."""
    room = bucket(8 * 40 + 16, seed % 1000)
    old = room[16:-16]
    changes = delta.encode(changed(old, share, seed), old)
    if changes is None:
        return
    damaged = changes.clone()
    damaged[data.draw(st.integers(0, damaged.numel() - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.sampled_from([damaged.numel(), damaged.numel() // 2, damaged.numel() - 1]))]
    edges = room[:16].clone(), room[-16:].clone()
    with contextlib.suppress(SyncError):
        delta.patch(old, damaged)
    assert torch.equal(room[:16], edges[0])
    assert torch.equal(room[-16:], edges[1])
