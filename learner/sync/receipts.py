"""Adapter syncs as long as they work, full syncs for the rest of the process afterwards (R08, R15).

In: the policy's adapter, and `sync.fallback_to_full`. Out: whether the adapter is still what is synced; why not, once.
Invariant: an error while the adapter is tried ends adapter syncs for good, and says so in one warning, or goes on as it
came. A resumed run begins with adapters again. Used by `weight_sync.py`, on rank 0, and by `colocate.py`, on all ranks,
which see the same errors and so decide alike.

How trained weights reach whoever generates. One protocol for servers and for colocated engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from learner.records import SyncReceipt
from learner.sync.source import AdapterSource
from shared.errors import ProjectError, SyncError


class Sync(Protocol):
    """`ver` counts completed syncs. `sync` brings every generator to the policy's weights, on all ranks, and checks
    them; it raises on every rank where one failed. No rollout is made by weights whose sync did not complete."""

    ver: int

    def sync(self) -> SyncReceipt: ...

    def close(self) -> None: ...


log = logging.getLogger("learner.sync")


class AdapterFallback:
    """`adapter`: what is synced; None: full syncs."""

    def __init__(self, adapter: AdapterSource | None, *, to_full: bool) -> None:
        self.adapter = adapter
        self._to_full, self._reason = to_full, ""

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Around whatever an adapter sync can fail at. After an error `adapter` is None and the caller goes on with a
        full sync; the error itself, where the configuration does not want that."""
        try:
            yield
        except ProjectError as error:
            if not self._to_full:
                raise
            self.adapter, self._reason = None, str(error)
            log.warning("adapter sync failed, full syncs from here on: %s", error)

    def tell(self) -> str:
        """For a receipt: why adapter syncs ended, the first time; empty afterwards, and where they did not."""
        reason, self._reason = self._reason, ""
        return reason


def check_plain(adapter: AdapterSource) -> None:
    """Raises SyncError where no engine could apply it."""
    if adapter.obstacle:
        raise SyncError(
            "the adapter can't be synced by itself",
            found=adapter.obstacle,
            wanted="plain LoRA on linear layers, and nothing else trained",
            remedy="set sync.mode: full (merged weights)",
        )
