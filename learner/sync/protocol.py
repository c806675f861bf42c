"""How trained weights reach whoever generates. One protocol for servers and for colocated engines."""

from __future__ import annotations

from typing import Protocol

from learner.records import SyncReceipt


class Sync(Protocol):
    """`ver` counts completed syncs. `sync` brings every generator to the policy's weights, on all ranks, and checks
    them; it raises on every rank where one failed. No rollout is made by weights whose sync did not complete."""

    ver: int

    def sync(self) -> SyncReceipt: ...

    def close(self) -> None: ...
