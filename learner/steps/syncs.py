"""The syncs of a run: before a step that needs them, between two of its rows, or for an evaluation (R10).

In: a `Sync`, and a step source. No rollout of the source may be in flight during a sync. Out: the generators (rollout
servers or engines) have the weights of a step, and the journal has an entry. Invariants: a step's weights are synced
once; all ranks enter a sync together.
"""

from __future__ import annotations

from learner.journal.journal import Journal
from learner.records import SyncReceipt
from learner.steps.source import Fence, StepSource
from learner.sync.sync import Sync


class StepSyncs:
    """Runs the weight syncs of a run. `sync` None: the backend needs no sync. `rolls_out` False: the run has no
    rollouts. `is_sharded`: each rank has a part of the weights, so no sync runs between two rows of a step. In all
    methods `step` is the number of optimizer updates so far."""

    def __init__(
        self, sync: Sync | None, source: StepSource, journal: Journal, *, rolls_out: bool, is_sharded: bool
    ) -> None:
        self.receipt: SyncReceipt | None = None  # receipt of the sync before this step; None: no sync
        self.waits = False  # True: the sync waits for rollouts in flight while the step is learned
        self.sync, self._source, self._journal = sync, source, journal
        self._rolls_out, self._is_sharded = rolls_out, is_sharded
        self._synced_at: int | None = None  # number of updates in the generators' weights; None: no sync yet

    def ver(self, step: int) -> int:
        """Return the version of the weights that make the rollouts: the number of syncs so far. A backend that has the
        trained weights themselves needs no sync; its version is the number of updates."""
        if self.sync is not None:
            return self.sync.ver
        return step if self._rolls_out else 0

    def before(self, step: int) -> None:
        """Sync if the step wants a sync and the generators do not have its weights. If the sync must wait for rollouts
        in flight, it may be postponed, and `within` runs it. Collective."""
        self.receipt = None
        if self.sync is None or self._synced_at == step or not self._source.wants_sync(step):
            return
        self.waits = not self._is_sharded and self._source.postpones_sync(step)
        # The learner's scores of the canary (fixed answers) need no server, so they are computed while rollouts still
        # run.
        self.sync.prepare()
        if not self.waits:
            self._now(step)

    def within(self, step: int, *, at_once: bool = False) -> None:
        """Run the sync that `before` postponed, if no rollout is in flight any more. `at_once`: wait for the rollouts.
        Collective."""
        if self.waits and (at_once or self._source.is_quiet()):
            self.waits = False
            self._now(step)

    def behind(self, fence: Fence, step: int) -> None:
        """Sync the weights of this step to the generators, unless they have them already. Call it inside the block of
        `fence`, in which no rollout is in flight. Collective."""
        if self.sync is None or self._synced_at == step:
            return
        with self._journal.clock.phase("sync"):
            self.receipt = self.sync.sync()
        fence.synced(self.receipt.ver, updates=step)
        self._synced_at = step
        self._journal.sync(self.receipt, step=step)

    def agree(self, step: int) -> None:
        """Let all ranks agree on the servers that are still used, and log each server that has joined or left.
        Collective. Raises ServerError if too few generators are left."""
        for change in self.sync.agree() if self.sync is not None else ():
            self._journal.server(change, step=step)

    def _now(self, step: int) -> None:
        with self._source.fence() as fence:
            self.behind(fence, step)
