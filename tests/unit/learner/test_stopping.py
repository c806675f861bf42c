"""The first signal asks; the next check, or half the deadline, stops the run."""

from __future__ import annotations

import os
import signal
import time

import pytest

from learner.policy.parallel import Ranks
from learner.stopping import Stopped, StopRequest


class AnotherRankWasAsked(Ranks):
    def all_reduce_max(self, value: float) -> float:
        return float(signal.SIGTERM)


def test_nobody_asked() -> None:
    StopRequest(Ranks(), timeout_s=1).check()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_the_next_check_and_handlers_come_back(signum: int, code: int) -> None:
    before = signal.getsignal(signum)
    stop = StopRequest(Ranks(), timeout_s=3600)
    with stop.installed():
        os.kill(os.getpid(), signum)
        with pytest.raises(Stopped) as caught:
            stop.check()
    assert (caught.value.exit_code, caught.value.agreed) == (code, True)
    assert signal.getsignal(signum) is before


def test_a_signal_of_another_rank_stops_this_one() -> None:
    with pytest.raises(Stopped) as caught:
        StopRequest(AnotherRankWasAsked(), timeout_s=1).check()
    assert caught.value.exit_code == 143


def test_a_long_wait_is_broken_into_after_half_the_time() -> None:
    with StopRequest(Ranks(), timeout_s=2.0).installed():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped) as caught:
            time.sleep(10)
    assert not caught.value.agreed
