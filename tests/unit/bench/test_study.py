"""Tests of which method pays where: regimes by name, arms as configurations, what a run goes on from."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

from bench import study
from bench.experiment.runner import Slot, one_at_a_time
from bench.study import ARMS, FAULTS, NOISE_STD, Regime, StudyExperiment, StudyRun, run_config, with_noise
from deploy.launch import supervised
from learner.config.load import load_config
from learner.config.sections.augment import AugmentConfig
from learner.config.sections.data import DataConfig
from learner.data.augment import Augmenter
from learner.data.splits import load_samples
from learner.records import DetectionObject, Sample
from learner.tasks.detection.bins import to_bins
from shared.config.parse import write_yaml
from shared.errors import DeadlineError
from tests.unit.learner.data.fakes import AnyTask


def experiment(folder: Path) -> StudyExperiment:
    return StudyExperiment(
        out=folder / "out",
        work=folder / "work",
        deadline=0.0,
        bccd=None,
        slots=[Slot(index=0, has_server=False)],
        engine=study.engine(False, 1),
        run_s=None,
        knows_steps=40,
        steps_share=1.0,
        pool=100,
        val=5,
        test=10,
    )


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("regime", ["demo-32", "stops-early-1000-missing", "noisy-64-small20", "bccd"])
def test_every_arm_is_a_configuration_that_the_learner_takes(regime: str, augmented: bool, tmp_path: Path) -> None:
    for name, arm in ARMS.items():
        run = StudyRun(Regime.read(regime), name, 17, 0.5, augmented)
        path = tmp_path / "run.yaml"
        write_yaml(path, run_config(experiment(tmp_path), run), "test")
        config = load_config(str(path), world_size=1)
        assert config.custom.trainer_variant == arm.variant
        assert config.training.learning_rate == arm.rate * 0.5
        assert (config.data.augment is not None) == augmented
        at_once = config.rollout_matching.decode_batch_size
        assert at_once == 512 if regime == "bccd" else at_once > study.VAL + study.TEST, "an evaluation is one batch"


def test_runs_have_files_of_their_own(tmp_path: Path) -> None:
    regimes = [Regime.read(name) for name in ("demo-32", "demo-32-missing", "bccd")]
    runs = [
        run
        for augmented in (False, True)
        for run in study.runs_of((17, 18), regimes, tuple(ARMS), (1.0, 2.0), augmented=augmented)
    ]
    assert len(runs) == 2 * 2 * 3 * len(ARMS) * 2
    assert len({run.folder for run in runs}) == len({run.result(tmp_path) for run in runs}) == len(runs)


def test_what_teaches_a_habit_is_read_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that refuse a record would leave a base out."""
    monkeypatch.setattr(study, "TAUGHT", 40)
    made = experiment(tmp_path)
    study._write_teaching(made, workers=1)
    whole = study.read_rows(made.work / "teaching" / "train.jsonl")
    for name in study.HABITS:
        path = made.work / "teaching" / f"{name}.jsonl"
        samples = load_samples(DataConfig(train=str(path)), str(path), AnyTask())
        assert len(samples) == len(whole)
        assert [len(one.objects) for one in samples] == [len(row["objects"]) for row in study.read_rows(path)]
        assert any(row["objects"] != other["objects"] for row, other in zip(whole, study.read_rows(path), strict=True))


@pytest.mark.parametrize("name", ["demo", "demo-many", "nobody-32", "missing", "bccd-32", "demo-32-lost"])
def test_an_unknown_regime_is_refused(name: str) -> None:
    with pytest.raises(typer.BadParameter, match=name):
        Regime.read(name)


def test_an_arm_after_another_goes_on_from_the_run_of_its_seed_and_regime() -> None:
    run = StudyRun(Regime.read("demo-32"), "sft, then grpo", 18, 0.5)
    assert run.first == StudyRun(run.regime, "sft", 18)
    assert StudyRun(run.regime, "grpo", 18).first is None
    kept = StudyRun(run.regime, "keep_unmatched, then grpo on soft IoU", 18)
    assert kept.first == StudyRun(run.regime, "rollout matching, keep_unmatched", 18)
    assert replace(run, augmented=True).first == StudyRun(run.regime, "sft", 18, augmented=True)


@pytest.mark.parametrize("arm", sorted({arm.after for arm in ARMS.values() if arm.after}))
def test_an_arm_that_others_go_on_from_keeps_its_weights(arm: str, tmp_path: Path) -> None:
    """Its best step is the start here, so the weights are those of the base."""
    made, run = experiment(tmp_path), StudyRun(Regime.read("demo-32"), arm, 17)
    told = study.run_config(made, run)["training"]
    assert told["save_steps"] == told["eval_steps"]
    write_evaluated(made.run_dir(run), {0: 3, 8: 1})
    run.result(made.out).parent.mkdir(parents=True, exist_ok=True)
    study.keep_result(made, run)
    assert (made.stopped(run) / "config.json").is_file()


