"""The learner's copy of what servers have staged last, and each new update as changes of it (R09).

In: an update's sealed buckets. Out: `Outgoing`: the buckets to send, whole or as changes (`shared.sync.delta`).
Invariants: changes are sent only if all servers of the group have acknowledged what is kept here, and the digest that
travels with them lets a server refuse them otherwise; after a failure, and for a group of other servers, all weights
travel. Changes are known before the first byte is sent, so an update that would not gain by them is sent whole.

The copy takes as many bytes of the host's memory as a full sync sends, and those of one bucket more. With the weights
on CUDA it is page-locked: each bucket takes the next power of two of its bytes, and no bucket more is needed. For 4.4
billion bfloat16 values in buckets of 512 MiB these are 8.9 GB, and 9.9 GB page-locked. Changes wait in the host's
memory too until all are known: up to PAYS_BELOW of a full sync's bytes, for the time of a sync. They do not stay on the
device. Where the copy does not fit, it is given up for the rest of the run, and all weights travel (`no_room`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from learner.policy.weights import checksum
from shared.sync.buckets import SEAL_BYTES
from shared.sync.delta import encode, patch, sealed
from shared.sync.host_memory import SPARE_BYTES, available_bytes, page_locked_bytes, release_page_locked, taking
from shared.wire import Delta

PAYS_BELOW = 0.8  # share of a full sync's bytes: applying changes takes some time too
FIRST = "it was the first full sync of this run"
_GB = 1e9
log = logging.getLogger("learner.sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A bucket on its way. `travels`: uint8 `[bytes]`, the bucket or its changes, with seals. `checksum` and `seal` are
    those of the whole bucket."""

    travels: torch.Tensor
    checksum: torch.Tensor
    seal: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """An update's buckets, to be sent in order. `delta`: if some of them are changes. `full_because`: why none is."""

    parcels: Iterable[Parcel]
    delta: Delta | None = None
    full_because: str = ""


def whole_parcels(buckets: Iterable[torch.Tensor]) -> Iterator[Parcel]:
    """Return each bucket as it is, sealed."""
    # The seal is copied: a view would keep the whole bucket in memory.
    return (
        Parcel(travels=bucket, checksum=checksum(bucket[:-SEAL_BYTES]), seal=bucket[-SEAL_BYTES:].clone())
        for bucket in buckets
    )


class KeptWeights:
    """The copy, and whether the servers have it too."""

    def __init__(self) -> None:
        self.no_room = ""  # why there is no copy for the rest of the run
        self._buckets: list[torch.Tensor] = []  # buckets with their seals, in the host's memory
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._base, self._missing_because = "", FIRST

    def forget(self, because: str) -> None:
        """Send all weights the next time."""
        if self._buckets:
            self._missing_because = because
        self._base, self._buckets = "", []

    def acknowledge(self, weights: str) -> None:
        """Note that all servers have what was last outgoing; `weights` is its digest."""
        self._base = "" if self.no_room else weights

    def outgoing(
        self,
        buckets: Callable[[torch.Tensor | None], Iterator[torch.Tensor]],
        *,
        key: bytes,
        ver: int,
        device: torch.device,
    ) -> Outgoing:
        """Return the next update, and keep it. It counts once it is acknowledged. `buckets`: the update's, each in the
        room that it is given, or in memory of its own."""
        base, self._base = self._base, ""
        if not base:
            self._buckets = []
            because = self.no_room or self._missing_because
            return Outgoing(parcels=self._kept_one_by_one(buckets(None)), full_because=because)
        found, sums, sizes = list[torch.Tensor | None](), list[torch.Tensor](), list[int]()
        most_bytes = PAYS_BELOW * sum(kept.numel() - SEAL_BYTES for kept in self._buckets)
        for kept, bucket in zip(self._buckets, buckets(self._room(device)), strict=True):
            new = bucket[:-SEAL_BYTES]
            sums.append(checksum(new))
            pays = sum(sizes) < most_bytes
            changes = encode(new, kept[:-SEAL_BYTES].to(device)) if pays else None
            if changes is None or device.type != "cpu":
                kept.copy_(bucket)
            else:
                patch(kept[:-SEAL_BYTES], changes)  # faster, and what the servers do
                kept[-SEAL_BYTES:] = bucket[-SEAL_BYTES:]
            if not pays:
                found.clear()  # they would take memory until the buckets are sent
                continue
            sizes.append(new.numel() if changes is None else changes.numel())
            if changes is not None:
                changes = sealed(changes, bucket[-SEAL_BYTES:], key=key, ver=ver, index=len(found)).cpu()
            found.append(changes)
        if sum(sizes) >= most_bytes:
            because = f"changes would have been {PAYS_BELOW:.0%} of the bytes or more"
            return Outgoing(parcels=self._again([None] * len(sums), sums, device), full_because=because)
        return Outgoing(parcels=self._again(found, sums, device), delta=Delta(base=base, sizes=sizes))

    def _room(self, device: torch.device) -> torch.Tensor | None:
        """Return where each bucket is packed: on CPU always in the same memory, because the kernel takes longer to give
        new memory than it takes to fill it. On CUDA torch keeps what was freed."""
        if device.type != "cpu":
            return None
        size = max(kept.numel() for kept in self._buckets)
        if self._scratch.numel() != size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch

    def _kept_one_by_one(self, buckets: Iterator[torch.Tensor]) -> Iterator[Parcel]:
        for bucket in buckets:
            if not self.no_room:
                with taking():
                    self._keep(bucket)
            yield from whole_parcels([bucket])

    def _keep(self, bucket: torch.Tensor) -> None:
        """Add a bucket to the copy. Without room for it the copy ends, and the sync goes on."""
        on_cpu = bucket.device.type == "cpu"  # then the copy is the bucket itself, which was allocated before
        taken, room = 0 if on_cpu else page_locked_bytes(bucket.numel()), available_bytes() - SPARE_BYTES
        if taken > room:
            release_page_locked()  # torch keeps that of a copy which was dropped after a failure
            room = available_bytes() - SPARE_BYTES
        if taken > room:
            self._give_up(f"{taken / _GB:.2f} GB more, and room for {max(0, room) / _GB:.2f} GB")
            return
        try:
            self._buckets.append(bucket if on_cpu else _page_locked(bucket))
        except RuntimeError as error:  # so CUDA refuses page-locked memory
            self._give_up(f"{taken / _GB:.2f} GB more could not be allocated: {str(error).splitlines()[0][:200]}")

    def _give_up(self, found: str) -> None:
        num_bytes = sum(kept.numel() for kept in self._buckets)
        self._buckets = []
        release_page_locked()
        self.no_room = (
            "the learner's host has no room for the copy of the weights that sync.delta needs: "
            f"{num_bytes / _GB:.2f} GB kept, {found}"
        )
        log.warning("full syncs from here on: %s. Free memory, or set sync.delta: off", self.no_room)

    def _again(
        self, changes: Sequence[torch.Tensor | None], sums: Sequence[torch.Tensor], device: torch.device
    ) -> Iterator[Parcel]:
        """Return the buckets that were kept just now, whole where there are no changes."""
        for bucket, changed, sum_ in zip(self._buckets, changes, sums, strict=True):
            travels = bucket if changed is None else changed
            yield Parcel(travels=travels.to(device), checksum=sum_, seal=bucket[-SEAL_BYTES:].to(device, copy=True))


def _page_locked(bucket: torch.Tensor) -> torch.Tensor:
    return torch.empty(bucket.numel(), dtype=torch.uint8, pin_memory=True).copy_(bucket)
