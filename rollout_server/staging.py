"""New weights that wait beside the model until they are served (R10).

In: an update's buckets, as they arrive, each after its seal was checked. Out: the same tensors, for `Loading` to put
into the model later. `Staging` is a `worker.Load` that only keeps what it is given: the model is not touched.

Invariants: buffers are allocated once, before the first byte is received, and used again by updates of the same
buckets; what does not fit beside the model, its KV cache and its activations is refused with the figures; nothing is
loaded that did not arrive whole.

An update may travel as changes of the weights that were staged last (`shared.sync.delta`). They are applied to the
buffers, which still hold those weights. What the model serves is not touched by that either.

With place `device` the bytes are received where they wait, so serving them is one copy on the device. With `host` they
wait in page-locked memory, and only the buckets under way are on the device. Each of these buffers takes the next power
of two of its bytes (`shared.sync.host_memory`), and that is what has to fit. Without a GPU both are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shared.errors import StagingError
from shared.sync.buckets import SEAL_BYTES, unpack
from shared.sync.delta import SEALS_BYTES, patch
from shared.sync.host_memory import SPARE_BYTES, available_bytes, page_locked_bytes, release_page_locked, taking
from shared.wire import Bucket, Delta, Place

_GB = 1e9


class Staging:
    """New weights on one worker, beside the model. `activation_bytes`: what the engine's largest batch needs of the
    device beside weights and KV cache; None: unknown, and all that torch holds is left to it. Raises StagingError if
    the buckets do not fit."""

    runs_meanwhile = True

    def __init__(
        self, buckets: Sequence[Bucket], place: Place, device: torch.device, *, activation_bytes: int | None = None
    ) -> None:
        self.place, self.sizes = place, [bucket.num_bytes + SEAL_BYTES for bucket in buckets]
        self.is_whole = False
        self.weights = ""  # the digest of what is kept, once it is whole
        self._delta: Delta | None = None
        self._device = device
        self._on_device = place == "device" or device.type == "cpu"
        self._buckets: Sequence[Bucket] = buckets
        self._num_kept = self._num_tensors = 0
        self._buffers: list[torch.Tensor] = []
        self._kept: list[list[tuple[str, torch.Tensor]]] = []  # views of the buffers
        with taking():
            if self._on_device:
                _check_fits(sum(self.sizes), device, activation_bytes)
            else:
                _check_fits(sum(map(page_locked_bytes, self.sizes)), torch.device("cpu"), None)
            self._allocate()

    def begin(self, buckets: Sequence[Bucket], place: Place, delta: Delta | None = None) -> bool:
        """Make room for another update, in the same memory; False if it needs other buffers, or other weights than
        are kept."""
        fits = place == self.place and self.sizes == [bucket.num_bytes + SEAL_BYTES for bucket in buckets]
        fits = fits and (delta is None or (self.is_whole and delta.base == self.weights))
        self.is_whole, self.weights, self._num_kept, self._num_tensors = False, "", 0, 0
        self._buckets, self._delta = buckets, delta
        return fits

    def travels_changed(self, index: int) -> bool:
        """Return True if bucket `index` comes as changes of the one that is kept."""
        return self._delta is not None and self._delta.sizes[index] < self._buckets[index].num_bytes

    def travel_size(self, index: int) -> int:
        """Return the bytes of bucket `index` on the wire, with its seals."""
        if self._delta is not None and self.travels_changed(index):
            return self._delta.sizes[index] + SEALS_BYTES
        return self.sizes[index]

    def patched(self, index: int, changes: torch.Tensor) -> torch.Tensor:
        """Apply changes, which must be those that the learner sealed; the new bucket with the seal that it must have,
        uint8 `[bytes]` on the device. Raises SyncError."""
        bucket = self._buffers[index].to(self._device)  # the buffer itself, if it is there
        patch(bucket[:-SEAL_BYTES], changes[:-SEALS_BYTES])
        bucket[-SEAL_BYTES:] = changes[-SEALS_BYTES:-SEAL_BYTES]
        return bucket

    def buffer(self, index: int) -> torch.Tensor | None:
        """Return the buffer that receives bucket `index`: uint8 `[bytes]`; None: any buffer, because the bucket is kept
        elsewhere."""
        return self._buffers[index] if self._on_device and not self.travels_changed(index) else None

    def kept(self) -> Sequence[Sequence[tuple[str, torch.Tensor]]]:
        """Return the tensors of each bucket, as checkpoint names and views. The weights must be whole."""
        assert self.is_whole, "loaded before everything had arrived"
        return self._kept

    # ---- as a load -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The model goes on to serve."""

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep the next bucket's tensors, which are views of its buffer."""
        arrived = [tensor for _, tensor in tensors]
        if not self._on_device and arrived:
            bucket = self._buckets[self._num_kept]
            places = [place for _, place in unpack(self._buffers[self._num_kept], bucket.tensors)]
            # runs in this stream's order, as all that reads them does
            torch._foreach_copy_(places, arrived, non_blocking=True)
        self._num_kept += 1
        self._num_tensors += len(arrived)

    def finish(self) -> int:
        """Return the number of tensors that are kept."""
        assert self._num_kept == len(self._buckets), "finished before everything had arrived"
        # Views of hundreds of tensors take milliseconds, in which rollouts need not wait yet.
        pairs = zip(self._buffers, self._buckets, strict=True)
        self._kept = [list(unpack(buffer, bucket.tensors)) for buffer, bucket in pairs]
        self.is_whole = True
        return self._num_tensors

    def close(self) -> None:
        """Nothing of the model is half done at any time."""

    def release(self) -> None:
        """Give the memory back. Not to be used again."""
        self.is_whole, self._buffers, self._kept = False, [], []
        if self._device.type == "cuda":
            # `_room` asks the driver, which counts blocks in torch's cache as taken.
            torch.cuda.empty_cache()
            release_page_locked()

    def _allocate(self) -> None:
        where = {"device": self._device} if self._on_device else {"device": "cpu", "pin_memory": True}
        # Zeros: what lies between tensors never comes where only tensors are copied, and seals cover it.
        allocate = torch.empty if self._on_device else torch.zeros
        try:
            for size in self.sizes:
                self._buffers.append(allocate(size, dtype=torch.uint8, **where))
                if self._device.type == "cpu":
                    self._buffers[-1].zero_()  # memory of the host is taken once it is written
        except RuntimeError as error:  # torch.OutOfMemoryError is one; so is what CUDA says of page-locked memory
            self.release()  # memory is short, and torch would keep what it got
            found = f"{sum(self.sizes) / _GB:.2f} GB could not be allocated: {str(error).splitlines()[0][:200]}"
            raise _refused(found, "as much memory in one piece per bucket", self._on_device) from error


