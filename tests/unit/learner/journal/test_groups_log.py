"""Rewards and groups that a `grpo` run keeps for its report (R37): as they were learned, and few of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config.load import RESOLVED_NAME
from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.loss import LossConfig
from learner.journal.groups_log import NAME, GroupsLog
from learner.policy.parallel import Ranks
from learner.report.page import write_report
from learner.report.read import read_run
from learner.report.rewards import MAX_GROUPS, NUM_BINS, reward_section
from learner.steps.groups import GroupSource
from learner.tasks.rewards import Rewards
from tests.unit.learner.steps.test_groups import ONE, SHORT, TWO, WHOLE, Answers, prompt_of
from tests.unit.learner.steps.test_segments import TASK, TOKENIZER, sample, segments_in, truth


def logged(folder: Path, steps: int, *, every: int, **grpo: Any) -> list[dict[str, Any]]:
    """Return the lines of a run whose steps have the same two groups of two."""
    log = GroupsLog(folder, TASK, every)
    texts = [SHORT, WHOLE, "no idea", truth(TWO)]
    source = GroupSource(
        Answers(texts),  # type: ignore[arg-type]
        TASK,
        Rewards(tokenizer=TOKENIZER, weights={"f1": 1.0}, task=TASK),
        grpo=GrpoConfig(num_generations=2, **grpo),
        loss=LossConfig(),
        ranks=Ranks(),
        on_group=log.add,
    )
    samples = [sample(i // 2) for i in range(4)]
    for step in range(1, steps + 1):
        segments_in(source, samples, [prompt_of(one) for one in samples])
        log.write(step)
    log.write(steps + 1)  # nothing was scored: no line
    log.close()
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_rewards_of_every_step_and_now_and_then_a_group(tmp_path: Path) -> None:
    lines = logged(tmp_path, 5, every=2)
    assert [line["global_step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["rewards"] == [[0.5, 1.0], [0.0, 1.0]] for line in lines)
    assert ["group" in line for line in lines] == [True, False, True, False, True]
    group = lines[0]["group"]
    assert group["id"] == ONE.sample_id
    assert [(one["reward"], one["advantage"]) for one in group["answers"]] == [(0.5, -0.25), (1.0, 0.25)]
    assert [len(one["predictions"]) for one in group["answers"]] == [1, len(ONE.objects)]
    assert "by_object" not in group["answers"][0]


def test_objects_have_the_advantages_that_were_learned(tmp_path: Path) -> None:
    short, whole = logged(tmp_path, 1, every=1, credit="object")[0]["group"]["answers"]
    assert len(short["by_object"]) == 1
    assert len(whole["by_object"]) == len(ONE.objects)
    assert short["advantage"] < min(0.0, *whole["by_object"]) + 1e-9  # it closed early; the others went on


def test_the_report_draws_rewards_and_groups(tmp_path: Path) -> None:
    logged(tmp_path, 11, every=2, credit="object")
    (tmp_path / RESOLVED_NAME).write_text(yaml.safe_dump({"custom": {"trainer_variant": "grpo"}}))
    run = read_run(tmp_path)
    section = reward_section(run, heading="Rewards")
    assert section is not None
    assert [row.global_step for row in section.groups] == [1, 5, 7, 11]
    assert len(section.groups) == MAX_GROUPS
    for row in section.groups:
        assert [panel.scored.reward for panel in row.panels] == [1.0, 0.5]
    histogram = section.charts[-1]
    shares = [top for _, _, parts in histogram.stacks for _, _, top in parts]
    assert len(shares) == 2 * NUM_BINS
    assert sum(shares[::2]) == pytest.approx(1.0)
    assert sum(shares[1::2]) == pytest.approx(1.0)
    page = write_report(tmp_path).read_text()
    assert "Groups of rollouts" in page
    assert page.count("Reward 1.00, advantage") == 2 * MAX_GROUPS  # label and title of each drawing


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", "{}", '{"global_step": 1, "rewards": []}', '{"global_step": 1, "rewards": [[0.5], [null]]}',
     '{"global_step": 1, "rewards": [["x"]]}', '{"global_step": 1, "rewards": [[1]], "group": 3}',
     '{"global_step": 1, "rewards": [[1]], "group": {"answers": [3]}}'],
)  # fmt: skip
def test_a_damaged_line_becomes_a_note(line: str, tmp_path: Path) -> None:
    logged(tmp_path, 2, every=1)
    (tmp_path / RESOLVED_NAME).write_text("{}")
    with (tmp_path / NAME).open("a") as file:
        file.write(line + "\n")
    run = read_run(tmp_path)
    assert [step.global_step for step in run.groups] == [1, 2]
    assert any(NAME in note for note in run.notes)
    assert "Groups of rollouts" in write_report(tmp_path).read_text()


def test_a_run_without_rewards_has_no_such_section(tmp_path: Path) -> None:
    (tmp_path / RESOLVED_NAME).write_text("{}")
    assert reward_section(read_run(tmp_path), heading="") is None
