"""What a recipe chooses by the results of its stages, that it never gives less than its start, and that it goes on
wherever it was killed (R49). A stage leaves the files that a run leaves; none is trained.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.__main__ import main
from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.predict.features import FeatureEstimate
from learner.recipe import command, record
from learner.recipe.command import StageError, StageProcess, recipe
from learner.recipe.record import HEADROOM, Record, read_record
from learner.run.best import kept
from learner.tasks.detection.completion import CompletionEstimate
from shared.errors import CheckpointError, ConfigError
from tests.tiers import slow

Scores = Mapping[str, Mapping[int, float]]  # keys are stage and step
MINUTES = 60.0
SFT = {0: 0.3, 1: 0.4, 2: 0.6, 3: 0.5}
GAINS: Scores = {"sft": SFT, "grpo": {0: 0.6, 1: 0.65, 2: 0.7, 3: 0.6}}
BOTH = [("sft", 2, 0.3, 0.6), ("grpo", 2, 0.6, 0.7)]
UNSURE = CompletionEstimate(
    min_votes=None, why="nothing is sure enough", missing=0.4, recall=(1.0,), precision=(0.1,), free=(9,)
)
SURE = CompletionEstimate(min_votes=1, why="", missing=0.4, recall=(1.0,), precision=(0.9,), free=(9,))


class Killed(BaseException):
    """The process is gone: nothing is saved on its way out."""


@dataclass
class Stages:
    """Leaves in a stage's folder what its run would: the scores and labels that were `said`, and the headroom."""

    scores: Scores = field(default_factory=lambda: GAINS)
    labels: CompletionEstimate | None = None
    samples: Mapping[str, Any] = field(default_factory=dict)  # the labels of each that were completed
    places: float = 0.04  # headroom
    fit: float = 0.95  # F1@mIoU as a share of F1@0.5
    metric: str = "fm@0.5"
    killed_after: tuple[str, int] = ("", 0)  # the stage and the number of its evaluations
    began: list[Mapping[str, Any]] = field(default_factory=list)

    def __call__(self, path: Path) -> int:
        values = yaml.safe_load(path.read_text())
        self.began.append(values)
        run_dir = Path(values["training"]["output_dir"])
        name, root = run_dir.name, run_dir.parent
        (run_dir / "labels").mkdir(parents=True, exist_ok=True)
        if name == "sft" and self.labels is not None:
            votes = self.labels.min_votes
            found = {"min_votes": votes, "added": 5 if votes else 0, "text": "5 added", "estimate": asdict(self.labels)}
            found |= {"global_step": 0, "samples": self.samples}
            (run_dir / "labels" / "step_000000.json").write_text(json.dumps(found))
        known = read_record(root)
        assert known is not None
        if name == "grpo" and not known.grpo:
            headroom = {"headroom_places": asdict(FeatureEstimate(self.places, self.places - 0.02, self.places + 0.02))}
            headroom["no_signal"] = asdict(FeatureEstimate(0.1, 0.0, 0.2))
            (run_dir / HEADROOM).write_text(json.dumps(headroom))
            if self.places < 0.03:
                return 0
        stage, number = self.killed_after
        scores = dict(list(self.scores[name].items())[: number if stage == name else None])
        (run_dir / "best.json").write_text(json.dumps({"metric": self.metric, "values": scores}))
        events: list[dict[str, Any]] = [{"event": "plan", "time": 1.0}]
        for step, score in scores.items():
            metrics = {"f1@0.5": score, "f1@miou": score * self.fit, "recall@0.5": score / 2}
            events.append({"event": "eval", "time": 1.0 + step, "global_step": step, "metrics": metrics})
            checkpoint = run_dir / f"checkpoint-{step}"
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / "manifest.json").write_text("{}")
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        if stage == name:
            self.killed_after = ("", 0)
            raise Killed
        return 0

    @property
    def models(self) -> list[Path]:
        return [Path(values["model"]["path"]) for values in self.began]


