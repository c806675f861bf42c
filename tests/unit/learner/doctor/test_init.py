"""`rollout-learner init`: what it says about a folder, and files that are valid as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from learner.__main__ import main
from learner.config.load import load_config
from learner.config.memory import FILLED, GIB, needed_bytes, of_run
from learner.config.plan import resolve
from learner.config.sections.training import kept_metric
from learner.data.check import check_split, splits
from learner.data.formats.yolo import yolo_file
from learner.data.survey import seen_by_model
from learner.data.units import PixelLimits
from learner.doctor.data_report import length_report
from learner.doctor.model_folder import other_than_trained
from rollout_server.config import load_server_config
from tests.tiers import slow
from tests.unit.learner.config.model_sizes import MODELS
from tests.unit.learner.data.annotations import jsonl, samples_of, voc, voc_object, yolo
from tests.unit.learner.data.fakes import draw

ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty photographs of one class, as VOC, without splits."""
    (tmp_path / "data").mkdir()
    for i in range(40):
        voc(tmp_path / "data", f"p{i}", voc_object("raccoon", 10, 10 + i, 90, 95))
        draw(tmp_path / "data", f"JPEGImages/p{i}.jpg", size=(200, 100 + i))
        file = tmp_path / "data" / "Annotations" / f"p{i}.xml"
        file.write_text(file.read_text().replace("<height>100", f"<height>{100 + i}"))
    return tmp_path / "data"


def test_the_files_are_valid_and_read_every_photograph_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    for part in ("voc", "1 class: raccoon", "200 x 139", "check --config"):
        assert part in told
    config = load_config(str(tmp_path / "out/run.yaml"), world_size=1, env={})
    found = {split: check_split(config, split, path) for split, path in splits(config).items()}
    assert sum(split.num_samples for split in found.values()) == 40
    assert all(split.num_samples for split in found.values())
    server = load_server_config(tmp_path / "out/server.yaml", has_token=False)
    assert (server.model, server.max_pixels) == (config.model.path, config.model.max_pixels)


