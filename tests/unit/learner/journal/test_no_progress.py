"""A run that cannot learn says so: after how many steps, in which words is its own affair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learner.journal.no_progress import STEPS_WITHOUT_ANSWERS, STEPS_WITHOUT_SIGNAL, ProgressWatch
from learner.records import Rollout, Sample, StepResult
from learner.report.read import read_run
from tests.unit.learner.trainer_log import events_of
from tests.unit.learner.trainer_world import FakeBackend, make_config, run

READ = {"rollout_tokens": 9.0, "unusable": 1.0, "matched": 3.0, "missed": 1.0}
UNREAD = {**READ, "unusable": 4.0, "matched": 0.0, "missed": 4.0}
WRONG = {**READ, "matched": 0.0}
FIELDS_WRONG = {"rollout_tokens": 9.0, "right": 0.0, "missed": 4.0}
PAID = {**READ, "grpo/groups": 2.0, "grpo/no_signal": 0.5, "grpo/reward_std": 0.1, "reward": 0.4}
UNPAID = {**PAID, "grpo/no_signal": 1.0, "grpo/reward_std": 0.0, "reward": 0.0}
ALIKE = {**PAID, "grpo/no_signal": 1.0, "grpo/reward_std": 0.0}


def step(metrics: dict[str, float]) -> StepResult:
    """A step of four answers."""
    return StepResult(
        global_step=1,
        channel="B" if metrics else "A",
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        num_segments=4,
        num_rows=1,
        num_tokens=1,
        num_supervised=1,
        ver=1,
        metrics=metrics,
    )


def warned_at(*steps: dict[str, float]) -> list[int]:
    watch = ProgressWatch()
    return [place for place, metrics in enumerate(steps, start=1) for _ in watch.after(step(metrics))]


@pytest.mark.parametrize(
    ("metrics", "after", "remedy"),
    [
        (UNREAD, STEPS_WITHOUT_ANSWERS, "max_new_tokens"),
        (WRONG, STEPS_WITHOUT_ANSWERS, "iou_threshold"),
        (FIELDS_WRONG, STEPS_WITHOUT_ANSWERS, "iou_threshold"),
        (UNPAID, STEPS_WITHOUT_SIGNAL, "reward.weights"),
        (ALIKE, STEPS_WITHOUT_SIGNAL, "num_generations"),
    ],
)
def test_a_row_of_such_steps_is_one_warning(metrics: dict[str, float], after: int, remedy: str) -> None:
    assert warned_at(*[metrics] * 10) == [after]
    watch = ProgressWatch()
    (warning,) = [warning for _ in range(after) for warning in watch.after(step(metrics))]
    assert remedy in warning.remedy
    assert warned_at(*[{}, metrics] * 10) == [2 * after], "Channel-A has no rollouts, and does not count"
    assert warned_at(*[metrics] * (after - 1), PAID, *[metrics] * (after - 1)) == []
    assert warned_at(*[metrics] * after, PAID, *[metrics] * after) == [after, 2 * after + 1], "it got stuck again"


@pytest.mark.parametrize(
    "metrics", [{}, READ, PAID, {**WRONG, "missed": 0.0}, {**UNREAD, "unusable": 3.0, "matched": 1.0}]
)
def test_a_run_that_learns_is_not_warned_of(metrics: dict[str, float]) -> None:
    assert warned_at(*[metrics] * 10) == []


def test_the_console_the_log_and_the_report_say_it(
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = FakeBackend._answer

    def no_idea(self: FakeBackend, sample: Sample, seed: int) -> Rollout:
        tokens = tuple(self.policy.tokenizer.encode("no idea", add_special_tokens=False))
        return replace(answer(self, sample, seed), response_token_ids=tokens)

    monkeypatch.setattr(FakeBackend, "_answer", no_idea)
    settings = {"per_device_train_batch_size": 2, "max_steps": 4, "packing": False}
    run(make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings), monkeypatch)
    (warning,) = events_of(tmp_path, "warning")
    assert (warning["global_step"], warning["steps"]) == (3, STEPS_WITHOUT_ANSWERS)
    assert "trainer_variant: sft" in warning["remedy"]
    for said in (capsys.readouterr().out, caplog.text, *read_run(tmp_path / "run").notes):
        assert warning["what"] in said
        assert warning["remedy"] in said
