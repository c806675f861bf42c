"""Charts of the training section and the timeline of one step: which step, and what ran in it (R25, R32)."""

from __future__ import annotations

import json
import math
import random
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from learner.config.load import RESOLVED_NAME
from learner.journal.log import Timeline
from learner.policy.parallel import Ranks
from learner.records import Activity, CallRecord, RolloutCallLog
from learner.report.charts import Chart
from learner.report.page import render
from learner.report.read import read_run, read_runs
from learner.report.records import StepTimeline
from learner.report.training import activities_of, rise, timeline, training, typical
from tests.unit.learner.report.fake_run import write_run

SERVER = "http://127.0.0.1:8000"


def step(number: int, begin_s: float, end_s: float, *activities: Activity) -> StepTimeline:
    return StepTimeline(global_step=number, begin_s=begin_s, end_s=end_s, activities=activities)


def test_the_typical_step_has_rollouts_and_the_median_length() -> None:
    learn, rollout = Activity("rank 0", "learn", 0.0, 1.0), Activity("rank 0 rollouts", "rollout", 0.0, 1.0)
    lengths = [90.0, 3.0, 5.0, 4.0]  # the first warms up
    steps = [step(i, 0.0, length, learn, rollout) for i, length in enumerate(lengths)]
    assert typical([*steps, step(9, 0.0, 4.1, learn)]) == 3
    assert typical([step(0, 0.0, 2.0, learn)]) == 0
    assert typical([step(0, 0.0, 0.0, learn), step(1, 0.0, 1.0)]) is None
    assert timeline([]) is None


def test_a_step_with_an_evaluation_is_not_typical() -> None:
    """Of `sft` no other step has rollouts."""
    learn, rollout = Activity("rank 0", "learn", 0.0, 1.0), Activity("rank 0 rollouts", "rollout", 0.0, 1.0)
    evaluates = Activity("rank 0", "eval", 0.0, 1.0)
    steps = [step(i, 0.0, 1.0 + i, learn) for i in range(3)]
    assert typical([*steps, step(3, 0.0, 9.0, learn, rollout, evaluates)]) == 2
    assert typical([steps[0], step(3, 0.0, 9.0, learn, rollout, evaluates)]) == 1


def test_what_came_before_a_step_has_its_name(tmp_path: Path) -> None:
    """Completing labels took most of the first step: it was drawn as `other`."""
    run = write_run(tmp_path / "run", num_scenes=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["event"] == "step")
    first["metrics"] |= {"labels_s": 23.0, "step_s": first["metrics"]["step_s"] + 23.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = training(read_run(run), heading="Training")
    assert drawn is not None
    (chart,) = (one for one in drawn.charts if one.title == "Seconds per step")
    assert "labels" in [name for name, _ in chart.legend]


def test_memory_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    """On GPUs."""

    def memory() -> list[Chart]:
        drawn = training(read_run(run), heading="Training")
        assert drawn is not None
        return [chart for chart in drawn.charts if "GPU memory" in chart.title]

    run = write_run(tmp_path / "run", num_scenes=2)
    assert memory() == []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    for n, line in enumerate(steps):
        line["metrics"]["gpu_peak_gib"] = 40.0 + n
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chart,) = memory()
    ((_, columns, _),) = chart.lines
    assert [column.y for column in columns] == [40.0 + n for n in range(len(steps))]


