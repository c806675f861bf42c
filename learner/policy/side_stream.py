"""Work on the device beside what is launched after it.

In: work. Out: it begins once all that was launched before it has ended, and what is launched later does not wait for
it until `join`. Invariant: whoever changes what the work reads calls `join` first. The host never waits.

On CUDA the work gets a stream of its own. Its kernels must come from a graph: a graph's memory is its own, and so is
the workspace of its matrix products. Work that allocates otherwise would keep memory that the other stream cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One stream beside the current one of `device`, which is a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch what is inside on the side stream, after all that the current stream has been given so far."""
        if self._stream is None:
            # Made late: the engine makes and captures with streams of its own before, and torch hands out 32 in turn.
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait, from now on, for all work so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
