"""The stages of a recipe as they are learned, in this process: what each begins with (R49). The learner is real;
rollouts are those of `trainer_world`, and the scores are given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from learner.config.load import config_of, load_config
from learner.config.schema import RunConfig
from learner.policy.load import Policy
from learner.recipe.command import recipe
from learner.recipe.record import Record, read_record
from learner.recipe.stage import train_stage
from learner.steps import evaluation
from learner.tasks.detection.ranking import GapJudge, GapScore
from learner.trainer import Trainer
from learner.wiring import build
from shared.errors import DataError
from tests.runs import events
from tests.tiers import slow
from tests.unit.learner.recipe.test_recipe import MINUTES, SURE, Killed, Scores, Stages
from tests.unit.learner.trainer_world import FakeBackend, FakeSync, Seen, make_config, write_data

GAINS: Scores = {"sft": {0: 0.3, 1: 0.6}, "grpo": {0: 0.6, 1: 0.7}}  # other steps have 0.1


def run_stage(path: Path) -> int:
    return train_stage(load_config(path), environment={})


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mapping[int, float]]:
    """Put the servers of `trainer_world` in place; the scores that evaluations of each stage have, by step."""
    said: dict[str, Mapping[int, float]] = dict(GAINS)
    evaluate = evaluation.evaluate

    def connect_backend(config: RunConfig, policy: Policy, **_: Any) -> FakeBackend:
        return FakeBackend(config, policy, Seen())

    def connect_sync(_: RunConfig, __: Policy, backend: FakeBackend, *___: Any, **____: Any) -> FakeSync:
        return FakeSync(backend)

    def build_stage(config: RunConfig, *args: Any, **more: Any) -> Trainer:
        said["now"] = said.get(config.custom.trainer_variant, {})
        return made(config, *args, **more)

    def scored(*args: Any, global_step: int, **more: Any) -> Any:
        found = evaluate(*args, global_step=global_step, **more)
        value = said["now"].get(global_step, 0.1)
        object.__setattr__(found, "metrics", {**found.metrics, "fm@0.5": value, "recall@0.5": value / 2})
        return found

    made = build.build
    monkeypatch.setattr(build, "build", build_stage)
    monkeypatch.setattr(build, "connect_backend", connect_backend)
    monkeypatch.setattr(build, "connect_sync", connect_sync)
    monkeypatch.setattr(build, "log_to_file", lambda *_: None)
    monkeypatch.setattr(evaluation, "evaluate", scored)
    return said


def values_for(model: Path, folder: Path, **labels: Any) -> dict[str, Any]:
    sizes = {"num_samples": 32, "max_steps": 1, "per_device_train_batch_size": 2}
    values = make_config(model, folder, eval_steps=1, save_steps=1, **sizes).model_dump()
    values["training"]["early_stop_patience"] = 1
    values["data"]["val"] = str(write_data(folder / "val.jsonl", 3, "v"))
    values["custom"]["extra"]["rollout_matching"]["decoding"]["max_new_tokens"] = 64
    values["labels"] |= labels
    return values


def ended(folder: Path) -> Record:
    found = read_record(folder / "run")
    assert found is not None
    assert found.ended
    return found


def test_grpo_trains_the_adapter_of_sft_on_where_the_headroom_is_measured(
    tiny_text: Path,
    tmp_path: Path,
    scores: dict[str, Mapping[int, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R09: the second stage begins with the adapter of the first one, on the same base. The answers of
    `trainer_world` are some of the labels each, so places are left to gain."""
    values = values_for(tiny_text, tmp_path)
    values["model"]["lora"] = {"r": 4, "alpha": 8}
    assert recipe(config_of(values), MINUTES, environment={}, run_stage=run_stage) == 0
    found = ended(tmp_path)
    assert [(stage.name, stage.best_step, stage.score) for stage in found.stages] == [("sft", 1, 0.6), ("grpo", 1, 0.7)]
    assert found.headroom["headroom_places"].low > 0.03
    assert found.stages[0].labels.startswith("nothing completed")
    said = capsys.readouterr().out
    assert re.search(r"^step 1, \d+\.\d/\d+\.\d min  ", said, re.MULTILINE), "a stage is as long as its time"
    first, last = (tmp_path / "run" / name / "checkpoint-1" for name in ("sft", "grpo"))
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, last))
    assert a.keys() == b.keys()
    assert any(not torch.equal(a[name], b[name]) for name in a)
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in (first, last)]
    assert settings[0]["base_model_name_or_path"] == settings[1]["base_model_name_or_path"] == str(tiny_text)


def after_sft(stages: Stages) -> Callable[[Path], int]:
    """Only what follows `sft` is learned. Its start was the best, so that `grpo` begins there."""
    return lambda path: stages(path) if path.stem == "sft" else run_stage(path)


