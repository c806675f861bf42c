"""Weight sync from the learner to every rollout server, in memory and checked (R08, R09, R10, R24; D1).

In: the policy's weights, and its adapter where adapters are synced. Out: a `SyncReceipt` on every rank. Invariants:
- only rank 0 talks to servers; all ranks do `barrier -> sync -> barrier`, and all learn rank 0's outcome, good or bad;
- `ver` rises with a completed sync and never otherwise; the backend accepts rollouts of that version only;
- complete means: every server has checked bytes and coverage, and its canary gap is within the tolerance;
- after a failed sync the first cause is raised with the server named, every group is aborted, and the next `sync` opens
  new ones under a new incarnation.

Adapter syncs send the adapter only. The first one after servers were joined sends them the weights below it before,
once, as a full update of its own version: nothing else is known about what a server holds, and it heals a poisoned one.
Where an adapter sync fails, `fallback.py` decides: full syncs from then on, the first of them at once, or the error.
Called by the trainer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from learner.config.schema import VllmConfig
from learner.records import SyncReceipt
from learner.rollout.servers import ServerBackend
from learner.sync.canary import CanaryItem, Scorer
from learner.sync.groups import StartJoin
from learner.sync.receipts import AdapterFallback, check_plain
from learner.sync.servers import Fleet, Mode, check_adapter
from learner.sync.source import AdapterSource, WeightSource
from shared.errors import ProjectError
from shared.sync import group as communicator

T = TypeVar("T")
log = logging.getLogger("learner.sync")


class Fence(Protocol):
    """What the ranks agree through; `learner.policy.parallel.Ranks` is one."""

    @property
    def is_main(self) -> bool: ...

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any) -> Any: ...


class WeightSync:
    """`canary` and `scorer` (of the canary's answers, as the learner has them now) are used on rank 0 only;
    `device` is where the policy's weights are. `adapter`: sync it alone, as long as that works; None: full syncs."""

    def __init__(
        self,
        backend: ServerBackend,
        weights: WeightSource,
        *,
        adapter: AdapterSource | None = None,
        config: VllmConfig,
        canary: Sequence[CanaryItem],
        scorer: Scorer,
        fence: Fence,
        device: torch.device,
        start_join: StartJoin = communicator.start_join,
    ) -> None:
        assert canary or not fence.is_main, "a sync without a canary is not checked"
        self.ver = 0
        self.receipts: list[SyncReceipt] = []
        self._backend, self._weights = backend, weights
        self._fallback = AdapterFallback(adapter, to_full=config.sync.fallback_to_full)
        self._canary, self._scorer = tuple(canary), scorer
        self._fence = fence
        self._fleet = Fleet(backend, config, device, start_join)
        self._base_is_served = False

    def connect(self) -> None:
        """Join the servers' groups; on all ranks, after the backend's `connect`. `sync` does it where needed.

        Raises CommunicatorError, DeadlineError or the server's own error; SyncError or ServerMismatchError where the
        adapter can't be served and there is no falling back.
        """
        self.ver = self._on_main(self._connect)

    def sync(self) -> SyncReceipt:
        """Bring every server to the policy's weights; on all ranks, which all return when all servers serve them.

        Raises SyncError (Communicator, Digest, Coverage, Canary), ServerError, DeadlineError: rank 0's, on every rank.
        """
        receipt = self._on_main(self._sync)
        self.ver = self._backend.expected_ver = receipt.ver
        self.receipts.append(receipt)
        return receipt

    def close(self) -> None:
        """Leave the groups; bounded in time. A server that no longer answers is only logged."""
        self._fleet.leave(abort=False)

    def _on_main(self, work: Callable[[], T]) -> T:
        self._fence.barrier()
        outcome: T | ProjectError | None = None
        if self._fence.is_main:
            try:
                outcome = work()
            except ProjectError as error:  # raised below, on every rank
                outcome = error
        shared = self._fence.broadcast_object(outcome)
        self._fence.barrier()
        if isinstance(outcome, ProjectError):
            raise outcome  # with its traceback
        if isinstance(shared, ProjectError):
            raise shared
        return shared

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _connect(self) -> int:
        """The version to count from: above all that the servers have seen, so that no old rollout passes for new."""
        ver = max(self.ver, self._fleet.connect())
        self._base_is_served = False
        if (adapter := self._fallback.adapter) is not None:
            with self._leaving_on_failure(), self._fallback.trying():
                self._check_adapter(adapter)
        log.info("sync mode %s", "full" if self._fallback.adapter is None else "adapter")
        return ver

    def _sync(self) -> SyncReceipt:
        if not self._fleet.connected:
            self.ver = self._connect()
        begin = time.monotonic()
        if (adapter := self._fallback.adapter) is not None:
            with self._fallback.trying():
                return self._deliver_adapter(adapter, begin)
            self.ver = self._connect()
        return self._deliver(self._weights, "full", begin)

    def _deliver_adapter(self, adapter: AdapterSource, begin: float) -> SyncReceipt:
        if not self._base_is_served:
            with self._leaving_on_failure():
                self._fleet.send(adapter.base, mode="full", ver=self.ver + 1)
            self.ver += 1
            self._base_is_served = True
            log.info("the weights below the adapter were sent, as version %d", self.ver)
        return self._deliver(adapter, "adapter", begin)

    def _deliver(self, source: WeightSource, mode: Mode, begin: float) -> SyncReceipt:
        with self._leaving_on_failure():
            ver = self.ver + 1
            sent = self._fleet.send(source, mode=mode, ver=ver, canary=self._canary, scorer=self._scorer)
            gap = self._fleet.check_canary(self._canary, sent)
        receipt = SyncReceipt(
            ver=ver,
            mode=mode,
            seconds=time.monotonic() - begin,
            num_bytes=sent.num_bytes,
            num_tensors=sent.num_tensors,
            canary_gap=gap.mean,
            canary_gap_max=gap.max,
            merge_gap=sent.learner.merge_gap if sent.learner else 0.0,
            fallback=self._fallback.tell(),
        )
        log.info("weights synced: %s", receipt)
        return receipt

    @contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._fleet.leave(abort=True)
            raise

    def _check_adapter(self, adapter: AdapterSource) -> None:
        """Raises SyncError where no server could apply it, ServerMismatchError where one of these does not."""
        check_plain(adapter)
        for base_url, status in self._fleet.statuses.items():
            check_adapter(base_url, status, rank=adapter.rank)
