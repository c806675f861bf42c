"""One weight update as a worker sees it: receive a bucket, check its seal, load it, and the next (R09).

The next buckets are on their way while one is checked and loaded. Invariants: nothing is loaded whose seal was wrong;
`advance` ends within about its slice plus one load; `close` may be called at any time, and leaves the model whole.
Called by `worker.py`, on vLLM's own thread, for the model is only touched there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from shared.communicator import Communicator
from shared.errors import DeadlineError, DigestError
from shared.operation import Operation
from shared.weights import SEAL_BYTES, is_sealed, unpack
from shared.wire import UpdateWeightsCall

AHEAD = 2  # buckets under way while another is loaded


class Load(Protocol):
    """Where the tensors go: `open`, `add` per bucket, then `finish`; `close` whatever happened."""

    @property
    def runs_meanwhile(self) -> bool:
        """Whether the model can run while it is loaded; with what weights, nobody knows."""

    def open(self) -> None: ...

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def finish(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Receiving:
    """Receives as soon as it is made; the model is first touched by `advance`."""

    def __init__(self, update: UpdateWeightsCall, communicator: Communicator, load: Load) -> None:
        self._update = update
        self._communicator = communicator
        self._load = load
        self._deadline = time.monotonic() + update.timeout_s
        self._num_asked = self._num_loaded = 0
        self._opened = False
        self._result: dict[str, Any] | None = None
        self._incoming: deque[tuple[torch.Tensor, Operation[None]]] = deque()
        self._receive()

    def advance(self, slice_s: float) -> dict[str, Any]:
        """`{"done": False}`, or the counts once all is loaded and every parameter accounted for.

        Raises DigestError, CoverageError, CommunicatorError or DeadlineError; the update has failed then.
        """
        until = time.monotonic() + slice_s
        if not self._opened:
            self._load.open()  # takes its time, while the first bytes are on their way
            self._opened = True
        while self._incoming:
            buffer, operation = self._incoming[0]
            if not operation.done(max(0.0, until - time.monotonic())):
                return {"done": False}
            self._incoming.popleft()
            self._receive()
            self._check_seal(buffer)
            self._load.add(unpack(buffer, self._update.buckets[self._num_loaded].tensors))
            self._num_loaded += 1
        if self._result is None:
            self._result = {"done": True} | self._load.finish()
        return self._result

    def close(self) -> None:
        """Give up what has not been done. May be called again."""
        if self._incoming:
            self._communicator.abort()
            self._incoming.clear()
        self._load.close()

    def _receive(self) -> None:
        """Ask for more buckets, up to AHEAD of the one that is loaded."""
        buckets, src = self._update.buckets, self._communicator.world_size - 1
        while self._num_asked < min(len(buckets), self._num_loaded + 1 + AHEAD):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    "the update did not end in time",
                    found=f"{self._num_loaded} of {len(buckets)} buckets after {self._update.timeout_s:g} s",
                    wanted="all of them",
                    remedy="raise the learner's sync timeout",
                )
            size = buckets[self._num_asked].num_bytes + SEAL_BYTES
            buffer = torch.empty(size, dtype=torch.uint8, device=self._communicator.device)
            self._incoming.append((buffer, self._communicator.start_broadcast(buffer, src, left_s)))
            self._num_asked += 1

    def _check_seal(self, buffer: torch.Tensor) -> None:
        index, ver = self._num_loaded, self._update.ver
        if not is_sealed(buffer, ver=ver, index=index):
            raise DigestError(
                f"bucket {index} of {len(self._update.buckets)} arrived with other bytes",
                found=f"{buffer.numel()} bytes whose digest is not that of their seal",
                wanted=f"the bytes that the learner sealed as bucket {index} of version {ver}",
                remedy="sync again; if it happens again, look at the network and at the memory of both machines",
            )
