"""`rollout-learner predict` and `Detector` with the shipped checkpoint on real scenes (R43)."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from deploy.demo import build_data
from learner.__main__ import main
from learner.config.inference import CALIBRATION_NAME, INFERENCE_NAME
from learner.detector import Detector
from learner.detector import answers as detector_answers
from learner.detector.model import find_model
from shared.addresses import free_ports
from shared.errors import ConfigError, ServerUnreachableError
from shared.tokens import TOKEN_VARIABLE

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return four scenes of digits with their labels."""
    folder = tmp_path_factory.mktemp("scenes")
    build_data.build(build_data.Build(train=0, val=0, test=4), folder)
    return folder


def predict(out: Path, *arguments: str, model: Path = CHECKPOINT) -> int:
    return main(["predict", "--model", str(model), "--out", str(out), "--backend", "hf", *arguments])


def found_in(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "predictions.json").read_text())
    return rows


def test_scenes_in_boxes_pictures_and_a_page_out(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(tmp_path, str(data / "test.coco.json"), "--conf", "0.2") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "index.html")
    truth = json.loads((data / "test.coco.json").read_text())
    names = {category["id"]: category["name"] for category in truth["categories"]}
    rows = found_in(tmp_path)
    assert {row["image_id"] for row in rows} <= {image["id"] for image in truth["images"]}
    assert all(names[row["category_id"]] == row["category"] for row in rows)
    assert all(0.2 <= row["score"] <= 1 for row in rows)
    hits = sum(any(_iou(row, one) > 0.5 for row in rows) for one in truth["annotations"])
    assert hits > len(truth["annotations"]) / 2, "the shipped checkpoint finds digits"
    lines = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [line["class"] for line in lines] == [row["category"] for row in rows]
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert len(pictures) == 4
    page = (tmp_path / "index.html").read_text()
    assert all(f"pictures/{picture.name}" in page for picture in pictures)
    with Image.open(pictures[0]) as picture:
        assert picture.size == (640, 640), "small photographs are enlarged, so that names do not hide the objects"


def test_the_page_is_called_by_the_run_and_the_step(data: Path, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "cells" / "checkpoint-4")
    (image, *_) = (data / "images").iterdir()
    assert predict(tmp_path / "out", str(image), model=tmp_path / "cells") == 0
    assert "<h1>cells, step 4</h1>" in (tmp_path / "out" / "index.html").read_text()


def _iou(row: dict[str, Any], truth: dict[str, Any]) -> float:
    if row["image_id"] != truth["image_id"]:
        return 0.0
    (ax, ay, aw, ah), (bx, by, bw, bh) = row["bbox"], truth["bbox"]
    width, height = min(ax + aw, bx + bw) - max(ax, bx), min(ay + ah, by + bh) - max(ay, by)
    shared = max(0.0, width) * max(0.0, height)
    return float(shared / (aw * ah + bw * bh - shared))


