"""The whole recipe on a tiny model: what it chooses, that it never gives less than its start, and that it goes on
wherever it was killed (R49). The learner is real; rollouts are those of `trainer_world`, and the scores are given.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from learner import trainer as trainer_module
from learner.__main__ import main
from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.policy.load import Policy
from learner.recipe import command, record
from learner.recipe import stages as stages_module
from learner.recipe.command import AGAIN, recipe
from learner.recipe.record import read_record
from learner.run.best import kept
from learner.tasks.detection import gaps
from learner.trainer import Trainer
from learner.wiring import build
from shared.errors import CheckpointError, ConfigError, DataError
from tests.runs import events
from tests.tiers import slow
from tests.unit.learner.trainer_world import FakeBackend, FakeSync, Seen, make_config, write_data

Scores = Mapping[str, Mapping[int, float]]  # keys are stage and step; other steps have 0.1
MINUTES = 60.0
GAINS: Scores = {"sft": {0: 0.3, 1: 0.4, 2: 0.6, 3: 0.5}, "grpo": {0: 0.6, 1: 0.65, 2: 0.7}}


class Killed(BaseException):
    """The process is gone: nothing is saved on its way out."""


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scores], None]:
    """Put the servers of `trainer_world` in place; return what says which scores the evaluations of each stage have."""
    said: dict[str, Any] = {"stage": "", "scores": {}}
    evaluate, train_on = trainer_module.evaluate, command.train_on

    def connect_backend(config: RunConfig, policy: Policy, **_: Any) -> FakeBackend:
        return FakeBackend(config, policy, Seen())

    def connect_sync(_: RunConfig, __: Policy, backend: FakeBackend, *___: Any, **____: Any) -> FakeSync:
        return FakeSync(backend)

    def stage(config: RunConfig, *args: Any, **more: Any) -> int:
        said["stage"] = config.custom.trainer_variant
        return train_on(config, *args, **more)

    def scored(*args: Any, global_step: int, **more: Any) -> Any:
        found = evaluate(*args, global_step=global_step, **more)
        value = said["scores"][said["stage"]].get(global_step, 0.1)
        object.__setattr__(found, "metrics", {**found.metrics, "fm@0.5": value, "recall@0.5": value / 2})
        return found

    monkeypatch.setattr(build, "connect_backend", connect_backend)
    monkeypatch.setattr(build, "connect_sync", connect_sync)
    monkeypatch.setattr(build, "log_to_file", lambda *_: None)
    monkeypatch.setattr(command, "train_on", stage)
    monkeypatch.setattr(trainer_module, "evaluate", scored)
    return lambda scores: said.update(scores=scores)


def config_for(model: Path, folder: Path) -> RunConfig:
    sizes = {"num_samples": 32, "max_steps": 1, "per_device_train_batch_size": 2}
    values = make_config(model, folder, eval_steps=1, **sizes).model_dump()
    values["training"]["early_stop_patience"] = 1
    values["data"]["val"] = str(write_data(folder / "val.jsonl", 3, "v"))
    values["custom"]["extra"]["rollout_matching"]["decoding"]["max_new_tokens"] = 64
    return config_of(values)


def completing(model: Path, folder: Path) -> dict[str, Any]:
    """Return the values of a recipe that completes labels with what any answer has."""
    values = config_for(model, folder).model_dump()
    values["labels"]["complete"] = {"min_votes": 1}
    return values


def stages(folder: Path) -> list[tuple[str, int, float, float]]:
    found = read_record(folder / "run")
    assert found is not None
    return [(stage.name, stage.best_step, stage.score_before, stage.score) for stage in found.stages]


BOTH = [("sft", 2, 0.3, 0.6), ("grpo", 2, 0.6, 0.7)]


def test_grpo_follows_where_places_are_left_to_gain(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], capsys: pytest.CaptureFixture[str]
) -> None:
    scores(GAINS)
    run = tmp_path / "run"
    assert recipe(config_for(tiny_text, tmp_path), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH
    assert kept(run) == run / "grpo" / "checkpoint-2"
    found = read_record(run)
    assert found is not None
    assert (found.best_of, found.best_score) == ("grpo", 0.7)
    assert found.headroom["headroom_places"].low > 0.03, "the answers of trainer_world are some of the labels each"
    assert "headroom" in found.grpo or "best of K" in found.grpo
    configured = json.loads((run / "grpo" / "metrics.jsonl").read_text().splitlines()[0])
    assert configured["trainer_variant"] == "grpo"
    assert (run / "sft" / "config.yaml").is_file()
    said, page = capsys.readouterr().out, (run / "report.html").read_text()
    assert re.search(r"^step 1, \d+\.\d/\d+\.\d min  ", said, re.MULTILINE), "a stage is as long as its time"
    for text in ("recall@0.5 +0.150", "recall@0.5 +0.050", "nothing completed"):
        assert text in said
        assert text in page, "the report says what each stage gained"


def test_a_stage_with_an_engine_of_its_own_is_the_last_of_its_process(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]
) -> None:
    """vLLM refuses a second engine in a process on CUDA, after the first one has gone too."""
    scores(GAINS)
    values = config_for(tiny_text, tmp_path).model_dump()
    values["custom"]["extra"]["rollout_matching"]["vllm"]["mode"] = "colocate"
    values["custom"]["extra"]["rollout_matching"]["vllm"]["tensor_parallel_size"] = 1
    assert recipe(config_of(values), MINUTES, environment={}) == AGAIN
    assert stages(tmp_path) == BOTH[:1]
    assert recipe(config_of(values), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH


def test_an_adapter_is_trained_on_by_grpo(tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]) -> None:
    """R09: the second stage begins with the adapter of the first one, on the same base."""
    scores(GAINS)
    values = config_for(tiny_text, tmp_path).model_dump()
    values["model"]["lora"] = {"r": 4, "alpha": 8}
    assert recipe(config_of(values), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH
    first, last = (tmp_path / "run" / name / "checkpoint-2" for name in ("sft", "grpo"))
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, last))
    assert a.keys() == b.keys()
    assert any(not torch.equal(a[name], b[name]) for name in a)
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in (first, last)]
    assert settings[0]["base_model_name_or_path"] == settings[1]["base_model_name_or_path"] == str(tiny_text)


def test_it_ends_where_only_names_are_left(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(GAINS)
    monkeypatch.setattr(FakeBackend, "_answer", _all_objects)
    assert recipe(config_for(tiny_text, tmp_path), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH[:1]
    found = read_record(tmp_path / "run")
    assert found is not None
    assert found.headroom["headroom_places"].value == pytest.approx(0.0)
    assert found.ended.startswith("no places are left")
    assert not (tmp_path / "run" / "grpo").exists(), "nothing was learned there"
    assert kept(tmp_path / "run") == tmp_path / "run" / "sft" / "checkpoint-2"


_answer = FakeBackend._answer


def _all_objects(backend: FakeBackend, sample: Any, seed: int) -> Any:
    """Every answer is the whole truth."""
    return _answer(backend, sample, len(sample.objects) + 1)


@pytest.mark.slow
def test_completed_labels_ask_for_no_headroom(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is counted by labels, and these still have gaps: with 60% missing 0.018 [-0.013, 0.048] were seen
    where `grpo` gains 0.04. So it begins, and validation decides. Here answers are all the same: no headroom."""
    scores(GAINS)
    monkeypatch.setattr(FakeBackend, "_answer", _one_more)
    assert recipe(config_of(completing(tiny_text, tmp_path)), MINUTES, environment={}) == 0
    found = read_record(tmp_path / "run")
    assert found is not None
    assert stages(tmp_path) == BOTH
    assert found.stages[0].completed
    assert "completed" in found.grpo
    assert not found.headroom, "nothing was measured, because nothing was decided by it"