def config_for(folder: Path, **sections: Any) -> RunConfig:
    (folder / "model").mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"train": "train.jsonl", "val": "val.jsonl"},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 9,
            "early_stop_patience": 1,
            "eval_on_start": True,
            "eval_steps": 1,
        },
        "custom": {"trainer_variant": "sft", "extra": {"rollout_matching": {"rollout_backend": "hf"}}},
    }
    return config_of({name: {**values.get(name, {}), **sections.get(name, {})} for name in (*values, *sections)})


def follow(folder: Path, stages: Stages, minutes: float = MINUTES, **sections: Any) -> Record:
    """Follow a recipe to its end, and return its record."""
    assert recipe(config_for(folder, **sections), minutes, environment={}, run_stage=stages) == 0
    found = read_record(folder / "run")
    assert found is not None
    assert found.ended
    return found


def results(found: Record) -> list[tuple[str, int, float, float]]:
    return [(stage.name, stage.best_step, stage.score_before, stage.score) for stage in found.stages]


# ---- what is chosen -------------------------------------------------------------------------------------------------


def test_grpo_follows_where_places_are_left_to_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages, run = Stages(), tmp_path / "run"
    found = follow(tmp_path, stages)
    assert results(found) == BOTH
    assert kept(run) == run / "grpo" / "checkpoint-2"
    assert (found.best_of, found.best_score) == ("grpo", 0.7)
    assert found.headroom["headroom_places"].value == 0.04
    assert "0.040" in found.grpo
    assert stages.models == [tmp_path / "model", run / "sft" / "checkpoint-2"]
    said, page = capsys.readouterr().out, (run / "report.html").read_text()
    for text in ("recall@0.5 +0.150", "recall@0.5 +0.050"):
        assert text in said
        assert text in page, "the report says what each stage gained"


def test_it_ends_where_only_names_are_left(tmp_path: Path) -> None:
    found = follow(tmp_path, Stages(places=0.01))
    assert results(found) == BOTH[:1]
    assert found.ended.startswith("no places are left")
    assert not (tmp_path / "run" / "grpo").exists(), "nothing was learned there"
    assert kept(tmp_path / "run") == tmp_path / "run" / "sft" / "checkpoint-2"


@pytest.mark.parametrize(("start", "begins_with"), [(0.5, "model"), (0.44, "run/sft/checkpoint-1")])
def test_on_completed_labels_grpo_begins_with_the_start(tmp_path: Path, start: float, begins_with: str) -> None:
    """`sft` learns the wrong names among them: with 60% missing, `grpo` had 0.80 from there, and 0.83 from the start.
    A start that is far behind is not taken. What is left is counted by labels, and these still have gaps: 0.018
    [-0.013, 0.048] were seen where `grpo` gains 0.04. So it begins without, and validation decides."""
    stages = Stages({"sft": {0: start, 1: 0.6}, "grpo": {0: start, 1: 0.7}}, labels=SURE, places=0.0)
    found = follow(tmp_path, stages)
    assert stages.models[1] == tmp_path / begins_with
    assert kept(tmp_path / "run") == tmp_path / "run" / "grpo" / "checkpoint-1"
    assert found.stages[0].completed
    assert "completed" in found.grpo
    assert not found.headroom, "nothing was measured, because nothing was decided by it"
    assert stages.began[1]["labels"]["complete"] is not None


@pytest.mark.parametrize("start", [0.5, 0.3])
def test_where_the_start_cannot_complete_rollout_matching_follows(tmp_path: Path, start: float) -> None:
    """A model of noisy digits is right in so few of its boxes that none is sure enough to be a label: there
    `keep_unmatched` is ahead of `sft`."""
    scores = {"sft": {0: start, 1: 0.6}, "rollout_matching_sft": {0: 0.6, 1: 0.7}}
    stages = Stages(scores, labels=UNSURE)
    found = follow(tmp_path, stages)
    run = tmp_path / "run"
    assert [stage.name for stage in found.stages] == ["sft", "rollout_matching_sft"]
    assert kept(run) == run / "rollout_matching_sft" / "checkpoint-1"
    assert "sure enough" in found.stages[1].why
    assert "boxes fit" in found.ended
    assert stages.models[1] == tmp_path / "model", "sft has learned to leave out what has no label"
    assert "rollout_matching_sft" in (run / "report.html").read_text()