@pytest.mark.parametrize(
    ("mib", "size", "offload"),
    [(16_000, "2B", False), (23_034, "4B", True), (32_607, "4B", False), (81_559, "4B", False)],
)
def test_settings_fit_the_gpu_at_hand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, size: str, offload: bool
) -> None:
    """By the estimate of `check`, which was within 8% of runs on such cards (bench.cards)."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho {mib}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    assert main(["init", str(folder), "--out", str(tmp_path / "out")]) == 0
    written = load_config(str(tmp_path / "out/run.yaml"), world_size=1, env={})
    assert (f"-{size}-" in written.model.path, written.rollout_matching.offload.enabled) == (True, offload)
    (tmp_path / "config.json").write_text(json.dumps(MODELS[size]))
    config = load_config(tmp_path / "out/run.yaml", world_size=1, env={}, overrides=[f"model.path={tmp_path}"])
    learning = of_run(config, 1)
    assert learning is not None
    assert needed_bytes(config, learning, mib << 20) <= FILLED * (mib << 20)
    weights = learning.weights + 2 * GIB  # and some room for the engine's cache
    assert weights <= config.rollout_matching.vllm.gpu_memory_utilization * (mib << 20)


def test_names_with_spaces_and_emoji_can_be_copied(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON's escapes of an emoji are none of YAML's: `check` refused the file."""
    monkeypatch.chdir(tmp_path)
    folder.rename("räc 🦝")
    assert main(["init", "räc 🦝", "--out", "o u t"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  rollout-learner ")]
    assert len(commands) == 2
    assert main(shlex.split(commands[0])[1:]) == 0
    assert "räc 🦝[" in Path("o u t/run.yaml").read_text(encoding="utf-8")
    load_server_config(Path("o u t/server.yaml"), has_token=False)


def test_a_name_that_looks_like_a_variable_is_a_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was filled in: with a token, if it is that one's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder.rename("a ${HF_TOKEN} $${b}")
    assert main(["init", "a ${HF_TOKEN} $${b}", "--out", "out"]) == 0
    config = load_config("out/run.yaml", world_size=1)
    assert config.data.train.startswith("a ${HF_TOKEN} $${b}[")
    server = load_server_config(Path("out/server.yaml"), has_token=False)
    assert [Path(root).parent.name for root in server.allowed_image_roots] == ["a ${HF_TOKEN} $${b}"]


def few(folder: Path, number: int, split: str = "") -> Path:
    """So many photographs of raccoons, as VOC."""
    place = folder / split
    place.mkdir(parents=True, exist_ok=True)
    for i in range(number):
        voc(place, f"p{i}", voc_object("raccoon", 10, 10 + i % 50, 90, 95))
    return folder


def test_many_photographs_to_validate_by_are_not_all_asked_each_time(tmp_path: Path) -> None:
    folder = few(few(tmp_path / "data", 40, "train"), 501, "val")
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 0
    assert load_config(str(tmp_path / "run.yaml"), world_size=1, env={}).training.eval_samples == 500


@pytest.mark.parametrize(
    ("number", "least", "most", "warned"),
    [
        (2, 1, 1, True),
        (5, 1, 2, True),
        (9, 2, 4, True),
        (24, 6, 8, True),
        (80, 20, 26, False),
        slow(300, 20, 45, False),
    ],
)
def test_few_photographs_leave_more_than_a_tenth_for_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, least: int, most: int, warned: bool
) -> None:
    """A tenth of 9 photographs was one, or none, which `init` called an error."""
    folder = few(tmp_path / "data", number)
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    config = load_config(str(tmp_path / "run.yaml"), world_size=1, env={})
    found = {split: check_split(config, split, path).num_samples for split, path in splits(config).items()}
    assert least <= found["val"] <= most
    assert found["train"] + found["val"] == number
    held_out = next(line for line in told.splitlines() if "held out" in line)
    assert f"{found['val']} of {number} photographs" in held_out
    assert ("choose a step of training" in told) == warned
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    assert ("choose a step of training" in capsys.readouterr().out) == warned
    assert (kept_metric(config) is None) == warned, "a step is chosen where that is not by chance"
    if (every := config.training.eval_steps) is not None:
        steps = length_report(config, resolve(config, 1), found["train"])["length"]["steps"]
        assert every == max(8, steps // 10), "as often as a recipe at most"


def test_one_photograph_cannot_be_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(few(tmp_path / "data", 1)), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert ("1 photograph" in told, "two photographs" in told) == (True, True)
    assert not (tmp_path / "out").exists()


def test_photographs_to_test_on_choose_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with train and test alone: some of train are held out, none of test."""
    folder = few(few(tmp_path / "data", 40, "train"), 8, "test")
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 0
    assert "held out" in capsys.readouterr().out
    config = load_config(str(tmp_path / "run.yaml"), world_size=1, env={})
    assert config.data.test == f"{folder}:test"
    assert str(config.data.val).startswith(f"{folder}:train[")
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    told = capsys.readouterr().out
    assert "8 photographs to evaluate on: too few to tell two models apart" in told


def test_classes_that_nobody_learns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error, or a rare class that fell into one split: every such object counts as missed, without a word."""
    folder = few(few(tmp_path / "data", 30, "train"), 30, "valid")
    voc(folder / "valid", "p0", voc_object("Raccoon", 10, 10, 90, 95), voc_object("fox", 20, 20, 90, 95))
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    for text in (told, capsys.readouterr().out):
        (line,) = (line for line in text.splitlines() if "to train on" in line)
        assert ("Raccoon" in line, "fox" in line, "raccoon," in line) == (True, True, False)


def test_annotations_without_any_box_are_no_detail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model would learn to find nothing."""
    (tmp_path / "data").mkdir()
    for i in range(30):
        voc(tmp_path / "data", f"p{i}")
    assert main(["init", str(tmp_path / "data"), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert ("no box at all" in told, "no classes" in told, "0 classes" in told) == (True, True, False)
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    assert "no box at all" in capsys.readouterr().out


def test_a_split_of_its_own_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = few(few(tmp_path / "data", 40, "train"), 2, "valid")
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert ("held out" in told, "choose a step of training" in told) == (False, True)


def test_records_with_prompts_of_their_own_keep_them(tmp_path: Path) -> None:
    """The prompt that init writes for other formats is refused beside them."""
    jsonl(tmp_path, *[{"desc": "x", "bbox_2d": [0, 0, 20, 50]}] * 40, name="train.jsonl")
    assert main(["init", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0


def test_what_looks_wrong_comes_with_an_example(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A box outside, and photographs that nobody labelled."""
    draw(folder, "JPEGImages/nobody.jpg", "JPEGImages/sub/none.png")
    voc(folder, "p0", voc_object("raccoon", 10, 10, 900, 95))
    assert main(["init", str(folder), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    outside, unused = (
        next(line for line in lines if word in line) for word in ["outside_image", "without annotations"]
    )
    assert "p0.xml" in outside
    assert "900" in outside
    assert ("2 photographs" in unused, "nobody.jpg" in unused) == (True, True)


def test_the_model_sees_all_photographs_by_the_limit_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those to evaluate on may be larger than those to train on, and fuller."""
    raccoons = [voc_object("raccoon", 10 + i, 10, 90, 95) for i in range(40)]
    for split, size, number in (("train", (640, 480), 1), ("valid", (1280, 960), 40)):
        (tmp_path / split).mkdir()
        voc(tmp_path / split, "a", *raccoons[:number], size=size)
        draw(tmp_path / split, "JPEGImages/a.jpg", size=size)
    assert main(["init", str(tmp_path), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    config = load_config(str(tmp_path / "run.yaml"), world_size=1, env={})
    assert config.model.max_pixels == 1280 * 960
    assert config.custom.extra.rollout_matching.decoding.max_new_tokens > 40 * 40
    server = load_server_config(tmp_path / "server.yaml", has_token=False)
    assert server.max_pixels == config.model.max_pixels
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    checked = capsys.readouterr().out
    seen = [line for line in told.splitlines() if "the model sees the largest" in line]
    assert [line for line in checked.splitlines() if "the model sees the largest" in line] == seen


def data_set(folder: Path, **splits: int) -> None:
    """Save a Hugging Face data set with so many photographs in each split."""
    datasets = pytest.importorskip("datasets")
    draw(folder.parent, "photograph.jpg")
    image = {"bytes": (folder.parent / "photograph.jpg").read_bytes(), "path": None}
    objects = [{"bbox": [datasets.Value("int32")], "category": datasets.Value("string")}]
    features = datasets.Features({"image": datasets.Image(), "objects": objects})
    row = {"image": image, "objects": [{"bbox": [10, 10, 50, 40], "category": "raccoon"}]}
    made = {split: datasets.Dataset.from_list([row] * number, features=features) for split, number in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)


def test_a_hugging_face_data_set_keeps_its_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was refused, with a name that init does not take."""
    data_set(tmp_path / "saved", train=12, validation=5, extra=3)
    assert main(["init", str(tmp_path / "saved"), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "not used: extra" in told
    assert "in train and in val, for example record 11\n" in told, "the photograph itself is no name"
    server = load_server_config(tmp_path / "server.yaml", has_token=False)
    assert server.allowed_image_roots == [Path()]
    config = load_config(str(tmp_path / "run.yaml"), world_size=1, env={})
    assert (config.data.train, config.data.val) == (f"{tmp_path}/saved:train", f"{tmp_path}/saved:validation")
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0


def test_a_hugging_face_data_set_with_one_split_is_divided(tmp_path: Path) -> None:
    data_set(tmp_path / "saved", train=40)
    assert main(["init", str(tmp_path / "saved"), "--out", str(tmp_path)]) == 0
    config = load_config(str(tmp_path / "run.yaml"), world_size=1, env={})
    percent = re.fullmatch(rf"{tmp_path}/saved:train\[:(\d+)%\]", config.data.train)
    assert percent is not None
    assert config.data.val == f"{tmp_path}/saved:train[{percent[1]}%:]"


def test_a_hugging_face_data_set_without_what_to_train_on_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_set(tmp_path / "saved", first=12, second=5)
    assert main(["init", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert ("first, second" in told, f"{tmp_path}/saved" in told, "saved:first" in told) == (True, True, False)


def test_photographs_that_are_not_found_are_named_with_the_way_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said how many, in Python's words, and neither which nor what to do."""
    (folder / "JPEGImages").rename(tmp_path / "elsewhere")
    assert main(["init", str(folder), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    for part in ("left out (image_missing)", ".jpg", "--image-root", "data.image_root"):
        assert part in told
    assert "{" not in told
    assert main(["init", str(folder), "--out", str(tmp_path / "out"), "--image-root", str(tmp_path / "elsewhere")]) == 0


@pytest.mark.parametrize(("unit", "scale"), [("thousandths", 1000 / 200), ("shares", 1 / 200)])
def test_numbers_that_mean_something_else_are_told_from_a_box_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str, scale: float
) -> None:
    """Half of the boxes were cut or left out, each told alone, and a file was written as if nothing were wrong."""
    boxes = [{"desc": "x", "bbox_2d": [v * scale for v in (10 + i, 10, 150, 90)]} for i in range(40)]
    jsonl(tmp_path, *boxes, name="train.jsonl")
    assert main(["init", str(tmp_path), "--out", str(tmp_path)]) in (0, 2)
    told = capsys.readouterr()
    assert f"data.coordinates: {unit}" in told.out + told.err


def test_a_box_that_is_wrong_does_not_put_the_others_in_doubt(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voc(folder, "p0", voc_object("raccoon", 10, 10, 900, 95))
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 0
    assert "something else than pixels" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("labels.csv", "image,label,x1,y1,x2,y2\n", ["labels.csv", "data.format"]),
        ("labels/a.txt", "0 0.5 0.5 0.1 0.1\n", ["label files", "classes.txt"]),
    ],
)
def test_labels_that_are_there_are_not_called_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: list[str]
) -> None:
    """It said `a folder with photographs and no annotations`."""
    draw(tmp_path / "data", "images/a.jpg")
    file = tmp_path / "data" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    assert main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert [part for part in said if part not in told] == []
    assert "no annotations" not in told


def test_what_cannot_be_read_is_not_called_empty(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (folder / "Annotations").iterdir():
        file.write_text(file.read_text().replace("<xmin>10", "<xmin>ten"))
    assert main(["init", str(folder), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().out
    assert "xmin ten" in told
    assert "empty answer" not in told


def test_photographs_alone_cannot_be_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(tmp_path / "photographs", "a.jpg", "b.jpg")
    assert main(["init", str(tmp_path / "photographs"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert ("2 photographs" in told, "label" in told) == (True, True)


def test_a_folder_that_cannot_be_written_is_an_error_without_traceback(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(folder), "--out", str(tmp_path / "file/out")]) == 2
    told = capsys.readouterr().err
    assert ("OutputError" in told, "Traceback" in told) == (True, False)


def test_no_file_is_replaced(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    assert main(["init", str(folder), "--out", str(tmp_path)]) == 2
    assert "run.yaml" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "mine"


def test_records_that_cannot_be_read_are_listed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "Annotations/p3.xml").write_text("<html/>")
    assert main(["init", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "p3.xml" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_file_that_both_parts_are_of_is_wrong_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_train.json").write_text("{}")
    assert main(["init", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().out
    assert told.count("images is missing") == 1
    assert "empty answer" not in told, "nothing is known of photographs"


@pytest.mark.parametrize("missing", ["none", "data/Annotations/p1.xml"])
def test_a_folder_that_is_none_is_refused(folder: Path, tmp_path: Path, missing: str) -> None:
    assert main(["init", str(tmp_path / missing), "--out", str(tmp_path / "out")]) == 2


def test_what_the_model_sees_of_a_large_photograph() -> None:
    seen = seen_by_model((4000, 3000), PixelLimits(most=2 << 20))
    assert seen.num_tokens <= 2048
    assert 0.1 < seen.share < 0.18
    assert seen_by_model((640, 480), PixelLimits(most=2 << 20)).share == 1.0


def test_a_model_that_was_trained_here_is_asked_as_it_was_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` has nothing to say about a run that goes on with it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_vl"}')
    settings = {
        "task": {"container": "index_map", "coordinates": "tokens"},
        "messages": [{"role": "user", "content": "<image>Find ${all} cells."}],
        "min_pixels": 4096,
        "max_pixels": 65536,
    }
    (model / "inference.json").write_text(json.dumps(settings))
    assert main(["init", str(folder), "--out", str(tmp_path / "out"), "--model", str(model)]) == 0
    config = load_config(str(tmp_path / "out/run.yaml"), world_size=1, env={})
    assert config.model.path == str(model)
    assert config.data.prompt == "<image>Find ${all} cells."
    assert other_than_trained(config) is None
    server = load_server_config(tmp_path / "out/server.yaml", has_token=False)
    assert (server.min_pixels, server.max_pixels) == (4096, 65536)
    for family, word in (("llama", "images"), ("paligemma", "model_type")):
        (model / "config.json").write_text(json.dumps({"model_type": family}))
        assert main(["init", str(folder), "--out", str(tmp_path / family), "--model", str(model)]) == 2
        assert word in capsys.readouterr().err
    assert main(["init", str(folder), "--out", str(tmp_path / "no"), "--model", str(tmp_path / "no model")]) == 2
    assert not (tmp_path / "no").exists()


def test_split_writes_the_photographs_of_percents_also_for_yolo(tmp_path: Path) -> None:
    """A YOLO trainer learns what the run learns: the lists are read again, and share nothing."""
    names = [f"images/train/p{i}.jpg" for i in range(20)]
    draw(tmp_path / "data", *names)
    file = yolo(tmp_path / "data", *["1 0.5 0.5 0.5 0.5"], content="path: .\ntrain: images/train\n")
    for name in names:
        label = tmp_path / "data" / name.replace("images", "labels").replace(".jpg", ".txt")
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("1 0.5 0.5 0.5 0.5\n")
    run = tmp_path / "run.yaml"
    parts = {"train": f"{file}:train[:70%]", "val": f"{file}:train[70%:]"}
    content = {
        "model": {"path": "a/b"},
        "data": parts,
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
    }
    run.write_text(json.dumps({**content, "custom": {"trainer_variant": "sft"}}))
    out = tmp_path / "lists 😀"
    assert main(["split", "--config", str(run), "--out", str(out)]) == 0
    lists = {split: set((out / f"{split}.txt").read_text().split()) for split in ("train", "val")}
    assert lists["train"] | lists["val"] >= {str(tmp_path / "data" / name) for name in names}
    assert not lists["train"] & lists["val"]
    assert lists["train"]
    assert lists["val"]
    for split, images in lists.items():
        read = samples_of(f"{out / 'data.yaml'}:{split}")
        assert {sample.images[0] for sample in read} == images
        assert {obj.desc for sample in read for obj in sample.objects} == {yolo_file(file).classes[1]}
    assert main(["split", "--config", str(run), "--out", str(out)]) == 0, "the same again"
    (out / "val.txt").write_text("mine")
    assert main(["split", "--config", str(run), "--out", str(out)]) == 2
    assert (out / "val.txt").read_text() == "mine"