@pytest.mark.parametrize(("start", "begins_with"), [(0.5, "start"), slow(0.44, "sft")])
def test_on_completed_labels_grpo_begins_with_the_start(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    monkeypatch: pytest.MonkeyPatch,
    start: float,
    begins_with: str,
) -> None:
    """`sft` learns the wrong names among them: with 60% missing, `grpo` had 0.80 from there, and 0.83 from the start.
    A start that is far behind is not taken."""
    scores({"sft": {0: start, 1: 0.6}, "grpo": {0: start, 1: 0.7}})
    monkeypatch.setattr(FakeBackend, "_answer", _one_more)
    assert recipe(config_of(completing(tiny_text, tmp_path)), MINUTES, environment={}) == 0
    run = tmp_path / "run"
    configured = yaml.safe_load((run / "grpo.yaml").read_text())
    assert Path(configured["model"]["path"]) == {"start": tiny_text, "sft": run / "sft" / "checkpoint-1"}[begins_with]
    assert kept(run) == run / "grpo" / "checkpoint-1"


def follow_through(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, killed_at_step: int | None) -> None:
    """Follow the recipe to its end; with `killed_at_step` a second command does."""
    values["training"]["save_steps"] = 1
    config = config_of(values)
    if killed_at_step:
        kill_at_call(monkeypatch, Trainer, "step", killed_at_step)
        with pytest.raises(Killed):
            recipe(config, MINUTES, environment={})
    assert recipe(config, MINUTES, environment={}) == 0