def test_a_call_that_ends_in_a_later_step_is_drawn_up_to_the_edge() -> None:
    """R25: and a sync is a bar of every server, since it serves nothing meanwhile."""
    first = step(1, 10.0, 12.0, Activity("rank 0", "sync", 10.0, 10.5), Activity(SERVER, "rollout", 10.5, 11.0))
    second = step(2, 12.0, 14.0, Activity(SERVER, "rollout", 11.5, 12.5), Activity("rank 0", "learn", 12.0, 13.0))
    assert activities_of([first, second], 0) == [
        Activity("rank 0", "sync", 10.0, 10.5),
        Activity(SERVER, "sync", 10.0, 10.5),
        Activity(SERVER, "rollout", 10.5, 11.0),
        Activity(SERVER, "rollout", 11.5, 12.0),
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["rank 0", "rank 10", "rank 2", "rank 2 rollouts", SERVER, "rank x"]),
            st.floats(0, 100),
            st.floats(0, 100),
        ),
        min_size=1,
    )
)
def test_bars_stay_inside_the_step_and_ranks_come_first_by_number(spans: list[tuple[str, float, float]]) -> None:
    bars = [Activity(lane, "learn", min(a, b), max(a, b)) for lane, a, b in spans]
    drawn = activities_of([step(1, 20.0, 60.0, *bars)], 0)
    assert all(20.0 <= bar.begin_s <= bar.end_s <= 60.0 for bar in drawn)
    order = ["rank 0", "rank 2", "rank 2 rollouts", "rank 10", SERVER, "rank x"]
    assert [bar.lane for bar in drawn] == sorted((bar.lane for bar in drawn), key=order.index)


def test_what_ran_is_told_once_with_neighbours_joined() -> None:
    """R15: phases of the learner's thread, `generate` calls, and each server's share of them; from any thread."""
    log = Timeline(rank=1)
    call = RolloutCallLog(
        global_step=3, micro_step_idx=0, first_req_idx=4, num_requests=2, num_micro_steps=1, chunk=2, seconds=2.0
    )
    call.began_at = 100.0
    for seed, error in ((1, ""), (2, "timed out")):
        told = CallRecord(
            base_url=SERVER, seed=seed, micro_step_idx=0, first_req_idx=4, num_requests=1, seconds=1.0, error=error
        )
        call.calls.append(CallRecord(**{name: getattr(told, name) for name in told.__slots__} | {"began_at": 101.0}))
    thread = threading.Thread(target=log.call, args=(call,))
    thread.start()
    thread.join()
    log.phase("learn", 100.0, 101.0)
    log.phase("learn", 101.0005, 102.0)
    log.phase("wait", 102.0, 102.5)
    event = log.event(Ranks(), 7)
    spans = [(lane, name, round(end - begin, 3)) for lane, name, begin, end in event["spans"]]
    assert spans == [
        ("rank 1 rollouts", "rollout", 2.0),
        (SERVER, "rollout", 1.0),
        (SERVER, "failed", 1.0),
        ("rank 1", "learn", 2.0),
        ("rank 1", "wait", 0.5),
    ]
    assert event["global_step"] == 7
    assert event["origin"] + event["spans"][0][2] == 100.0
    assert log.event(Ranks(), 8)["spans"] == []


@given(st.lists(st.floats(0.1, 100), min_size=20, max_size=80))
def test_what_falls_or_stays_does_not_rise(values: list[float]) -> None:
    for ys in (sorted(values, reverse=True), [values[0]] * len(values)):
        assert rise([(float(x), y) for x, y in enumerate(ys)]) is None


def test_a_rise_is_told_from_noise() -> None:
    rng = random.Random(3)
    noisy = [[(float(x), 1 + 0.2 * rng.gauss(0, 1)) for x in range(80)] for _ in range(200)]
    assert sum(rise(points) is not None for points in noisy) <= 10
    fell_then_rose = [(float(x), 1 + abs(x - 30) / 30 + 0.05 * rng.gauss(0, 1)) for x in range(80)]
    change = rise(fell_then_rose)
    assert change is not None
    assert change.steps == (20, 39)
    assert change.before < 1.5 < change.after
    assert rise(fell_then_rose[61:]) is None  # too few points to tell
    assert rise([(0.0, math.nan)] * 100) is None


