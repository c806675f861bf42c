"""Tests of which split is for what, of the best checkpoint, and of early stopping (D17), with the real loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.policy.parallel import Ranks
from learner.run.best import BEST_FILE, BEST_LINK, BestEvaluation
from learner.run.stopping import TimeLimit
from shared.errors import ConfigError
from tests.tiers import slow
from tests.unit.learner.trainer_log import events_of
from tests.unit.learner.trainer_world import Seen, make_config, run, trainer, write_data


def config_with(model: Path, folder: Path, **training: Any) -> RunConfig:
    """Return a configuration that evaluates on `v0`..`v2` after every step."""
    samples = training.pop("num_samples", 8)
    values = make_config(model, folder, num_samples=samples, max_steps=1, per_device_train_batch_size=2).model_dump()
    values["training"] |= {"eval_steps": 1, **training}
    values["data"]["val"] = str(write_data(folder / "val.jsonl", 3, "v"))
    return config_of(values)


def scored(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """The task says `values[step]` of the evaluation after `step`."""
    from learner.steps import evaluation as module

    evaluate = module.evaluate

    def fixed(*args: Any, global_step: int, **more: Any) -> Any:
        found = evaluate(*args, global_step=global_step, **more)
        object.__setattr__(found, "metrics", {**found.metrics, "f1@0.5": values[global_step]})
        return found

    monkeypatch.setattr(module, "evaluate", fixed)


def folders(path: Path) -> list[str]:
    return sorted(one.name for one in (path / "run").glob("checkpoint-*"))


def test_training_evaluates_on_val_and_scores_test_once(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (seen,) = run(config_with(tiny_text, tmp_path, max_steps=2, eval_on_start=True, eval_on_end=True), monkeypatch)
    assert [call.sample_ids[0] for call in seen.calls] == ["v0", "v0", "v0", "t0"]
    assert [event["global_step"] for event in events_of(tmp_path, "eval")] == [0, 1, 2]
    (test,) = events_of(tmp_path, "test")
    assert test["global_step"] == 2
    assert test["metrics"].keys() == events_of(tmp_path, "eval")[0]["metrics"].keys()
    assert len((tmp_path / "run" / "eval" / "test.jsonl").read_text().splitlines()) == 5


def test_the_only_set_that_is_given_is_val(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tiny_text, tmp_path, max_steps=1, eval_on_end=True, per_device_train_batch_size=2)
    (seen,) = run(config, monkeypatch)
    assert [call.sample_ids[0] for call in seen.calls] == ["t0"]
    assert events_of(tmp_path, "test") == []


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_the_best_checkpoint_is_kept_beside_the_last(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    scored(monkeypatch, [0.9, 0.2, 0.5, 0.4, 0.5, 0.1])
    more = {"max_steps": 5, "save_steps": 1, "save_total_limit": 1, "num_samples": 20}
    run(config_with(tiny_text, tmp_path, **more), monkeypatch, world_size)
    assert (tmp_path / "run" / BEST_LINK).resolve().name == "checkpoint-2", "of equal ones the first"
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-5"]


def test_checkpoints_that_were_the_best_for_a_while_do_not_stay(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, [0.0, 0.1, 0.2, 0.3, 0.2])
    run(config_with(tiny_text, tmp_path, max_steps=4, save_steps=2), monkeypatch)
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert (tmp_path / "run" / BEST_LINK).resolve().name == "checkpoint-3"


@pytest.mark.parametrize("later", [0.4, 0.8])
def test_a_run_that_only_became_worse_says_so_at_its_end(
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    later: float,
) -> None:
    """Its start has no checkpoint, so the last one was taken for the result."""
    scored(monkeypatch, [0.7, 0.5, later])
    run(config_with(tiny_text, tmp_path, max_steps=2, eval_on_start=True), monkeypatch)
    told = " ".join(capsys.readouterr().out.split())
    assert ("than the start (f1@0.5 0.700)" in told) == (later < 0.7)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_early_stopping_goes_on_counting_after_a_resume(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Three evaluations in a row that are no better: two before the resume, one behind it."""
    scored(monkeypatch, [0.0, 0.1, 0.4, 0.3, 0.4, 0.2, 0.9, 0.9])
    more = {"early_stop_patience": 3, "num_samples": 28, "save_steps": 1, "save_total_limit": 1}
    run(config_with(tiny_text, tmp_path, max_steps=4, **more), monkeypatch, world_size)
    resumed = config_with(tiny_text, tmp_path, max_steps=7, resume_from_checkpoint="latest", **more)
    run(resumed, monkeypatch, world_size)
    assert [event["global_step"] for event in events_of(tmp_path, "step")] == [1, 2, 3, 4, 5]
    (stop,) = events_of(tmp_path, "early_stop")
    assert (stop["global_step"], stop["best_step"]) == (5, 2)
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-5"]