def test_where_boxes_are_loose_grpo_learns_their_iou_last(tmp_path: Path) -> None:
    """Blood cells: F1@mIoU is 0.6 of F1@0.5 there. With 40% missing `keep_unmatched` had 0.592, and soft IoU after it
    0.619."""
    scores = {"sft": {0: 0.5, 1: 0.4}, "rollout_matching_sft": {0: 0.5, 1: 0.7}, "grpo": {0: 0.7, 1: 0.8}}
    stages = Stages(scores, labels=UNSURE, fit=0.6)
    found, run = follow(tmp_path, stages), tmp_path / "run"
    assert [(stage.name, stage.score) for stage in found.stages] == [
        ("sft", 0.5),
        ("rollout_matching_sft", 0.7),
        ("grpo", 0.8),
    ]
    assert "the reward is the IoU" in found.stages[2].why
    assert kept(run) == run / "grpo" / "checkpoint-1"
    limits = [values["training"]["max_minutes"] for values in stages.began]
    assert limits[1] == pytest.approx(command.MATCHING_SHARE * MINUTES, rel=0.01)
    assert stages.began[2]["reward"]["weights"] == {"soft_iou": 1.0}
    assert stages.began[2]["labels"]["complete"] is None, "the start can't complete them"
    assert stages.models[2] == run / "rollout_matching_sft" / "checkpoint-1"


@pytest.mark.parametrize(("best_of_sft", "begins_with"), [(0.6, "run/sft/checkpoint-1"), (0.4, "model")])
def test_loose_boxes_ask_for_no_headroom(tmp_path: Path, best_of_sft: float, begins_with: str) -> None:
    """Photographs with the published labels: `sft` 0.628, soft IoU after it 0.652. A reward of one's own stays."""
    scores = {"sft": {0: 0.5, 1: best_of_sft}, "grpo": {0: 0.6, 1: 0.7}}
    stages = Stages(scores, fit=0.6)
    found = follow(tmp_path, stages, reward={"weights": {"count": 1.0}})
    assert [stage.name for stage in found.stages] == ["sft", "grpo"]
    assert not found.headroom
    assert stages.began[1]["reward"]["weights"] == {"count": 1.0}
    assert "loose" in found.stages[1].why
    assert "reward" not in found.stages[1].why, "it is the user's, not the IoU"
    assert stages.models[1] == tmp_path / begins_with


def test_sft_has_all_of_the_time_where_grpo_gains_nothing(tmp_path: Path) -> None:
    """Its share is over before its score stops rising; after the headroom is known it goes on from there."""
    stages = Stages({"sft": {0: 0.3, 1: 0.4}}, places=0.0)
    found = follow(tmp_path, stages)
    assert [Path(one["training"]["output_dir"]).name for one in stages.began] == ["sft", "grpo", "sft"]
    first, _, second = (one["training"]["max_minutes"] for one in stages.began)
    assert first == pytest.approx(command.SFT_SHARE * MINUTES, rel=0.01)
    assert second > 0.9 * MINUTES
    assert found.extended
    assert found.ended.startswith("no places are left")