@pytest.mark.parametrize(
    ("start", "killed_at_step", "completed"),
    [slow(0.5, None, [1, 0]), slow(0.5, 4, [1, 0]), (0.5, 5, [1, 0]), slow(0.3, None, [1, 1]), slow(0.3, 5, [1, 1])],
)
def test_grpo_learns_the_labels_that_the_start_completed(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    monkeypatch: pytest.MonkeyPatch,
    start: float,
    killed_at_step: int | None,
    completed: list[int],
) -> None:
    """`sft` learned the annotated labels, so its weights find these more often than what has none: with 60% missing
    they added 325 labels, of which 268 were right, and the start 495, of which 412 were. A start that is much worse
    than `sft` completes none for `grpo`."""
    scores({**GAINS, "sft": {0: start, 1: 0.55, 2: 0.6, 3: 0.5}})
    monkeypatch.setattr(FakeBackend, "_answer", _one_more)
    values = completing(tiny_text, tmp_path)
    follow_through(values, monkeypatch, killed_at_step)
    assert stages(tmp_path) == [("sft", 2, start, 0.6), ("grpo", 2, 0.6, 0.7)]
    assert [len(events(tmp_path / "run" / name, "labels")) for name in ("sft", "grpo")] == completed
    learned = events(tmp_path / "run" / "grpo", "step")
    assert {event["metrics"]["reward/f1"] for event in learned} == {1.0}, "every answer has all labels, each once"


@pytest.mark.parametrize(("start", "killed_at_step"), [(0.5, 5), slow(0.3, None), slow(0.3, 4)])
def test_where_the_start_cannot_complete_rollout_matching_follows(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    monkeypatch: pytest.MonkeyPatch,
    start: float,
    killed_at_step: int | None,
) -> None:
    """A model of noisy digits is right in so few of its boxes that none is sure enough to be a label: there
    `keep_unmatched` is ahead of `sft`. Here every answer finds an object that nobody labelled, but gives most of the
    labelled ones another name."""
    scores({"sft": {0: start, 1: 0.55, 2: 0.6, 3: 0.5}, "rollout_matching_sft": {0: 0.6, 1: 0.7}})
    monkeypatch.setattr(FakeBackend, "_answer", _inventions)
    monkeypatch.setattr(gaps, "_AUC", 1.0)  # so few objects look as if they were not missing at random
    values = config_for(tiny_text, tmp_path).model_dump()
    follow_through(values, monkeypatch, killed_at_step)
    run = tmp_path / "run"
    found = read_record(run)
    assert found is not None
    assert [stage.name for stage in found.stages] == ["sft", "rollout_matching_sft"]
    assert found.best_of == "rollout_matching_sft"
    assert kept(run) == run / "rollout_matching_sft" / "checkpoint-1"
    assert "sure enough" in found.stages[1].why
    configured = yaml.safe_load((run / "rollout_matching_sft.yaml").read_text())
    assert Path(configured["model"]["path"]) == tiny_text, "sft has learned to leave out what has no label"
    assert "rollout_matching_sft" in (run / "report.html").read_text()


