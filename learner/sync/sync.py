"""Sends trained weights to the generators, in memory, and checks them (R08, R09, R10, R24).

In: the policy's weights, its adapter if adapters are synced, and a `Delivery`: to rollout servers
(`server_delivery.py`) or into colocated engines (`colocated.py`). Out: a `SyncReceipt` on every rank. Invariants:
- `ver` rises only with a completed sync; only rollouts of that version are accepted;
- a sync is complete when each generator has passed two checks: all tensors arrived with the right bytes, and the
  generator's log-probabilities of fixed answers (the canary) are close to the learner's;
- after a failure the next try begins with new connections, and without the servers that are gone. If no generator
  caused the failure, the sync is repeated once (`Delivery.recover`). Other failures raise their cause on every rank.

An adapter sync sends the adapter alone. After a new connection or a failure a generator's weights are unknown, so the
next adapter sync sends the model's base weights first. If an adapter sync fails, the process logs one warning, repeats
the sync at once with all weights, and makes only full syncs from then on. With `fallback_to_full: false` the error is
raised instead. A lost server or a broken connection does not count as a failed adapter sync while `Delivery.recover`
allows another try. A resumed run begins with adapter syncs again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from learner.records import ServerChange, SyncReceipt
from learner.sync.source import AdapterSource, WeightSource, check_specs
from shared.canary import CanaryGap
from shared.errors import ProjectError, SyncError

T = TypeVar("T")
Mode = Literal["full", "adapter"]
# After a failed try: "stop" raises its error; "repeat" tries again; "changed" tries again with other generators.
Recovery = Literal["stop", "repeat", "changed"]
log = logging.getLogger("learner.sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """An update that every generator has checked."""

    mode: Mode
    num_bytes: int
    num_tensors: int
    gap: CanaryGap  # gap of the generator whose log-probabilities differ most from the learner's
    merge_gap: float  # change of log-probabilities by merging and rounding, in nats per token (D14)
    pause_s: float = 0.0  # longest time that a server generated nothing and accepted no call; 0: not measured


class Delivery(Protocol):
    """Brings weights from the policy to the generators (rollout servers or colocated engines), and has them checked."""

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on the ranks that take part in it. Return its result, or raise its error, on every rank."""

    def agree(self) -> Sequence[ServerChange]:
        """Let all ranks agree on the generators. On rank 0 return the changes since the last call. Collective. Raises
        ServerError if too few generators are left."""

    def is_current(self) -> bool:
        """Return True if the connected generators are still the generators that a sync must reach."""

    def connect(self) -> int:
        """Connect to every generator. Return the highest version that a generator has seen."""

    def recover(self, error: ProjectError, num_repeated: int) -> Recovery:
        """Return whether to try the sync again, without the generators that are gone. To be called after a try has
        failed with `error`, and after `leave`. `num_repeated`: how often this method has returned "repeat" for this
        sync. Raises ServerError if too few generators are left."""

    def check_adapter(self, adapter: AdapterSource) -> None:
        """Raises SyncError or ServerMismatchError if a generator could not apply the adapter."""

    def prepare(self, mode: Mode) -> None:
        """Compute the learner's log-probabilities of the canary's answers for the next sync, while generators are still
        busy. The weights must not change before that sync."""

    def delivering(self, modes: Sequence[Mode]) -> AbstractContextManager[Mapping[str, float]]:
        """Enclose all deliveries of one sync. `modes`: the modes that the sync may use. Yields the seconds of the
        sync's parts, which are complete when the context has ended."""

    def deliver_base(self, source: WeightSource, ver: int) -> int:
        """Load the base weights, to which an adapter is applied, before the adapter. `ver`: the version that was served
        last. Return the version before the adapter's version: `ver + 1` if the generators give the base weights a
        version of their own, else `ver`."""

    def deliver(self, source: WeightSource, mode: Mode, ver: int) -> Delivered:
        """Load the weights of `source` into every generator as version `ver`, and check them. Raises SyncError,
        ServerError or DeadlineError."""

    def accept(self, ver: int) -> None:
        """From now on accept only rollouts of version `ver`."""

    def leave(self, *, abort: bool) -> None:
        """Disconnect from the generators, after a failure (`abort`) or for good. The call ends in a limited time, and
        may be repeated."""


