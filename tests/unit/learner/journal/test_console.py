"""The line of a step says what a user looks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from learner.journal.console import Console, step_line
from learner.records import ServerChange, StepResult, SyncReceipt

METRICS = {"match_rate": 0.5, "missed": 7.0, "rollout_s": 0.6, "learn_s": 0.61, "sync_s": 0.4, "tokens_per_s": 1234.0}
SYNC = SyncReceipt(ver=4, mode="full", seconds=0.4, num_bytes=10, num_tensors=2, canary_gap=0.0123, canary_gap_max=0.02)


def result(**fields: Any) -> StepResult:
    counts = {"num_segments": 2, "num_rows": 1, "num_tokens": 90, "num_supervised": 9}
    base = {"global_step": 3, "channel": "B", "loss": 1.25, "learning_rate": 1e-4, "grad_norm": 0.5, "ver": 4}
    return StepResult(**{**base, **counts, "metrics": METRICS, **fields})


def test_a_step_with_rollouts_and_a_sync() -> None:
    line = step_line(result(), SYNC, "  3/100")
    for words in (
        "step   3/100",
        "  B  ",
        "loss 1.2500",
        "match 0.50",
        "FN 7",
        "rollout 0.60",
        "learn 0.61",
        "sync 0.40",
    ):
        assert words in line
    assert "1234 tok/s" in line
    assert line.endswith("ver 4 gap 0.0123")


def test_a_step_on_kept_rollouts_tells_their_window_and_age() -> None:
    """R18: which accumulation window, which of its steps, and how many updates its rollouts are behind."""
    places = {"rollout_buffer/window": 5.0, "rollout_buffer/m_step": 3.0, "rollout_buffer/rollout_age": 2.0}
    assert "  window 5 m-step 3 age 2  " in step_line(result(metrics=METRICS | places), None, "3/100")
    assert "window" not in step_line(result(), None, "3/100")


def test_a_step_on_ground_truth_claims_no_matches() -> None:
    line = step_line(result(channel="A", metrics={"learn_s": 0.1, "tokens_per_s": 5.0}), None, "3/9")
    assert "match" not in line
    assert "ver" not in line


def test_a_run_that_learns_no_rollouts_says_nothing_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(total_steps=5, name="run", enabled=True, plain=True)
    console.step(result(channel="A", metrics={"learn_s": 0.1, "tokens_per_s": 5.0}), SYNC)
    line = capsys.readouterr().out
    assert "loss" in line
    assert not {"A", "ver", "gap"} & set(line.split())


def test_a_step_ahead_of_which_rollouts_run() -> None:
    """R25, R27: packs waiting, their age, what was dropped; and why Channel-B did not run."""
    queue = {"stage2_ab/async/queue_depth": 3.5, "stage2_ab/async/packs_dropped_oldest": 0.0}
    queue |= {"stage2_ab/async/packs_dropped_unwanted": 1.0}
    ages = {"stage2_ab/async/age_versions": 0.75, "stage2_ab/async/age_updates": 1.5}
    ahead = {**METRICS, **queue, "stage2_ab/async/packs_dropped_stale": 2.0}
    line = step_line(result(metrics={**ahead, **ages}), None, "3/9")
    assert "  queue 3.5 age 0.75 (1.5 updates) dropped 3  " in line
    skipped = {**ahead, "stage2_ab/async/b_step_skipped_due_to_queue": 1.0}
    line = step_line(result(channel="A", metrics=skipped), None, "3/9")
    assert "  A (no packs for B)  " in line
    assert "age" not in line
    assert "queue" not in step_line(result(), None, "3/9")


def test_the_end_of_adapter_syncs_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """R08: an error's words may look like rich's markup."""
    console = Console(total_steps=5, name="run", enabled=True)
    console.sync(SYNC)
    assert capsys.readouterr().out == ""
    console.sync(replace(SYNC, fallback="found ['q_proj'], not [/proj]"))
    assert "full weight syncs from here on" in (out := capsys.readouterr().out)
    assert out.endswith("found ['q_proj'], not [/proj]\n")


def test_what_happens_to_a_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """R40: which one, what, how many are left, and why."""
    console = Console(total_steps=5, name="run", enabled=True)
    console.server(ServerChange(base_url="http://a:1", what="lost", because="silence [1.5 s]", serving=2))
    (line,) = capsys.readouterr().out.splitlines()
    assert all(word in line for word in ("http://a:1", "lost", "2 serve", "silence [1.5 s]"))


@pytest.mark.parametrize(("total_steps", "far"), [(100_000, "step 8, 2.0/10.0 min  "), (12, "step  8/12  ")])
def test_a_run_that_time_will_end_says_the_time(capsys: pytest.CaptureFixture[str], total_steps: int, far: str) -> None:
    """A recipe's stage has no end in steps. One with few steps says these, though it has a limit of time too."""
    times = iter((0.0, 100.0, 220.0))  # made, begun, and after three steps of 40 s
    console = Console(
        total_steps=total_steps,
        name="run",
        enabled=True,
        max_minutes=10,
        clock=lambda: next(times),
    )
    console.begin(5)
    console.step(result(global_step=8), None)
    assert capsys.readouterr().out.startswith(far)


def test_only_the_main_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled in (False, True):
        console = Console(total_steps=5, name="run", enabled=enabled)
        console.note("hello")
        console.step(result(), None)
        console.close()
        assert bool(capsys.readouterr().out) == enabled


def test_an_evaluation_on_labels_with_gaps_begins_with_the_estimate_and_its_range(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(total_steps=9, name="run", enabled=True)
    values = {"f1@0.5": 0.61, "estimated_f1@0.5": 0.7, "estimated_f1_low@0.5": 0.64, "estimated_f1_high@0.5": 0.78}
    console.evaluation(3, values, name="evaluation")
    assert "estimated_f1@0.5 0.700 (0.640 to 0.780)  f1@0.5 0.610" in capsys.readouterr().out
