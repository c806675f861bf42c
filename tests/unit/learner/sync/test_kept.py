"""The learner's copy, and the memory that changes of it take (R09)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from learner.sync import kept
from learner.sync.kept import KeptWeights, Outgoing
from shared.sync.buckets import SEAL_BYTES, seal

KEY, CPU = bytes(32), torch.device("cpu")
NUM_BYTES, NUM_BUCKETS = 1 << 12, 8


def buckets(ver: int, share: float) -> list[torch.Tensor]:
    """Return sealed buckets in which this share of the words is `ver`."""
    made = []
    for index in range(NUM_BUCKETS):
        bucket = torch.zeros(NUM_BYTES + SEAL_BYTES, dtype=torch.uint8)
        words = bucket[:-SEAL_BYTES].view(torch.int16)
        words[: int(share * len(words))] = ver
        seal(bucket, key=KEY, ver=ver, index=index)
        made.append(bucket)
    return made


def outgoing(weights: KeptWeights, ver: int, share: float) -> Outgoing:
    def packed(room: torch.Tensor | None) -> Iterator[torch.Tensor]:
        return iter(buckets(ver, share))

    return weights.outgoing(packed, key=KEY, ver=ver, device=CPU)


def test_changes_are_not_made_once_they_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait until it is known that they pay, and would take nearly as much memory as the weights."""
    encoded: list[int] = []
    encode = kept.encode

    def counted(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
        changes = encode(new, old)
        encoded.append(new.numel() if changes is None else changes.numel())
        return changes

    monkeypatch.setattr(kept, "encode", counted)
    weights = KeptWeights()
    list(outgoing(weights, 1, 1.0).parcels)
    weights.acknowledge("v1")
    found = outgoing(weights, 2, 0.93)
    assert found.delta is None
    assert "of the bytes" in found.full_because
    assert sum(encoded[:-1]) < kept.PAYS_BELOW * NUM_BYTES * NUM_BUCKETS <= sum(encoded)
    assert len(encoded) < NUM_BUCKETS
    wanted = buckets(2, 0.93)
    for parcel, bucket in zip(found.parcels, wanted, strict=True):
        assert parcel.travels.equal(bucket)
        assert parcel.seal.equal(bucket[-SEAL_BYTES:])
    weights.acknowledge("v2")
    same = outgoing(weights, 2, 0.93).delta
    assert same is not None, "all of it was kept"
    assert sum(same.sizes) < NUM_BYTES * NUM_BUCKETS // 10


def test_the_copy_ends_where_the_host_has_no_room_for_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights travel all the same, then and in later syncs, and what was kept is free again."""
    room = iter([1 << 40, 1 << 40])
    monkeypatch.setattr(kept, "available_bytes", lambda: next(room, 0))
    released: list[int] = []
    weights = KeptWeights()
    monkeypatch.setattr(kept, "release_page_locked", lambda: released.append(len(weights._buckets)))
    for ver in (1, 2):
        found = outgoing(weights, ver, 1.0)
        for parcel, bucket in zip(found.parcels, buckets(ver, 1.0), strict=True):
            assert parcel.travels.equal(bucket)
        weights.acknowledge(f"v{ver}")
        assert released[-1] == 0
    assert found.delta is None
    assert "no room" in found.full_because


def test_memory_that_cuda_does_not_give_ends_the_copy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is counted as torch takes it: the next power of two."""

    def refused(bucket: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    on_cuda = SimpleNamespace(device=torch.device("cuda:0"), numel=lambda: NUM_BYTES + SEAL_BYTES)
    monkeypatch.setattr(kept, "_page_locked", refused)
    for room, reason in ((2 * NUM_BYTES - 1, "room for"), (2 * NUM_BYTES, "CUDA error: out of memory")):
        monkeypatch.setattr(kept, "available_bytes", lambda room=room: kept.SPARE_BYTES + room)
        weights = KeptWeights()
        weights._keep(on_cuda)  # type: ignore[arg-type]
        assert reason in weights.no_room
        assert "more\n" not in weights.no_room


def test_memory_that_torch_keeps_from_an_earlier_copy_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the old copy is dropped, but torch still has its page-locked memory. That is no want of room."""
    free = [0, kept.SPARE_BYTES + 2 * NUM_BYTES]
    monkeypatch.setattr(kept, "available_bytes", lambda: free[0])
    monkeypatch.setattr(kept, "release_page_locked", lambda: free.pop(0))
    monkeypatch.setattr(kept, "_page_locked", lambda bucket: torch.zeros(bucket.numel(), dtype=torch.uint8))
    weights = KeptWeights()
    weights._keep(SimpleNamespace(device=torch.device("cuda:0"), numel=lambda: NUM_BYTES + SEAL_BYTES))  # type: ignore[arg-type]
    assert weights.no_room == ""
    assert [one.numel() for one in weights._buckets] == [NUM_BYTES + SEAL_BYTES]
