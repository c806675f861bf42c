"""The first signal asks; the next check, or half the deadline, stops the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import signal
import threading
import time
from collections.abc import Callable

import pytest

from learner.policy.parallel import Ranks
from learner.run.stopping import Stopped, StopRequest, TimeLimit, told_before_the_first_step


class AnotherRankWasAsked(Ranks):
    def all_reduce_max(self, value: float) -> float:
        return float(signal.SIGTERM)


def test_nobody_asked() -> None:
    StopRequest(Ranks(), timeout_s=1).check()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_the_next_check_and_handlers_come_back(signum: int, code: int, without_nohup: None) -> None:
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
    def learn() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with StopRequest(Ranks(), timeout_s=2.0).installed(), pytest.raises(Stopped) as caught:
        learn()
    assert not caught.value.agreed


def test_a_checkpoint_is_written_to_its_end_before_the_break_in() -> None:
    """Otherwise it is thrown away when half of the time is over, and what is left is too short for another one."""
    stop, written = StopRequest(Ranks(), timeout_s=2.0), []

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with stop.held_off():
            time.sleep(1.3)
            written.append("checkpoint")
        time.sleep(60)

    with stop.installed(), pytest.raises(Stopped):
        save()
    assert written == ["checkpoint"]


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(Ranks(), timeout_s=3600).installed():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("reserves", "over_at_s"), [(False, 120.0), (True, 90.0)])
def test_a_time_limit_keeps_the_time_of_a_last_evaluation_free(reserves: bool, over_at_s: float) -> None:
    now = [1000.0]
    limit = TimeLimit(Ranks(), 2.0, ends_by_evaluating=reserves, clock=lambda: now[0])
    limit.evaluated(30.0)
    now[0] = 1000.0 + over_at_s - 0.5
    assert not limit.is_over()
    now[0] = 1000.0 + over_at_s
    assert limit.is_over()
    assert not TimeLimit(Ranks(), None, ends_by_evaluating=reserves).is_over()


# ---- endings that take the process with them -----------------------------------------------------------------------

STILL_ALIVE = 7


def ending_of(child: Callable[[], None]) -> tuple[int, str]:
    """Run `child` in a process of its own; return its exit code (STILL_ALIVE where it came to its end), and what it
    said."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 2)
            child()
            os._exit(STILL_ALIVE)
        finally:
            os._exit(99)
    os.close(write)
    deadline = time.monotonic() + 120
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with os.fdopen(read) as said:
        return os.waitstatus_to_exitcode(ended[1]), said.read()


def test_a_second_ctrl_c_ends_at_once() -> None:
    def child() -> None:
        with StopRequest(Ranks(), timeout_s=3600).installed():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)

    code, said = ending_of(child)
    assert code == 130
    assert "SIGINT: saving and stopping" in said
    assert "ended at once; the newest checkpoint" in said


def work_until_stopped(tell: int) -> None:
    """Say `ready` into the pipe, and go on until a signal asks to stop."""
    stop = StopRequest(Ranks(), timeout_s=30)
    with contextlib.suppress(Stopped), stop.installed():
        os.write(tell, b"ready")
        for _ in range(2000):
            time.sleep(0.01)
            stop.check()


def test_a_run_outlives_its_terminal_long_enough_to_save(without_nohup: None) -> None:
    """A closed window, or a lost connection: SIGHUP ended the run at once. Whatever is printed later would fail."""
    told, tell = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            work_until_stopped(tell)
            print("saved", flush=True)
            os.write(2, b"saved")
            os.write(tell, b"saved")
        finally:
            os._exit(99)
    assert os.read(told, 5) == b"ready"
    os.close(terminal)
    os.close(tell)
    os.waitpid(pid, 0)
    assert os.read(told, 5) == b"saved"


def test_a_run_outlives_a_tee_that_ctrl_c_ends() -> None:
    """`train 2>&1 | tee log`: Ctrl-C ends `tee` too. The handler's own line was a BrokenPipeError wherever the run was,
    and a checkpoint that was being written then was given up as one that cannot be written."""
    told, tell = os.pipe()
    reading, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            os.close(printed)
            work_until_stopped(tell)
            print("saved", flush=True)
            os.write(tell, b"saved")
        finally:
            os._exit(99)
    os.close(printed)
    os.close(tell)
    assert os.read(told, 5) == b"ready"
    os.kill(pid, signal.SIGINT)
    time.sleep(0.02)
    os.close(reading)
    os.waitpid(pid, 0)
    assert os.read(told, 5) == b"saved"


def test_a_repeated_sigterm_does_not_hurry() -> None:
    """Launchers send it to the whole group, and again: the first one's time stands."""

    def child() -> None:
        stop = StopRequest(Ranks(), timeout_s=3600)
        with stop.installed(), contextlib.suppress(Stopped):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            stop.check()

    code, said = ending_of(child)
    assert code == STILL_ALIVE
    assert said.count("saving and stopping") == 1


def test_what_does_not_stop_in_time_is_ended() -> None:
    """Neither a check nor the break-in got through: `training.stop_timeout_s` holds all the same."""

    def child() -> None:
        with StopRequest(Ranks(), timeout_s=1.0).installed():
            with contextlib.suppress(Stopped):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            time.sleep(60)

    code, said = ending_of(child)
    assert code == 143
    assert "not stopped in time (training.stop_timeout_s)" in said


def test_a_run_that_stopped_is_not_ended_afterwards() -> None:
    """The last call goes with the handlers: what comes after the run (a launcher's own work) is left alone."""

    def child() -> None:
        stop = StopRequest(Ranks(), timeout_s=0.4)
        with contextlib.suppress(Stopped), stop.installed():
            os.kill(os.getpid(), signal.SIGINT)
            stop.check()
        time.sleep(0.8)

    code, said = ending_of(child)
    assert code == STILL_ALIVE
    assert "not stopped" not in said


def test_sigterm_before_the_first_step_says_so() -> None:
    """It does so too while the main thread is in one long call."""

    def child() -> None:
        with told_before_the_first_step():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # takes minutes

    code, said = ending_of(child)
    assert code == 143
    assert "SIGTERM" in said


def test_a_child_that_is_ended_before_the_first_step_ends_nobody_else() -> None:
    def child() -> None:
        with told_before_the_first_step():
            if (pid := os.fork()) == 0:
                time.sleep(20)
                os._exit(0)
            time.sleep(0.3)
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
            time.sleep(0.3)

    assert ending_of(child) == (STILL_ALIVE, "")


def test_handlers_of_before_the_first_step_go() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with told_before_the_first_step():
        stop = StopRequest(Ranks(), timeout_s=3600)
        with stop.installed():
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped):
                stop.check()
    assert signal.getsignal(signal.SIGTERM) is before