@pytest.mark.parametrize(
    ("scores", "best", "checkpoint"),
    [
        ({"sft": {0: 0.6, 1: 0.1}, "grpo": {0: 0.6, 1: 0.1}}, "start", None),
        ({"sft": {0: 0.6, 1: 0.6}, "grpo": {0: 0.6, 1: 0.1}}, "start", None),  # an equal score is not worth a change
        ({"sft": {0: 0.6, 1: 0.1}, "grpo": {0: 0.6, 1: 0.7}}, "grpo", "grpo/checkpoint-1"),
        ({"sft": {0: 0.3, 1: 0.6}, "grpo": {0: 0.55, 1: 0.58}}, "sft", "sft/checkpoint-1"),
    ],
)
def test_it_never_gives_less_than_its_start(tmp_path: Path, scores: Scores, best: str, checkpoint: str | None) -> None:
    assert follow(tmp_path, Stages(scores)).best_of == best
    assert kept(tmp_path / "run") == (tmp_path / "run" / checkpoint if checkpoint else tmp_path / "model")


@pytest.mark.parametrize(("metric", "asked"), [("fm@0.5", "fm@0.5"), ("estimated_f1@0.5", "auto")])
def test_what_the_first_stage_was_decided_by_decides_all(tmp_path: Path, metric: str, asked: str) -> None:
    """`auto` decides by the estimate where a stage finds its range, which later stages are given."""
    stages = Stages(metric=metric)
    assert follow(tmp_path, stages).metric == metric
    assert [one["training"]["keep_best"] for one in stages.began] == ["auto", asked]


def test_time_that_is_up_ends_it_with_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAST_SHARE", 1.01)
    found = follow(tmp_path, Stages())
    assert results(found) == BOTH[:1]
    assert "minutes are left" in found.ended


# ---- killed, and begun again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [slow(None), SURE])
@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (Stages, "sft", 1),
        (Stages, "sft", 3),
        (Stages, "grpo", 2),  # its headroom was measured, and nobody knows
        (command, "stage_result", 1),  # sft has ended, and nobody knows
        (record.Record, "write", 1),
        (record.Record, "write", 2),
        (record.Record, "write", 3),
        (record.Record, "write", 4),
        (command, "write_report", 1),
    ],
)
def test_it_goes_on_wherever_it_was_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int,
    labels: CompletionEstimate | None,
) -> None:
    stages, config = Stages({**GAINS, "sft": {**SFT, 0: 0.5}}, labels=labels), config_for(tmp_path)
    if owner is Stages:
        stages.killed_after = (name, number)
    else:
        work, calls = getattr(owner, name), iter(range(1, 1000))

        def dying(*args: Any, **more: Any) -> Any:
            if next(calls) == number:
                raise Killed
            return work(*args, **more)

        monkeypatch.setattr(owner, name, dying)
    with pytest.raises(Killed):
        recipe(config, MINUTES, environment={}, run_stage=stages)
    assert recipe(config, MINUTES, environment={}, run_stage=stages) == 0
    found = read_record(tmp_path / "run")
    assert found is not None
    assert results(found) == [("sft", 2, 0.5, 0.6), BOTH[1]]
    assert kept(tmp_path / "run") == tmp_path / "run" / "grpo" / "checkpoint-2"
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(stages.began) <= 3, "a stage that has ended is not run again"
    assert recipe(config, MINUTES, environment={}, run_stage=lambda _: pytest.fail("it has ended")) == 0


def test_a_stage_that_was_stopped_ends_the_recipe_with_its_exit_code(tmp_path: Path) -> None:
    stages, config = Stages(), config_for(tmp_path)
    assert recipe(config, MINUTES, environment={}, run_stage=lambda _: 143) == 143
    assert recipe(config, MINUTES, environment={}, run_stage=stages) == 0


# ---- its processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, slow(2)])
def test_a_stage_that_fails_is_told_with_its_exit_code_and_last_words(tmp_path: Path, nproc: int) -> None:
    """R49: a typed error of four parts, and the same exit code."""
    path = tmp_path / "sft.yaml"
    path.write_text("model: {path: nowhere}\n")
    with (
        StageProcess.listening(nproc, dict(os.environ)) as process,
        pytest.raises(StageError) as caught,
    ):
        process.run(path)
    error = caught.value
    assert error.exit_code == 2
    assert "sft" in error.what
    assert "exit code 2" in error.found
    assert "data.train" in error.found, "what its process said"
    assert error.wanted
    assert str(tmp_path / "sft.log") in error.remedy