@pytest.mark.parametrize("arm", ARMS)
def test_rollouts_see_augmented_pictures_where_each_step_learns_them(arm: str) -> None:
    """The recipe's last stage is `grpo`."""
    found = study.augment_of(StudyRun(Regime.read("demo-32"), arm, 17, augmented=True))
    assert found is not None
    assert found["rollouts"] == (not arm.startswith("sft") or ", then " in arm)


def test_augmented_digits_keep_their_boxes() -> None:
    """The bases know coordinates of whole pixels alone."""
    digit = DetectionObject("five", "bbox_2d", to_bins([40.0, 40.0, 70.0, 80.0], 128, 128))
    sample = Sample(sample_id="1", images=("1.png",), messages=(), objects=(digit,), width=128, height=128)
    augmenter = Augmenter([sample], AugmentConfig(**study.DIGITS_AUGMENT), seed=1)
    seen = [augmenter(0, epoch) for epoch in range(50)]
    assert all(one.objects == (digit,) and (one.width, one.height) == (128, 128) for one in seen)
    views = [one.view for one in seen if one.view is not None]
    assert not any(view.flip_horizontal or view.flip_vertical or view.quarter_turn for view in views)
    assert len({view.brightness for view in views}) == 50


def test_a_base_is_kept_once_whichever_seed_is_first(tmp_path: Path) -> None:
    """The report shows it beside augmented runs, with their rate."""
    made, regime = experiment(tmp_path), Regime.read("demo-32")
    for seed in (18, 19):
        run = StudyRun(regime, "sft", seed, 0.3, augmented=True)
        write_evaluated(made.run_dir(run), {0: 1, 8: 3})
        run.result(made.out).parent.mkdir(parents=True, exist_ok=True)
        study.keep_result(made, run)
    study.report(made.out)
    arms = json.loads((made.out / "study.json").read_text())["regimes"]["demo-32"]["arms"]
    assert {name: arm["seeds"] for name, arm in arms.items()} == {"base": [18], "sft, augmented": [18, 19]}
    assert arms["base"]["metrics"]["f1@0.5"]["value"] == 0.25
    assert arms["sft, augmented"]["metrics"]["f1@0.5"]["value"] == 0.75
    assert arms["sft, augmented"]["learning_rate"] == pytest.approx(3e-5)
    assert arms["base"]["learning_rate"] == 0.0


@pytest.mark.parametrize("name", ["demo-32", "stops-early-200-missing", "half-taught-32-small20", "bccd-extra10"])
def test_a_regime_is_read_by_the_name_that_it_writes(name: str) -> None:
    assert Regime.read(name).name == name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_spoils_the_share_that_it_says(fault: str) -> None:
    """The left half of the scene is small, the right half large; names go round."""
    sizes = [10, 40]
    objects = [{"desc": f"{i % 4}", "bbox_2d": [0, 0, sizes[i % 8 > 3], sizes[i % 8 > 3]]} for i in range(16)]
    rows = [{"id": str(i), "width": 100, "height": 100, "objects": objects} for i in range(200)]
    spoiled = study._faulty(rows, Regime("demo", 200, fault, 0.3), seed=1)
    assert spoiled == study._faulty(rows, Regime("demo", 200, fault, 0.3), seed=1)
    before = 16 * len(rows)
    left = [one for row in spoiled for one in row["objects"]]
    assert all(row["objects"] for row in spoiled)
    if fault == "stops":
        assert {len(row["objects"]) for row in spoiled} == {3}
    elif fault == "extra":
        assert len(left) / before == pytest.approx(1.3, abs=0.03)
        assert all(one["bbox_2d"][0] >= 0 and one["bbox_2d"][2] <= 100 for one in left)
    elif fault == "renamed":
        changed = [a["desc"] != b["desc"] for row in spoiled for a, b in zip(row["objects"], objects, strict=True)]
        assert sum(changed) / before == pytest.approx(0.3, abs=0.03)
    else:
        assert len(left) / before == pytest.approx(0.7, abs=0.03)
        spared = {"classes": lambda one: one["desc"] in "23", "small": lambda one: one["bbox_2d"][2] == 40}
        if fault in spared:
            assert sum(map(spared[fault], left)) == before / 2


def test_noise_is_the_same_in_every_study(tmp_path: Path) -> None:
    """Only the picture changes, and each scene has noise of its own."""
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "images").mkdir(parents=True)
        for scene in ("a", "b"):
            Image.new("RGB", (32, 32), (128, 128, 128)).save(folder / "images" / f"{scene}.png")
        rows = [{"id": scene, "images": [f"images/{scene}.png"], "objects": [1]} for scene in ("a", "b")]
        noisy = [with_noise(row, folder) for row in rows]
        assert [row["objects"] for row in noisy] == [[1], [1]]
        found.append([np.asarray(Image.open(folder / row["images"][0]), dtype=float) for row in noisy])
    (a, b), (a_again, _) = found
    assert (a == a_again).all()
    assert (a != b).any()
    assert a.std() == pytest.approx(NOISE_STD, rel=0.1)