@pytest.mark.parametrize("killed_at_step", [None, slow(3), slow(5)])
def test_where_boxes_are_loose_grpo_learns_their_iou_last(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    monkeypatch: pytest.MonkeyPatch,
    killed_at_step: int | None,
) -> None:
    """Blood cells: F1@mIoU is 0.6 of F1@0.5 there. With 40% missing `keep_unmatched` had 0.592, and soft IoU after it
    0.619."""
    said = {"sft": {0: 0.5, 1: 0.4}, "rollout_matching_sft": {0: 0.5, 1: 0.7}, "grpo": {0: 0.7, 1: 0.8}}
    scores(said)
    monkeypatch.setattr(FakeBackend, "_answer", _inventions)
    monkeypatch.setattr(gaps, "_AUC", 1.0)  # so few objects look as if they were not missing at random
    monkeypatch.setattr(command, "LOOSE", 2.0)  # all boxes
    follow_through(config_for(tiny_text, tmp_path).model_dump(), monkeypatch, killed_at_step)
    run = tmp_path / "run"
    found = read_record(run)
    assert found is not None
    assert [(stage.name, stage.score) for stage in found.stages] == [
        ("sft", 0.5),
        ("rollout_matching_sft", 0.7),
        ("grpo", 0.8),
    ]
    assert "the reward is the IoU" in found.stages[2].why
    assert kept(run) == run / "grpo" / "checkpoint-1"
    configured = yaml.safe_load((run / "grpo.yaml").read_text())
    assert configured["reward"]["weights"] == {"soft_iou": 1.0}
    assert configured["labels"]["complete"] is None, "the start can't complete them"
    assert Path(configured["model"]["path"]) == run / "rollout_matching_sft" / "checkpoint-1"


@pytest.mark.parametrize(
    ("best_of_sft", "begins_with"), [slow(0.6, "sft/checkpoint-1"), slow(0.4, "the model of the configuration")]
)
def test_loose_boxes_ask_for_no_headroom(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    monkeypatch: pytest.MonkeyPatch,
    best_of_sft: float,
    begins_with: str,
) -> None:
    """Photographs with the published labels: `sft` 0.628, soft IoU after it 0.652. A reward of one's own stays."""
    scores({"sft": {0: 0.5, 1: best_of_sft}, "grpo": {0: 0.6, 1: 0.7}})
    monkeypatch.setattr(FakeBackend, "_answer", _all_objects)
    monkeypatch.setattr(command, "LOOSE", 2.0)
    values = config_for(tiny_text, tmp_path).model_dump()
    values["reward"]["weights"] = {"count": 1.0}
    assert recipe(config_of(values), MINUTES, environment={}) == 0
    run = tmp_path / "run"
    found = read_record(run)
    assert found is not None
    assert [stage.name for stage in found.stages] == ["sft", "grpo"]
    assert not found.headroom
    configured = yaml.safe_load((run / "grpo.yaml").read_text())
    assert configured["reward"]["weights"] == {"count": 1.0}
    assert "loose" in found.stages[1].why
    assert "reward" not in found.stages[1].why, "it is the user's, not the IoU"
    assert Path(configured["model"]["path"]) == (run / begins_with if best_of_sft > 0.5 else tiny_text)


def _inventions(backend: FakeBackend, sample: Any, seed: int) -> Any:
    """Every answer has an object that nobody labelled, and all annotated ones, of which two of three have another
    name."""
    annotated = [obj for obj in sample.objects if obj.votes is None]
    renamed = [obj._replace(desc="another") if i % 3 else obj for i, obj in enumerate(annotated, 1)]
    more = (*renamed, annotated[0]._replace(bins=(800, 850, 990, 990)))
    found = _answer(backend, replace(sample, objects=more), len(more) + 1)
    return replace(found, sample=sample)