def _check_fits(num_bytes: int, device: torch.device, activation_bytes: int | None) -> None:
    room, where = _room(device, activation_bytes)
    if num_bytes > room:
        found = f"{num_bytes / _GB:.2f} GB for weights, and room for {max(0, room) / _GB:.2f} GB {where}"
        raise _refused(found, "room for a second copy of the weights", device.type == "cuda")


def _room(device: torch.device, activation_bytes: int | None) -> tuple[int, str]:
    """Return the number of bytes that may be taken, and where."""
    if device.type != "cuda":
        return available_bytes() - SPARE_BYTES, "in the host's memory"
    free = torch.cuda.mem_get_info(device)[0] - SPARE_BYTES
    if activation_bytes is None:
        return free, f"on {device}"
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # Activations first take the blocks that torch holds and does not use. Only the rest needs free memory.
    room = min(free, free + unused - activation_bytes)
    return room, f"on {device}, beside {activation_bytes / _GB:.2f} GB for activations"


def _refused(found: str, wanted: str, on_gpu: bool) -> StagingError:
    smaller = "lower the server's gpu_memory_utilization, or set sync.staging: host" if on_gpu else "free memory"
    return StagingError(
        "the new weights do not fit beside those that are served",
        found=found,
        wanted=wanted,
        remedy=f"{smaller}, or set sync.staging: none (the server then pauses while weights arrive)",
    )