def write_evaluated(folder: Path, scores: dict[int, int]) -> None:
    """Write what a run leaves: at each evaluation so many of 4 objects are found, of validation and of test scenes."""
    write_stage(folder, scores)
    for test in (folder / "eval").glob("retain_test_*.jsonl"):
        path = test.with_name(test.name.replace("retain_test_", "step_"))
        path.write_text(path.read_text() + test.read_text())
        test.unlink()


def write_stage(folder: Path, scores: dict[int, int]) -> None:
    """Write evaluations of a stage: at each step so many of 4 objects are found, of validation and of test scenes."""
    (folder / "eval").mkdir(parents=True)
    events = [{"event": "step", "global_step": step + 1, "step_s": 1.0, "metrics": {}} for step in range(max(scores))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for step, hits in scores.items():
        for part, name in (("val", f"step_{step:06d}"), ("test", f"retain_test_{step:06d}")):
            counts = {"truth": 4.0, "predictions": 4.0, "tp@0.50": float(hits)}
            (folder / "eval" / f"{name}.jsonl").write_text(json.dumps({"id": f"{part}-1", "counts": counts}) + "\n")


def test_the_stages_of_a_recipe_are_one_course(tmp_path: Path) -> None:
    """`grpo` is counted on from the last step of `sft`; an evaluation without its test scenes does not count."""
    write_stage(tmp_path / "sft", {0: 1, 8: 3, 16: 2})
    write_stage(tmp_path / "grpo", {0: 4, 8: 4, 16: 4})
    (tmp_path / "grpo" / "eval" / "retain_test_000016.jsonl").unlink()
    course, steps = study._recipe_course(tmp_path)
    assert [(one.step, one.val["f1@0.5"], one.test["f1@0.5"]) for one in course] == [
        (0, 0.25, 0.25),
        (8, 0.75, 0.75),
        (16, 0.5, 0.5),
        (24, 1.0, 1.0),
    ]
    assert study._best(course) is course[3]
    assert [one["global_step"] for one in steps] == [*range(1, 33)]


@pytest.mark.parametrize(
    ("best_of", "stages", "step"),
    [("grpo", 2, 24), ("sft", 2, 8), ("start", 2, 0), ("start", 0, 24)],
)
def test_what_counts_of_a_recipe_is_what_it_kept(tmp_path: Path, best_of: str, stages: int, step: int) -> None:
    """It may keep `grpo` with a score below that of `sft`. Before a stage has ended, the best one so far counts."""
    write_stage(tmp_path / "sft", {0: 1, 8: 3, 16: 2})
    write_stage(tmp_path / "grpo", {0: 1, 8: 4})
    ended = [{"name": "sft", "steps": 16, "best_step": 8}, {"name": "grpo", "steps": 8, "best_step": 8}]
    course, _ = study._recipe_course(tmp_path)
    assert study._kept_by({"best_of": best_of, "stages": ended[:stages]}, course).step == step


def test_only_missing_bases_are_taught(tmp_path: Path) -> None:
    """A habit is taught to `knows`; a habit that is there needs no `knows`."""
    made = experiment(tmp_path)
    assert study.missing_bases(made, ["demo", "bccd"]) == set()
    assert study.missing_bases(made, ["demo", "repeats"]) == {"repeats", "knows"}
    made.base("repeats").mkdir(parents=True)
    assert study.missing_bases(made, ["repeats", "half-taught"]) == {"half-taught"}


def test_of_two_commands_the_second_waits_for_a_base_and_takes_it(tmp_path: Path) -> None:
    made = replace(experiment(tmp_path), deadline=time.monotonic() + 60)
    made.make_folders()
    (bases := made.out / "bases").mkdir()
    with supervised() as processes, ThreadPoolExecutor(1) as pool:
        with one_at_a_time(bases, 1.0):
            second = pool.submit(study.make_bases, made, processes, ["half-taught"])
            with pytest.raises(TimeoutError):
                second.result(0.5)
            made.base("half-taught").mkdir()
        second.result(20.0)
    assert not list(made.runs_dir.glob("base-*")), "it trains none"


def test_a_command_waits_for_a_base_as_long_as_it_has_time(tmp_path: Path) -> None:
    made = replace(experiment(tmp_path), deadline=time.monotonic() + 0.5)
    made.make_folders()
    (bases := made.out / "bases").mkdir()
    with supervised() as processes, one_at_a_time(bases, 1.0), pytest.raises(DeadlineError) as told:
        study.make_bases(made, processes, ["half-taught"])
    assert str(bases) in told.value.what
    assert "--seconds" in told.value.remedy


def test_a_recipe_has_the_time_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="run-seconds"):
        study.main(out=tmp_path, arm=["recipe"], regime=["demo-32"], colocate=False)
    told = study.recipe_command(replace(experiment(tmp_path), run_s=120.0))
    assert told[:2] == ["recipe", "--minutes"]
    assert 1.0 < float(told[2]) < 2.0
