"""The gate (R10), explored by hypothesis against a list of who is inside."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_server.gate import Gate
from shared.errors import ServerPoisonedError, SyncError
from tests.examples import examples

INCARNATIONS = st.sampled_from(["a", "b"])


class GateMachine(RuleBasedStateMachine):
    """Remembers the version that each call saw when it entered, and whether the weights were ever half written."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.inside: list[int] = []
        self.half_written = False
        self.base_of = ""  # the sender of the weights below an adapter, and of nothing since

    @rule()
    def enter(self) -> None:
        state = self.gate.state
        try:
            entered = self.gate.try_enter()
        except ServerPoisonedError:
            assert state == "poisoned"
            return
        assert entered == (state == "serving")
        if entered:
            assert not self.half_written
            self.inside.append(self.gate.ver)

    @precondition(lambda self: self.inside)
    @rule()
    def leave(self) -> None:
        assert self.inside.pop(0) == self.gate.ver, "a call spanned two versions"
        self.gate.leave()

    @precondition(lambda self: self.gate.update is None)
    @rule(incarnation=INCARNATIONS)
    def open_group(self, incarnation: str) -> None:
        self.gate.open_group(incarnation)
        self.base_of = ""

    @precondition(lambda self: self.gate.update is None)
    @rule()
    def close_group(self) -> None:
        self.gate.close_group()

    @rule(incarnation=INCARNATIONS, ver=st.integers(0, 30), mode=st.sampled_from(["full", "adapter"]))
    def begin(self, incarnation: str, ver: int, mode: str) -> None:
        before = vars(self.gate).copy()
        try:
            self.gate.begin_update(incarnation, ver, mode)
        except SyncError:
            assert vars(self.gate) == before, "a refused update changed something"
            return
        assert before["incarnation"] == incarnation
        assert ver > before["served"].ver
        assert before["update"] is None
        assert before["state"] == "serving" or mode == "full" or self.base_of == incarnation
        assert self.gate.state == "draining"

    @precondition(lambda self: self.gate.update is not None)
    @rule()
    def drain(self) -> None:
        if self.gate.drained():
            assert not self.inside
            self.half_written = True

    @precondition(lambda self: self.gate.state == "updating")
    @rule()
    def complete(self) -> None:
        wanted = self.gate.update.ver if self.gate.update else -1
        self.gate.complete()
        assert (self.gate.state, self.gate.ver) == ("serving", wanted)
        self.gate.check_sound()
        self.half_written, self.base_of = False, ""

    @precondition(lambda self: self.gate.state == "updating")
    @rule()
    def complete_base(self) -> None:
        self.gate.complete_base()
        assert self.gate.state == "poisoned"
        self.base_of = self.gate.incarnation

    @rule()
    def poison(self) -> None:
        self.gate.poison("not finite")
        assert self.gate.state != "serving"
        with pytest.raises(ServerPoisonedError):
            self.gate.check_sound()

    @precondition(lambda self: self.gate.update is not None)
    @rule()
    def fail(self) -> None:
        self.gate.fail("because")
        assert self.gate.state == "poisoned"
        self.base_of = ""

    @invariant()
    def is_consistent(self) -> None:
        assert self.gate.in_flight == len(self.inside)
        assert (self.gate.update is not None) == (self.gate.state in {"draining", "updating"})
        assert (self.gate.poisoned_because == "") or self.gate.state != "serving"
        assert not (self.half_written and self.gate.state == "serving")
        assert not (self.inside and self.gate.state == "updating")


GateMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestGate = GateMachine.TestCase


def test_versions_rise_whoever_sends_them() -> None:
    """R10: an answer's version says which weights it was made with."""
    gate = Gate("of the checkpoint")
    assert (gate.served.ver, gate.served.incarnation, gate.served.weights) == (0, "", "of the checkpoint")
    gate.open_group("a")
    with pytest.raises(SyncError, match="version above 0"):
        gate.begin_update("a", 0, "full")
    gate.begin_update("a", 3, "full")
    assert gate.drained()
    gate.complete("abc")
    for incarnation in ("a", "b"):
        gate.open_group(incarnation)
        for ver in (1, 3):
            with pytest.raises(SyncError, match="version above 3"):
                gate.begin_update(incarnation, ver, "full")
    assert (gate.served.ver, gate.served.incarnation, gate.served.weights) == (3, "a", "abc")


def test_an_adapter_has_another_version_than_the_weights_below_it() -> None:
    gate = Gate()
    gate.open_group("a")
    gate.begin_update("a", 4, "full")
    assert gate.drained()
    gate.complete_base()
    with pytest.raises(SyncError, match="version above 4"):
        gate.begin_update("a", 4, "adapter")
    gate.begin_update("a", 5, "adapter")
    gate.fail("because")
    gate.open_group("b")
    gate.begin_update("b", 1, "full")


def test_poisoned_says_why() -> None:
    gate = Gate()
    gate.open_group("a")
    gate.begin_update("a", 1, "full")
    gate.fail("the bytes differ")
    with pytest.raises(ServerPoisonedError, match="the bytes differ"):
        gate.try_enter()
    with pytest.raises(SyncError, match="full sync"):
        gate.begin_update("a", 2, "adapter")


def test_calls_on_weights_that_were_found_to_be_wrong_fail_until_an_update_is_complete() -> None:
    gate = Gate()
    gate.open_group("a")
    gate.check_sound()
    assert gate.try_enter()
    gate.poison("the canary differs")
    with pytest.raises(ServerPoisonedError, match="canary"):
        gate.check_sound()
    gate.leave()
    gate.begin_update("a", 1, "full")
    assert gate.drained()
    gate.complete("digest")
    gate.check_sound()
    assert gate.try_enter()
    assert (gate.served.ver, gate.served.weights) == (1, "digest")