def test_what_was_interrupted_goes_on_with_the_same_answers(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (str(data / "images" / "test"), "--samples", "2")
    assert predict(tmp_path, *arguments) == 0
    whole = (tmp_path / "predictions.json").read_text()
    lines = tmp_path / "predictions.jsonl"
    first = lines.read_text().splitlines()
    lines.write_text(f"{first[0]}\n{first[1]}\n{first[2][:50]}")  # it was killed while it wrote the third
    assert predict(tmp_path, *arguments) == 0
    assert [json.loads(line)["place"] for line in lines.read_text().splitlines() if _is_json(line)] == [0, 1, 2, 3]
    again = json.loads((tmp_path / "predictions.json").read_text())
    assert [(row["image_id"], row["category"], row["bbox"]) for row in again] == [
        (row["image_id"], row["category"], row["bbox"]) for row in json.loads(whole)
    ]
    capsys.readouterr()
    assert predict(tmp_path, arguments[0], "--samples", "0") == 2
    told = capsys.readouterr().err
    assert "samples: 2 there, 0 now" in told
    assert "--overwrite" in told
    assert predict(tmp_path, *arguments) == 0
    assert "4 photographs done before" in capsys.readouterr().err
    assert predict(tmp_path, arguments[0], "--samples", "0", "--overwrite") == 0


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_a_photograph_that_cannot_be_read_is_named_and_the_others_are_done(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(data / "images" / "test", photos)
    (photos / "000001.png").write_bytes(b"no image")
    Image.new("RGB", (2000, 4)).save(photos / "strip.png")  # no model takes this shape
    assert predict(tmp_path / "out", str(photos), "--classes", "seven,three") == 1
    told = capsys.readouterr().err
    page = (tmp_path / "out" / "index.html").read_text()
    assert all(name in text for name in ("000001.png", "strip.png") for text in (told, page))
    assert {row["file_name"] for row in found_in(tmp_path / "out")} <= {"000000.png", "000002.png", "000003.png"}
    assert {row["category"] for row in found_in(tmp_path / "out")} <= {"seven", "three"}


def test_a_class_that_the_model_does_not_have_is_a_mistake(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = str(data / "images" / "test")
    assert predict(tmp_path, photos, "--classes", "seven,tree") == 2
    told = capsys.readouterr().err
    assert "tree" in told
    assert "three" in told, "those that it has"
    Detector(find_model(CHECKPOINT, prompt="Detect every tree."), classes=["tree"], backend="hf")


@pytest.mark.parametrize("command", ["predict", "calibrate", "evaluate", "find-missing"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t\u00f6ken-of-mine")
    (tmp_path / "some.json").write_text("{}")
    some, out = str(tmp_path / "some.json"), ["--out", str(tmp_path / "out")]
    argv = {
        "predict": ["predict", "--model", str(CHECKPOINT), some, *out],
        "calibrate": ["calibrate", "--model", str(CHECKPOINT), some, *out],
        "evaluate": ["evaluate", some, "--model", f"ours={CHECKPOINT}", *out],
        "find-missing": ["find-missing", "suggest", "--model", str(CHECKPOINT), some, *out],
    }[command]
    assert main([*argv, "--server", "http://127.0.0.1:9"]) == 2
    told = capsys.readouterr().err
    assert TOKEN_VARIABLE in told
    assert "of-mine" not in told


@pytest.mark.parametrize("url", ["http://u:geheim@127.0.0.1:9", "http://127.0.0.1:9/?token=geheim", "u:geheim@h"])
def test_the_url_of_a_server_is_checked_and_shown_without_what_may_be_secret(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = str(CHECKPOINT / "config.json")
    argv = ["predict", "--model", str(CHECKPOINT), photo, "--out", str(tmp_path / "out"), "--server", url]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert "--server" in told.err
    assert "eheim" not in told.err + told.out
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would wait for minutes."""
    monkeypatch.setattr(detector_answers, "REACHABLE_S", 0.2)
    (port,) = free_ports(1)
    with pytest.raises(ServerUnreachableError) as error, Detector(CHECKPOINT, server=f"http://127.0.0.1:{port}"):
        pass
    assert "--server" in error.value.remedy


def test_the_detector_in_python(data: Path) -> None:
    files = sorted((data / "images" / "test").iterdir())
    with Detector(CHECKPOINT, backend="hf") as detector, Image.open(files[1]) as picture:
        by_path, by_pixels = detector.predict([files[0], picture])
        again = detector.predict(files[1])
    assert [(box.name, box.box) for box in by_pixels.boxes] == [(box.name, box.box) for box in again[0].boxes]
    assert [box.score for box in by_pixels.boxes] == pytest.approx([box.score for box in again[0].boxes], abs=1e-4)
    assert by_path.boxes
    assert [box.score for box in by_path.boxes] == sorted((box.score for box in by_path.boxes), reverse=True)


def test_a_large_photograph_in_tiles_finds_what_the_whole_is_too_small_for(data: Path, tmp_path: Path) -> None:
    """Four scenes, two by two: the model sees 128 x 128 pixels of each tile, as in training."""
    whole = Image.new("RGB", (256, 256))
    for place, file in enumerate(sorted((data / "images" / "test").iterdir())):
        with Image.open(file) as scene:
            whole.paste(scene, (128 * (place % 2), 128 * (place // 2)))
    whole.save(tmp_path / "large.png")
    counts = {}
    for tile in (None, 128):
        with Detector(CHECKPOINT, backend="hf", tile=tile) as detector:
            (found,) = detector.predict(tmp_path / "large.png")
        counts[tile] = len(found.boxes)
        assert (found.width, found.height) == (256, 256)
    assert counts[128] > counts[None]


# ---- which model, and how it is asked ------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return a run's folder with the checkpoint, without what says how to ask it."""
    folder = tmp_path / "run" / "checkpoint-12"
    shutil.copytree(CHECKPOINT, folder)
    for name in (INFERENCE_NAME, CALIBRATION_NAME):
        (folder / name).unlink(missing_ok=True)
    return folder


def test_without_settings_the_run_s_configuration_is_asked(bare: Path, data: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Detector(bare)
    assert "--config" in error.value.remedy
    run = {
        "model": {"path": str(CHECKPOINT)},
        "data": {"train": str(data / "test.jsonl")},
        "task": {"iou_threshold": 0.3},
        "training": {"output_dir": str(bare.parent), "max_steps": 1},
        "custom": {"trainer_variant": "sft", "extra": {"rollout_matching": {"decoding": {"max_new_tokens": 77}}}},
    }
    (bare.parent / "config.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(ConfigError) as error:
        Detector(bare.parent)
    assert ("data.prompt" in error.value.found, "--config" in error.value.remedy) == (True, True)
    # It was named, so the training records are read: they have the prompt.
    detector = Detector(find_model(bare.parent, config=str(bare.parent / "config.yaml")))
    assert detector.model.folder == bare, "the run's newest checkpoint"
    assert detector.model.settings.max_new_tokens == 77
    assert [turn["content"] for turn in detector.model.settings.messages] == [build_data.PROMPT]
    assert detector.model.settings.classes


def test_an_export_carries_all_that_predict_needs(tmp_path: Path) -> None:
    out = tmp_path / "export"
    assert main(["export", "--model", str(CHECKPOINT), "--out", str(out), "--dtype", "float32"]) == 0
    assert (out / INFERENCE_NAME).read_text() == (CHECKPOINT / INFERENCE_NAME).read_text()
    Detector(out)


def test_a_run_of_another_version_can_be_used(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights say how to ask them. A key of the run that is gone since then is told, and no reason to refuse."""
    folder = tmp_path / "run/checkpoint-12"
    shutil.copytree(CHECKPOINT, folder)
    (folder.parent / "config.yaml").write_text("retired_key: 1\n")
    assert predict(tmp_path / "out", str(data / "images/test"), model=folder.parent) == 0
    told = capsys.readouterr().err
    assert ("retired_key" in told, "config.yaml" in told) == (True, True)
    out = tmp_path / "export"
    assert main(["export", "--model", str(folder), "--out", str(out), "--dtype", "float32"]) == 0
    assert (out / INFERENCE_NAME).read_text() == (CHECKPOINT / INFERENCE_NAME).read_text()


def test_an_export_that_could_not_be_asked_writes_nothing(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It wrote the weights, and then no word of how to ask them, into a folder that no other export takes."""
    (bare.parent / "config.yaml").write_text("retired_key: 1\n")
    assert main(["export", "--model", str(bare), "--out", str(tmp_path / "export")]) == 2
    assert "retired_key" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()


def test_a_folder_without_a_model_and_settings_that_cannot_be_read(
    tmp_path: Path, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(tmp_path / "out", "x.jpg", model=tmp_path) == 2
    assert "--model" in capsys.readouterr().err
    (bare / INFERENCE_NAME).write_text('{"format": 1, "task": {}, "messages": [], "classes": 7}')
    assert predict(tmp_path / "out", "x.jpg", model=bare) == 2
    assert "classes" in capsys.readouterr().err


# ---- calibration ---------------------------------------------------------------------------------------------------


def test_calibrated_scores_say_how_probably_a_box_is_right(
    data: Path, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_data.build(build_data.Build(train=0, val=14, test=0), tmp_path / "val")
    shutil.copy(CHECKPOINT / INFERENCE_NAME, bare)
    annotations = str(tmp_path / "val" / "val.coco.json")
    arguments = ["calibrate", "--model", str(bare), "--backend", "hf", annotations]
    assert main([*arguments, "--samples", "0,2"]) == 0
    assert capsys.readouterr().out.strip() == str(bare / CALIBRATION_NAME)
    known = json.loads((bare / CALIBRATION_NAME).read_text())["calibrations"]
    assert [one["samples"] for one in known] == [0, 2]
    with Detector(bare, backend="hf", samples=2) as detector:
        assert detector.calibration is not None
        (found,) = detector.predict(next((data / "images" / "test").iterdir()))
    assert all(0 < box.score < 1 for box in found.boxes)
    assert {box.votes for box in found.boxes} <= {0, 1, 2}
    assert main([*arguments, "--samples", "few"]) == 2


# ---- evaluation of models ------------------------------------------------------------------------------------------


@pytest.fixture
def blurred(tmp_path: Path) -> Path:
    """Return the checkpoint with a vision tower that sees less."""
    folder = tmp_path / "blurred"
    shutil.copytree(CHECKPOINT, folder)
    file = folder / "model.safetensors"
    weights = {name: w * 0.8 if "visual.merger" in name else w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_what_models_gain_and_forget_stands_side_by_side(
    data: Path, blurred: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R44: the models answer the retained annotations too, whatever their format, and are compared with the first
    model, also where a file of results comes before it."""
    build_data.build(build_data.Build(train=0, val=0, test=6, seed=5), tmp_path / "old")
    main_file, old = str(data / "test.coco.json"), tmp_path / "old" / "test.jsonl"
    none = tmp_path / "none.json"
    none.write_text("[]")
    models = ("--model", f"before={CHECKPOINT}", "--model", f"after={blurred}", "--backend", "hf")
    arguments = ["evaluate", main_file, "--out", str(tmp_path / "out"), *models, "--retain", f"old={old}"]
    assert main([*arguments, "--predictions", f"nothing={none}"]) == 0
    told = capsys.readouterr().err
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "evaluation.json").read_text())}
    assert "retained" not in rows["nothing"], "a file has no boxes for other annotations"
    before, after = (rows[name]["retained"]["old"] for name in ("before", "after"))
    assert sum(one["objects"] for one in before["classes"].values()) == _num_objects(old)
    lost = after["differences"]["f1@0.5"]["estimate"]
    assert lost == pytest.approx(_f1(after) - _f1(before))
    assert lost < -0.05, "it sees less"
    assert before["differences"] == {}
    shown = [line for line in told.splitlines() if line.startswith(("old ", "own data "))]
    assert f"{_f1(before):.3f}" in shown[1]
    assert f"{_f1(after):.3f} {lost:+.3f}" in shown[1]
    assert f"{_f1(rows['after']) - _f1(rows['before']):+.3f}" in shown[0], "from the first model, not from the file"
    assert f"{lost:+.3f}" in (tmp_path / "out" / "index.html").read_text()


def test_a_score_near_0_says_why(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_file, out = str(data / "test.coco.json"), tmp_path / "out"
    cut = ["--backend", "hf", "--max-new-tokens", "3"]
    assert main(["evaluate", main_file, "--out", str(out), "--model", f"ours={CHECKPOINT}", *cut]) == 0
    (row,) = json.loads((out / "evaluation.json").read_text())
    assert "cut off at max_new_tokens (3)" in row["reason"]
    assert f"the score of ours is near 0: {row['reason']}" in capsys.readouterr().err
    assert "cut off at max_new_tokens (3)" in (out / "index.html").read_text()


def _f1(result: dict[str, Any]) -> float:
    return float(result["intervals"]["f1@0.5"]["estimate"])


def _num_objects(file: Path) -> int:
    return sum(len(json.loads(line)["objects"]) for line in file.read_text().splitlines())


def test_what_is_retained_needs_a_model_and_names_of_their_own(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, main_file = tmp_path / "none.json", str(data / "test.coco.json")
    none.write_text("[]")
    arguments = ["evaluate", main_file, "--out", str(tmp_path / "out"), "--predictions", f"a={none}"]
    assert main([*arguments, "--retain", f"old={main_file}"]) == 2
    assert "--model" in capsys.readouterr().err
    assert main([*arguments, "--model", f"a={CHECKPOINT}"]) == 2
    assert "--predictions" in capsys.readouterr().err
    model = ["--model", f"b={CHECKPOINT}", "--backend", "hf"]
    assert main([*arguments, *model, "--retain", f"old={main_file}", "--retain", f"old={none}"]) == 2
    assert "--retain" in capsys.readouterr().err
    assert main([*arguments, *model, "--retain", f"old={tmp_path / 'missing.json'}"]) == 2
    assert "missing.json" in capsys.readouterr().err