def test_nothing_is_learned_where_only_names_are_left(
    tiny_text: Path, tmp_path: Path, scores: dict[str, Mapping[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is the whole truth."""
    monkeypatch.setattr(FakeBackend, "_answer", lambda self, one, _: _answer(self, one, len(one.objects) + 1))
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("it was begun"))
    run = after_sft(Stages({"sft": {0: 0.6, 1: 0.1}}))
    assert recipe(config_of(values_for(tiny_text, tmp_path)), MINUTES, environment={}, run_stage=run) == 0
    found = ended(tmp_path)
    assert found.headroom["headroom_places"].value == pytest.approx(0.0)
    assert found.ended.startswith("no places are left")


@pytest.mark.parametrize("killed_at_step", [slow(None), 1, slow(2)])
def test_grpo_learns_the_labels_that_the_start_completed(
    tiny_text: Path,
    tmp_path: Path,
    scores: dict[str, Mapping[int, float]],
    monkeypatch: pytest.MonkeyPatch,
    killed_at_step: int | None,
) -> None:
    """`sft` learned the annotated labels, so its weights find these more often than what has none: with 60% missing
    they added 325 labels, of which 268 were right, and the start 495, of which 412 were."""
    values = values_for(tiny_text, tmp_path, complete={"min_votes": 1})
    rows = [json.loads(line) for line in Path(values["data"]["train"]).read_text().splitlines()]
    more = {row["id"]: {"objects": [["one", "bbox_2d", list(MORE), [4, 4]]]} for row in rows}
    scores["grpo"] = {0: 0.6, 1: 0.65, 2: 0.7}
    monkeypatch.setattr(FakeBackend, "_answer", _one_more)
    run = after_sft(Stages({"sft": {0: 0.6, 1: 0.1}}, labels=SURE, samples=more))
    if killed_at_step is not None:
        step, calls = Trainer.step, iter(range(1, 100))

        def dying(self: Trainer, *args: Any) -> Any:
            if next(calls) == killed_at_step:
                raise Killed
            return step(self, *args)

        monkeypatch.setattr(Trainer, "step", dying)
        with pytest.raises(Killed):
            recipe(config_of(values), MINUTES, environment={}, run_stage=run)
    assert recipe(config_of(values), MINUTES, environment={}, run_stage=run) == 0
    assert [(stage.name, stage.best_step) for stage in ended(tmp_path).stages] == [("sft", 0), ("grpo", 2)]
    grpo = tmp_path / "run" / "grpo"
    assert not events(grpo, "labels"), "they are not completed again"
    learned = events(grpo, "step")
    assert {event["metrics"]["reward/f1"] for event in learned} == {1.0}, "every answer has all labels, each once"


def test_scores_of_all_stages_are_for_one_range_of_objects(
    tiny_text: Path, tmp_path: Path, scores: dict[str, Mapping[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`grpo` has the range and the shares of right finds that `sft` found in its first evaluation: by a range of its
    own, which its better start makes larger, its score would be lower, and `sft` kept."""
    seen: list[Any] = []

    def score(judge: GapJudge, boxes: Sequence[Any]) -> GapScore:
        """It is right in 20 of 20 boxes."""
        seen.append(dict(judge.shares))
        ones = np.ones(20)
        return GapScore(right=ones, unlabelled=ones, free=ones, boxes=ones)

    monkeypatch.setattr(GapJudge, "score", score)
    monkeypatch.setattr(GapJudge, "objects", lambda *_: (200.0, 400.0))
    played = Stages({"sft": {0: 0.6, 1: 0.5}}, metric="estimated_f1@0.5")

    def run(path: Path) -> int:
        if path.stem != "sft":
            return run_stage(path)
        known = path.parent / "sft" / "eval" / "gaps.json"
        known.parent.mkdir(parents=True)
        known.write_text(json.dumps({"objects": [20.0, 20.0], "shares": [["one", True, 0.75]]}))
        return played(path)

    assert recipe(config_of(values_for(tiny_text, tmp_path)), MINUTES, environment={}, run_stage=run) == 0
    found = ended(tmp_path)
    assert found.metric == "estimated_f1@0.5"
    assert found.stages[1].score_before == pytest.approx(1.0), "20 right of 20 boxes and 20 objects"
    assert found.best_of == "grpo"
    assert seen[0] == {("one", True): 0.75}


def test_validation_without_objects_decides_nothing(
    tiny_text: Path, tmp_path: Path, scores: dict[str, Mapping[int, float]]
) -> None:
    values = values_for(tiny_text, tmp_path)
    path = Path(values["data"]["val"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "objects": []}) + "\n" for row in rows))
    with pytest.raises(DataError) as error:
        recipe(config_of(values), MINUTES, environment={}, run_stage=run_stage)
    assert "data.val" in error.value.found
    assert "data.val" in error.value.remedy


MORE = (800, 850, 990, 990)
_answer = FakeBackend._answer


def _one_more(backend: FakeBackend, sample: Any, seed: int) -> Any:
    """Every answer is the annotated truth and an object that has no label."""
    annotated = [obj for obj in sample.objects if obj.votes is None]
    more = (*annotated, annotated[0]._replace(desc="one", bins=MORE))
    found = _answer(backend, replace(sample, objects=more), len(more) + 1)
    return replace(found, sample=sample)