def test_a_signal_reaches_the_stage_and_begins_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A stage whose signal came in its last moment ended well, and the recipe went on with `grpo`."""
    path = tmp_path / "sft.yaml"
    os.mkfifo(path)

    def signalled() -> None:
        with path.open("w"):  # the process reads its configuration
            os.kill(os.getpid(), signal.SIGTERM)
            stopped.wait(60)

    stopped, thread = threading.Event(), threading.Thread(target=signalled)
    thread.start()
    with StageProcess.listening(1, dict(os.environ)) as process:
        assert process.run(path) == 128 + signal.SIGTERM
        stopped.set()
        thread.join()
        assert process.run(tmp_path / "grpo.yaml") == 128 + signal.SIGTERM
    assert "the same command goes on" in capfd.readouterr().out
    assert not (tmp_path / "grpo.log").exists(), "no process was begun"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_another_recipe_in_the_folder_is_not_taken_up(tmp_path: Path) -> None:
    follow(tmp_path, Stages())
    with pytest.raises(ConfigError) as caught:
        follow(tmp_path, Stages(), data={"shuffle": False})
    assert str(tmp_path / "run") in caught.value.found
    assert caught.value.remedy


def test_a_recipe_that_a_mistake_ended_is_begun_with_other_data(tmp_path: Path) -> None:
    """Nothing was learned, so there is nothing to go on with."""

    def fails(_: Path) -> int:
        raise StageError("wrong data")

    with pytest.raises(StageError):
        recipe(config_for(tmp_path, data={"val": "empty.jsonl"}), MINUTES, environment={}, run_stage=fails)
    assert results(follow(tmp_path, Stages())) == BOTH


@pytest.mark.parametrize(("name", "stages"), [("recipe.json", BOTH), (f"grpo/{HEADROOM}", BOTH)])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, stages: list[Any]) -> None:
    with pytest.raises(Killed):
        follow(tmp_path, Stages(killed_after=("grpo", 2)))
    (tmp_path / "run" / name).write_text('{"stages": [')
    with pytest.raises(CheckpointError) as caught:
        follow(tmp_path, Stages())
    assert name in caught.value.found
    (tmp_path / "run" / name).unlink()
    assert results(follow(tmp_path, Stages())) == stages


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """That labels have gaps and cannot be completed had another name."""
    with pytest.raises(Killed):
        follow(
            tmp_path,
            Stages({**GAINS, "rollout_matching_sft": {0: 0.6}}, UNSURE, killed_after=("rollout_matching_sft", 1)),
        )
    path = tmp_path / "run" / "recipe.json"
    path.write_text(path.read_text().replace('"cannot_complete"', '"invents"'))
    found = read_record(tmp_path / "run")
    assert found is not None
    assert found.stages[0].cannot_complete


def test_a_wrong_configuration_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config_for(tmp_path).model_dump(mode="json")))
    overrides = ["data.val=null", "training.early_stop_patience=null"]
    assert main(["recipe", "--config", str(path), "--minutes", "1", *overrides]) == 2
    shown = capsys.readouterr().err
    assert shown.lstrip().startswith(("data.val: ", "error: ConfigErrors: data.val: "))
    assert "eval_on_start" not in shown, "the user did not set it"
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_a_rank_of_torchrun_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(config_for(tmp_path), MINUTES, environment={"WORLD_SIZE": "2"}, run_stage=Stages())
    assert "--nproc" in caught.value.remedy
    assert not (tmp_path / "run").exists()


def test_an_ordinary_run_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        follow(tmp_path, Stages())
    assert "checkpoint" in caught.value.found
