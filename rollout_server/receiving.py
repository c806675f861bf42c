"""One weight update as a worker sees it: receive a bucket, check its digest, load it, and the next (R09).

The next bucket is on its way while one is loaded. Invariants: nothing is loaded whose digest was wrong; `advance` ends
within about its slice plus one load; `close` may be called at any time, and leaves the model whole. Called by
`worker.py`, on vLLM's own thread, for the model is only touched there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from shared.communicator import Communicator
from shared.errors import DeadlineError, DigestError
from shared.operation import Operation
from shared.weights import digest, unpack
from shared.wire import Bucket, UpdateWeightsCall


class Load(Protocol):
    """Where the tensors go: `add` per bucket, then `finish`; `close` whatever happened."""

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def finish(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Receiving:
    def __init__(self, update: UpdateWeightsCall, communicator: Communicator, load: Load) -> None:
        self._update = update
        self._communicator = communicator
        self._load = load
        self._deadline = time.monotonic() + update.timeout_s
        self._num_loaded = 0
        self._result: dict[str, Any] | None = None
        self._incoming: tuple[torch.Tensor, Operation[None]] | None = None
        try:
            self._incoming = self._receive(0)
        except BaseException:
            load.close()  # nobody else will: this object is not handed out
            raise

    def advance(self, slice_s: float) -> dict[str, Any]:
        """`{"done": False}`, or the counts once all is loaded and every parameter accounted for.

        Raises DigestError, CoverageError, CommunicatorError or DeadlineError; the update has failed then.
        """
        until = time.monotonic() + slice_s
        while self._incoming is not None:
            buffer, operation = self._incoming
            if not operation.done(max(0.0, until - time.monotonic())):
                return {"done": False}
            bucket = self._update.buckets[self._num_loaded]
            self._check_digest(bucket, buffer)
            self._num_loaded += 1
            self._incoming = self._receive(self._num_loaded)
            self._load.add(unpack(buffer, bucket.tensors))
        if self._result is None:
            self._result = {"done": True} | self._load.finish()
        return self._result

    def close(self) -> None:
        """Give up what has not been done. May be called again."""
        if self._incoming is not None:
            self._communicator.abort()
            self._incoming = None
        self._load.close()

    def _receive(self, index: int) -> tuple[torch.Tensor, Operation[None]] | None:
        if index == len(self._update.buckets):
            return None
        bucket = self._update.buckets[index]
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(
                "the update did not end in time",
                found=f"{index} of {len(self._update.buckets)} buckets after {self._update.timeout_s:g} s",
                wanted="all of them",
                remedy="raise the learner's sync timeout",
            )
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._communicator.device)
        src = self._communicator.world_size - 1
        return buffer, self._communicator.start_broadcast(buffer, src, left_s)

    def _check_digest(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        found = digest(buffer)
        if found != bucket.digest:
            raise DigestError(
                f"bucket {self._num_loaded} of {len(self._update.buckets)} arrived with other bytes",
                found=f"digest {found} of {bucket.num_bytes} bytes",
                wanted=bucket.digest,
                remedy="sync again; if it happens again, look at the network and at the memory of both machines",
            )