def _one_more(backend: FakeBackend, sample: Any, seed: int) -> Any:
    """Every answer is the annotated truth and an object that has no label."""
    annotated = [obj for obj in sample.objects if obj.votes is None]
    more = (*annotated, annotated[0]._replace(bins=(800, 850, 990, 990)))
    found = _answer(backend, replace(sample, objects=more), len(more) + 1)
    return replace(found, sample=sample)


def test_sft_has_all_of_the_time_where_grpo_gains_nothing(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share is over before its first step; after the headroom is known it goes on from there."""
    scores(GAINS)
    monkeypatch.setattr(FakeBackend, "_answer", _all_objects)
    monkeypatch.setattr(command, "SFT_SHARE", 1e-9)
    monkeypatch.setattr(stages_module, "LEAST_MINUTES", 1e-9)
    assert recipe(config_for(tiny_text, tmp_path), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH[:1]
    found = read_record(tmp_path / "run")
    assert found is not None
    assert found.extended
    assert found.ended.startswith("no places are left")


@pytest.mark.parametrize(
    ("scores_said", "best", "checkpoint"),
    [
        slow({"sft": {0: 0.6}, "grpo": {0: 0.6}}, "start", None),
        ({"sft": {0: 0.6, 1: 0.6}, "grpo": {0: 0.6}}, "start", None),  # an equal score is not worth a change
        slow({"sft": {0: 0.6}, "grpo": {0: 0.6, 1: 0.7}}, "grpo", "grpo/checkpoint-1"),
        slow({"sft": {0: 0.3, 1: 0.6}, "grpo": {0: 0.55, 1: 0.58}}, "sft", "sft/checkpoint-1"),
    ],
)
def test_it_never_gives_less_than_its_start(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    scores_said: Scores,
    best: str,
    checkpoint: str | None,
) -> None:
    scores(scores_said)
    assert recipe(config_for(tiny_text, tmp_path), MINUTES, environment={}) == 0
    found = read_record(tmp_path / "run")
    assert found is not None
    assert found.best_of == best
    assert kept(tmp_path / "run") == (tmp_path / "run" / checkpoint if checkpoint else tiny_text)


# ---- killed, and begun again ----------------------------------------------------------------------------------------


def kill_at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """The process is gone before the call of this number, from 1 on; it lives the next time."""
    work, calls = getattr(owner, name), iter(range(1, 1000))

    def dying(*args: Any, **more: Any) -> Any:
        if next(calls) == number:
            raise Killed
        return work(*args, **more)

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        slow(Trainer, "step", 1),  # nothing was saved yet
        slow(Trainer, "step", 3),  # sft's
        (Trainer, "step", 5),  # grpo's
        slow(command, "stage_result", 1),  # sft has ended, and nobody knows
        slow(record.Record, "write", 1),
        slow(record.Record, "write", 3),
        slow(record.Record, "write", 4),
        slow(command, "measure_headroom", 1),
        slow(command, "write_report", 1),
    ],
)
def test_it_goes_on_wherever_it_was_killed(
    tiny_text: Path,
    tmp_path: Path,
    scores: Callable[[Scores], None],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int,
) -> None:
    scores(GAINS)
    config = config_for(tiny_text, tmp_path)
    kill_at_call(monkeypatch, owner, name, number)
    with pytest.raises(Killed):
        recipe(config, MINUTES, environment={})
    assert recipe(config, MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH
    assert kept(tmp_path / "run") == tmp_path / "run" / "grpo" / "checkpoint-2"
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_a_stop_in_the_last_evaluation_of_a_stage_begins_no_other(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage has no check after it: the signal was lost, and the recipe went on with grpo."""
    scores(GAINS)
    config, scored = config_for(tiny_text, tmp_path), trainer_module.evaluate

    def signalled(*args: Any, global_step: int, **more: Any) -> Any:
        if global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return scored(*args, global_step=global_step, **more)

    with monkeypatch.context() as once:
        once.setattr(trainer_module, "evaluate", signalled)
        assert recipe(config, MINUTES, environment={}) == 128 + signal.SIGTERM
    assert stages(tmp_path) == BOTH[:1]
    assert recipe(config, MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH


def test_a_recipe_that_has_ended_trains_no_more(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(GAINS)
    config = config_for(tiny_text, tmp_path)
    assert recipe(config, MINUTES, environment={}) == 0
    monkeypatch.setattr(Trainer, "step", _never)
    assert recipe(config, MINUTES, environment={}) == 0


def _never(*_: Any) -> Any:
    pytest.fail("a stage that has ended was begun again")


def test_time_that_is_up_ends_it_with_what_there_is(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(GAINS)
    monkeypatch.setattr(command, "SFT_SHARE", 1.0)
    monkeypatch.setattr(command, "LEAST_SHARE", 1.0)
    assert recipe(config_for(tiny_text, tmp_path), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH[:1]
    found = read_record(tmp_path / "run")
    assert found is not None
    assert "minutes are left" in found.ended


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_recipe_in_the_folder_is_not_taken_up(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]
) -> None:
    scores(GAINS)
    config = config_for(tiny_text, tmp_path)
    assert recipe(config, MINUTES, environment={}) == 0
    other = config.model_copy(update={"data": config.data.model_copy(update={"shuffle": False})})
    with pytest.raises(ConfigError) as caught:
        recipe(other, MINUTES, environment={})
    assert str(tmp_path / "run") in caught.value.found
    assert caught.value.remedy


def test_a_recipe_that_a_mistake_ended_is_begun_with_other_data(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]
) -> None:
    """Nothing was learned, so there is nothing to go on with."""
    scores(GAINS)
    values = config_for(tiny_text, tmp_path).model_dump()
    (tmp_path / "empty.jsonl").write_text("")
    wrong = config_of({**values, "data": {**values["data"], "val": str(tmp_path / "empty.jsonl")}})
    with pytest.raises(DataError):
        recipe(wrong, MINUTES, environment={})
    assert recipe(config_of(values), MINUTES, environment={}) == 0
    assert stages(tmp_path) == BOTH


def test_validation_without_objects_decides_nothing(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]
) -> None:
    scores(GAINS)
    config = config_for(tiny_text, tmp_path)
    path = Path(str(config.data.val))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "objects": []}) + "\n" for row in rows))
    with pytest.raises(DataError) as error:
        recipe(config, MINUTES, environment={})
    assert "data.val" in error.value.found
    assert "data.val" in error.value.remedy


def test_a_damaged_record_is_named(tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]) -> None:
    scores(GAINS)
    config = config_for(tiny_text, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text('{"stages": [')
    with pytest.raises(CheckpointError) as caught:
        recipe(config, MINUTES, environment={})
    assert "recipe.json" in caught.value.found
    (tmp_path / "run" / "recipe.json").unlink()
    assert recipe(config, MINUTES, environment={}) == 0


def test_a_wrong_configuration_is_one_message(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = config_for(tiny_text, tmp_path).model_dump(mode="json")
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    overrides = ["data.val=null", "training.early_stop_patience=null"]
    assert main(["recipe", "--config", str(path), "--minutes", "1", *overrides]) == 2
    shown = capsys.readouterr().err
    assert shown.lstrip().startswith(("data.val: ", "error: ConfigErrors: data.val: "))
    assert "eval_on_start" not in shown, "the user did not set it"
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_an_ordinary_run_in_the_folder_is_left_alone(
    tiny_text: Path, tmp_path: Path, scores: Callable[[Scores], None]
) -> None:
    scores(GAINS)
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        recipe(config_for(tiny_text, tmp_path), MINUTES, environment={})
    assert "checkpoint" in caught.value.found