def test_an_interruption_adds_no_evaluation(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on between two evaluations was evaluated on its start. Another one there counted towards patience."""
    scored(monkeypatch, [0.5, 0.0, 0.4, 0.3, 0.6])
    more = {"eval_steps": 2, "eval_on_start": True, "early_stop_patience": 2, "num_samples": 20, "save_steps": 1}
    run(config_with(tiny_text, tmp_path, max_steps=3, **more), monkeypatch)
    run(config_with(tiny_text, tmp_path, max_steps=4, resume_from_checkpoint="latest", **more), monkeypatch)
    assert [event["global_step"] for event in events_of(tmp_path, "eval")] == [0, 2, 4]
    assert (tmp_path / "run" / BEST_LINK).resolve().name == "checkpoint-4"


@pytest.mark.parametrize("eval_on_start", [True, slow(False)])
def test_an_evaluation_that_was_cut_short_is_made_again(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_on_start: bool
) -> None:
    """Step 2 was saved, and its evaluation did not end."""
    more = {"eval_on_start": eval_on_start, "eval_steps": 2, "num_samples": 20, "save_steps": 1}
    with monkeypatch.context() as once:
        scored(once, [0.1, 0.1])  # no value for step 2
        with pytest.raises(IndexError):
            run(config_with(tiny_text, tmp_path, max_steps=3, **more), once)
    scored(monkeypatch, [0.1, 0.1, 0.9, 0.1])
    run(config_with(tiny_text, tmp_path, max_steps=3, resume_from_checkpoint="latest", **more), monkeypatch)
    assert [event["global_step"] for event in events_of(tmp_path, "eval")] == ([0, 2] if eval_on_start else [2])
    assert (tmp_path / "run" / BEST_LINK).resolve().name == "checkpoint-2"


@pytest.mark.parametrize("text", ["", "[1]", '{"metric": "f1@0.5", "values": [1]}', "[" * 100_000])
def test_a_damaged_record_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / BEST_FILE).write_text(text)
    best = BestEvaluation(root=tmp_path, ranks=Ranks(), metric="f1@0.5")
    best.restore(3)
    assert best.values == {}


def test_a_resume_forgets_what_comes_later(tmp_path: Path) -> None:
    best = BestEvaluation(root=tmp_path, ranks=Ranks(), metric="f1")
    for step, value in ((1, 0.2), (2, 0.5), (3, 0.4)):
        best.add(step, {"f1": value})
    again = BestEvaluation(root=tmp_path, ranks=Ranks(), metric="f1")
    again.restore(1)
    assert again.values == {1: 0.2}
    assert again.add(2, {"f1": 0.3}).is_best


def test_a_metric_that_evaluations_do_not_have_is_named(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tiny_text, tmp_path, max_steps=2, keep_best="f1@0.7")
    with (
        pytest.raises(ConfigError) as caught,
        trainer(config, Ranks(), monkeypatch, Seen()) as made,
    ):
        made.run()
    assert caught.value.found == "f1@0.7"
    assert "f1@0.5" in caught.value.wanted


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_run_ends_when_its_time_is_up_and_is_evaluated(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """R49: `training.max_minutes` ends it on all ranks after the same step, by rank 0's clock."""
    config = config_with(tiny_text, tmp_path, max_steps=50, eval_steps=20, eval_on_end=True, max_minutes=1.0)
    steps = iter([False, False, True])
    monkeypatch.setattr(TimeLimit, "is_over", lambda limit: limit._ranks.broadcast_object(_next(limit, steps)))
    run(config, monkeypatch, world_size)
    steps_and_evaluations = [[event["global_step"] for event in events_of(tmp_path, name)] for name in ("step", "eval")]
    assert steps_and_evaluations == [[1, 2], [2]]


def _next(limit: TimeLimit, steps: Iterator[bool]) -> bool | None:
    return next(steps) if limit._ranks.is_main else None