class Sync:
    """The weight syncs of a run. `adapter` is synced alone until an adapter sync fails; None: full syncs. All ranks
    call each public method."""

    def __init__(
        self,
        delivery: Delivery,
        weights: WeightSource,
        *,
        adapter: AdapterSource | None = None,
        fallback_to_full: bool = True,
    ) -> None:
        # Weights that cannot be sent are found at the start, not after the first step.
        check_specs(weights.weight_specs())
        self.ver = 0  # version of the last completed sync
        self._delivery, self._weights, self._adapter = delivery, weights, adapter
        self._fallback_to_full, self._fallback = fallback_to_full, ""
        self._failures: list[str] = []  # errors of the failed tries of the running sync
        self._is_connected = self._base_is_loaded = False

    def connect(self) -> None:
        """Connect to every generator. `sync` also connects if needed.

        Raises CommunicatorError, DeadlineError or the server's own error; without a fallback also SyncError or
        ServerMismatchError if the adapter can't be served.
        """
        self.ver = self._delivery.together(self._connect)

    def agree(self) -> Sequence[ServerChange]:
        """See `Delivery.agree`; to be called at the end of every step."""
        return self._delivery.agree()

    def prepare(self) -> None:
        """Compute the learner's part of the next sync while rollouts are still made. Calling `prepare` is optional. The
        weights must not change until that sync."""
        self._delivery.together(self._prepare)

    def sync(self) -> SyncReceipt:
        """Send the policy's weights to every generator. Every rank returns when all generators serve these weights.

        Raises SyncError (Communicator, Digest, Coverage, Canary), ServerError or DeadlineError, on every rank.
        """
        receipt = self._delivery.together(self._sync)
        self.ver = receipt.ver
        self._delivery.accept(self.ver)
        return receipt

    def close(self) -> None:
        """Disconnect from the generators; bounded in time. If a server no longer answers, this is only logged."""
        self._is_connected = False
        self._delivery.leave(abort=False)

    # ---- together ----------------------------------------------------------------------------------------------------

    def _connect(self) -> int:
        # The version starts at the highest one that a generator has seen, so that no old rollout passes for a new one.
        self.ver = max(self.ver, self._delivery.connect())
        self._is_connected, self._base_is_loaded = True, False
        if self._adapter is not None:
            with self._falling_back():
                self._check_adapter(self._adapter)
        log.info("sync mode %s", "full" if self._adapter is None else "adapter")
        return self.ver

    def _prepare(self) -> None:
        if self._is_connected:
            self._delivery.prepare(self._modes()[0])

    def _sync(self) -> SyncReceipt:
        begin, self._failures = time.monotonic(), []
        with self._delivery.delivering(self._modes()) as parts:
            # A group cannot change its members, so other servers need a new group.
            if self._is_connected and not self._delivery.is_current():
                self._is_connected = False
                self._delivery.leave(abort=False)
            if not self._is_connected:
                self._repeated(self._connect)
            delivered = self._deliver()
        reason, self._fallback = self._fallback, ""  # only the first receipt after the fallback contains the reason
        receipt = SyncReceipt(
            ver=self.ver + 1,
            mode=delivered.mode,
            seconds=time.monotonic() - begin,
            num_bytes=delivered.num_bytes,
            num_tensors=delivered.num_tensors,
            canary_gap=delivered.gap.mean,
            canary_gap_max=delivered.gap.max,
            merge_gap=delivered.merge_gap,
            pause_s=delivered.pause_s,
            fallback=reason,
            repeated=tuple(self._failures),
            parts=parts,
        )
        log.info("weights synced: %s", receipt)
        return receipt

    def _modes(self) -> Sequence[Mode]:
        return ("full",) if self._adapter is None else ("adapter", "full") if self._fallback_to_full else ("adapter",)

    def _deliver(self) -> Delivered:
        if self._adapter is not None:
            with self._falling_back():
                return self._repeated(self._deliver_adapter)
        return self._repeated(self._deliver_full)

    def _deliver_full(self) -> Delivered:
        # A failed try has left the group.
        if not self._is_connected:
            self._connect()
        return self._delivery.deliver(self._weights, "full", self.ver + 1)

    def _deliver_adapter(self) -> Delivered:
        if not self._is_connected:
            self._connect()
        # The attribute is read after connecting, which may have fallen back to full syncs.
        adapter = self._adapter
        if adapter is None:  # a newly joined generator cannot apply the adapter
            return self._deliver_full()
        # The attribute is False until the delivery succeeds, because after a failure a generator's base weights are
        # unknown.
        base_is_loaded, self._base_is_loaded = self._base_is_loaded, False
        if not base_is_loaded:
            self.ver = self._delivery.deliver_base(adapter.base, self.ver)
            log.info("the weights below the adapter were loaded")
        delivered = self._delivery.deliver(adapter, "adapter", self.ver + 1)
        self._base_is_loaded = True
        return delivered

    def _repeated(self, work: Callable[[], T]) -> T:
        """Try `work` until it succeeds, or `Delivery.recover` returns "stop"."""
        # `Retry` is not used, because the failed servers end the tries, not a time limit.
        num_repeated = 0
        while True:
            try:
                with self._leaving_on_failure():
                    return work()
            except ProjectError as error:
                recovery = self._delivery.recover(error, num_repeated)
                if recovery == "stop":
                    raise
                # A try with other servers is not a repetition, so it does not count.
                num_repeated += recovery == "repeat"
                self._failures.append(str(error))
                log.warning("the sync is repeated with a new group: %s", error)

    def _check_adapter(self, adapter: AdapterSource) -> None:
        if adapter.obstacle:
            raise SyncError(
                "the adapter can't be synced by itself",
                found=adapter.obstacle,
                wanted="plain LoRA on linear layers, and nothing else trained",
                remedy="set sync.mode: full (merged weights)",
            )
        check_specs(adapter.weight_specs())
        check_specs(adapter.base.weight_specs())
        # The servers are asked before anything is sent, so that a mismatch is found at the start of the run.
        self._delivery.check_adapter(adapter)

    @contextmanager
    def _falling_back(self) -> Iterator[None]:
        """Enclose the parts of an adapter sync that can fail. After an error `_adapter` is None, and the caller
        continues with a full sync. With `fallback_to_full: false` the error is raised."""
        try:
            with self._leaving_on_failure():
                yield
        # Exceptions other than ProjectError are programming errors, which a fallback would hide.
        except ProjectError as error:
            if not self._fallback_to_full:
                raise
            self._adapter, self._fallback = None, str(error)
            log.warning("adapter sync failed, full syncs from here on: %s", error)

    @contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._is_connected:
                self._is_connected = False
                self._delivery.leave(abort=True)
            raise