def edit_steps(path: Path, edit: Callable[[int, dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "step":
            edit(line["global_step"], line)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def notes_of(path: Path) -> dict[str, str]:
    section = training(read_run(path), heading="Training")
    assert section is not None
    return {chart.title: chart.note for chart in section.charts}


def test_a_rising_loss_and_gradient_norm_are_explained(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert not any(notes_of(path).values())
    config = yaml.safe_load((path / RESOLVED_NAME).read_text())
    config["training"]["max_grad_norm"] = 1.5
    (path / RESOLVED_NAME).write_text(yaml.safe_dump(config))
    edit_steps(path, lambda step, line: line.update(grad_norm=1 + step / 20, num_supervised=1000 - 20 * step))
    assert not notes_of(path)["Loss"]
    note = notes_of(path)["Gradient norm"]
    assert "100% of the last quarter were clipped" in note
    assert "fewer tokens" in note
    assert "loss does not rise" in note
    edit_steps(path, lambda step, line: line.update(loss=0.2 + step / 100))
    assert "the answers got better" in notes_of(path)["Loss"]
    assert "loss does not rise" not in notes_of(path)["Gradient norm"]
    edit_steps(path, lambda step, line: line["metrics"].update(match_rate=1 - step / 100))
    assert "the answers got worse" in notes_of(path)["Loss"]
    edit_steps(path, lambda _, line: line.update(channel="A"))
    assert "ground truth" in notes_of(path)["Loss"]


def test_metrics_that_come_later_get_charts_of_their_own(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=5)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "step":
            at = line["global_step"]
            line["metrics"] |= {"reward/mean": 0.5 + at, "reward/std": 0.1 * at, "age_updates": 2.0 / at, "some_s": 0.1}
            line["metrics"] |= {"packing_fill": 0.9 / at, "never_changes": 3.0}
        elif line["event"] == "sync":
            line["merge_gap"] = 0.001 * line["ver"]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    titles = set(notes_of(path))
    assert {"reward/mean", "reward/std", "age_updates", "Effect of merging (nats a token) per sync"} <= titles
    assert "some_s" not in titles  # part of the stacked seconds
    assert not {"matched", "packing_fill", "missed", "never_changes"} & titles
    section = training(read_run(path), heading="Training")
    assert section is not None
    assert {"matched", "packing_fill"} <= {chart.title for chart in section.folded}
    assert section.flat is not None
    assert ["never_changes", "3"] in section.flat.rows


def test_the_page_shows_stage_2(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", variant="stage2_ab_training")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    ahead = {"queue_depth": 3.0, "packs_dropped_stale": 1.0, "packs_dropped_oldest": 0.0, "age_versions": 0.5}
    for line in lines:
        if line["event"] == "step":
            line["metrics"] |= {"stage2_ab/executed_b_share": 0.5, "stage2_ab/rollout_s": 1.0, "wait_s": 0.4}
            line["metrics"] |= {f"stage2_ab/async/{name}": value for name, value in ahead.items()}
    spans = [["rank 0", "learn", 0.0, 1.0], ["rank 0 rollouts", "rollout", -1.0, 0.5], [SERVER, "<b>", 0.1, 0.2], "?"]
    for number in (1, 2):
        lines.append({"event": "timeline", "global_step": number, "origin": 5.0, "seconds": 2.0, "spans": spans})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [len(found.activities) for found in read_run(path).timelines] == [3, 3]
    page = render(read_runs(path))
    for words in ("Step 2: what ran when", "Packs waiting, per rank", "Age of learned packs", "ran Channel-B", "wait"):
        assert words in page
    body = ET.fromstring(page[page.index("<body>") : page.index("</body>") + len("</body>")])
    lanes = [e for e in body.iter("div") if e.get("class") == "lanes"]  # lie beside the drawing, so they stay in sight
    assert [name.text for name in lanes[0]] == ["rank 0", "rank 0 rollouts", "127.0.0.1:8000"]
    assert "<b>:" not in page
    assert "&lt;b&gt;" in page or "127.0.0.1:8000" in page
    plain = render(read_runs(write_run(tmp_path / "plain")))
    assert "what ran when" not in plain
    assert "Packs waiting" not in plain
