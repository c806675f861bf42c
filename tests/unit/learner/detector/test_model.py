"""The model that `predict` asks: what it is called, and what files beside it may do (D24)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from learner.__main__ import main
from learner.config.inference import CALIBRATION_NAME, INFERENCE_NAME
from learner.config.load import RESOLVED_NAME
from learner.detector.card import notes_of
from learner.detector.model import find_model, model_folder, name_of, only_its_files
from learner.run.best import BEST_FILE, BEST_LINK
from shared.config.parse import write_yaml
from shared.errors import ConfigError
from tests.unit.learner.config.examples import changed, minimal

CHECKPOINT = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"


@pytest.mark.parametrize(
    ("named", "folder", "name"),
    [
        ("runs/cells", "runs/cells/checkpoint-40", "cells, step 40"),
        ("runs/cells/checkpoint-40", "runs/cells/checkpoint-40", "cells, step 40"),
        ("runs/cells/best", "runs/cells/best", "cells, step 8"),
        ("runs/recipe", "runs/recipe/sft/checkpoint-4", "recipe, step 4"),
        ("exported", "exported", "exported"),
        ("demo/checkpoint", "demo/checkpoint", "demo/checkpoint"),
    ],
)
def test_a_model_is_called_by_its_run_and_step(
    named: str, folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/cells/checkpoint-8").mkdir(parents=True)
    (tmp_path / "runs/cells/best").symlink_to("checkpoint-8")
    assert name_of(Path(named), Path(folder)) == name


def test_a_run_that_only_became_worse_says_so(tmp_path: Path) -> None:
    """`--model RUN` is its best checkpoint. A run whose start was best has none, and its newest was asked without a
    word."""
    newest = tmp_path / "run" / "checkpoint-4"
    newest.mkdir(parents=True)
    for name in ("config.json", INFERENCE_NAME):
        shutil.copy(CHECKPOINT / name, newest / name)
    assert find_model(tmp_path / "run").warnings == ()
    measured = {"metric": "f1@0.5", "best_step": 0, "values": {"0": 0.728, "4": 0.696}}
    (tmp_path / "run" / BEST_FILE).write_text(json.dumps(measured))
    found = find_model(tmp_path / "run")
    assert found.folder == newest
    assert len(found.warnings) == 1
    for part in ("f1@0.5", "0.728", "checkpoint-4"):
        assert part in found.warnings[0]
    assert find_model(newest).warnings == (), "it was asked for by name"
    (tmp_path / "run" / BEST_LINK).symlink_to("checkpoint-4")
    assert find_model(tmp_path / "run").warnings == (), "a run that went on became better"


@pytest.mark.parametrize("link", [BEST_LINK, "checkpoint-7"])
def test_a_link_that_leaves_the_run_s_folder_is_refused_by_name(tmp_path: Path, link: str) -> None:
    """D24. Named itself, it is what the user means."""
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in (elsewhere, tmp_path / "run" / "checkpoint-4"):
        shutil.copy(CHECKPOINT / "config.json", folder)
    (tmp_path / "run" / link).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{elsewhere}"):
        model_folder(tmp_path / "run")
    assert model_folder(tmp_path / "run" / link) == tmp_path / "run" / link


# ---- what a file that nobody named may do (D24) ----------------------------------------------------------------------

SECRET = "hf_this-is-the-token"
ASKED = {"data.prompt": "Find cells.", "model.max_pixels": 4096, "task.iou_threshold": 0.25}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model in a run's folder, without what says how to ask it."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(CHECKPOINT, folder)
    for name in (INFERENCE_NAME, CALIBRATION_NAME):
        (folder / name).unlink(missing_ok=True)
    return folder


def beside(checkpoint: Path, keys: dict[str, Any], **top: object) -> Path:
    """Write a configuration beside the model."""
    file = checkpoint.parent / RESOLVED_NAME
    write_yaml(file, {**changed(minimal(), {**ASKED, **keys}), **top})
    file.write_text(file.read_text().replace("$${", "${"))
    return file


def test_prompt_task_and_limits_are_taken_from_a_file_that_was_found(checkpoint: Path) -> None:
    beside(checkpoint, {"custom.extra.rollout_matching.decoding.max_new_tokens": 77})
    settings = find_model(checkpoint).settings
    assert [turn["content"] for turn in settings.messages] == ["<image>Find cells."]
    assert (settings.max_pixels, settings.max_new_tokens, settings.task.iou_threshold) == (4096, 77, 0.25)


READERS = (
    {"data.format": "runpy:run_path"},
    {"data.val": {"path": "VAL", "format": "runpy:run_path"}},
    {"data.test": {"path": "VAL", "format": "runpy:run_path"}},
    {"task.type": "runpy:run_path"},
    {"reward.functions": ["runpy:run_path"]},
)


@pytest.mark.parametrize("command", ["predict", "calibrate", "find-missing"])
@pytest.mark.parametrize("keys", READERS, ids=["data", "val", "test", "task", "reward"])
@pytest.mark.parametrize("has_settings", [True, False], ids=["settings", "bare"])
def test_nothing_is_imported_for_a_file_that_was_found(
    keys: dict[str, Any], command: str, has_settings: bool, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, out, ran = (checkpoint.parents[1] / name for name in ("a.py", "out", "ran"))
    program.write_text(f"open({str(ran)!r}, 'w').close()\n")
    if has_settings:
        shutil.copy(CHECKPOINT / INFERENCE_NAME, checkpoint)
    named = json.loads(json.dumps(keys).replace("VAL", str(program)))
    beside(checkpoint, {"data.train": str(program), "data.prompt": "Find cells."} | named)
    argv = {
        "predict": ["predict", str(program), "--out", str(out)],
        "calibrate": ["calibrate", str(program)],
        "find-missing": ["find-missing", "suggest", str(program), "--out", str(out)],
    }[command]
    assert main([*argv, "--model", str(checkpoint), "--backend", "hf"]) == 2
    said = capsys.readouterr().err
    assert not ran.exists()
    if "runpy" in json.dumps(keys.get("data.format", "")):
        assert ("data.format" in said, "--config" in said) == (True, True)


@pytest.mark.parametrize("key", ["data.prompt", "task.options"])
def test_no_variable_is_filled_in_a_file_that_was_found(key: str, checkpoint: Path) -> None:
    """`export` writes what was found into `inference.json`, which is published."""
    text = "Find ${HF_TOKEN}."
    beside(checkpoint, {key: {"a": [text]} if key == "task.options" else text, "task.type": "my_tasks:Mine"})
    told: list[str] = []
    notes = notes_of(checkpoint, "name", tell=told.append)
    assert SECRET not in json.dumps(notes)
    assert text in notes[INFERENCE_NAME]
    assert key.partition(".")[0] in told[0]


def test_a_file_that_was_found_has_no_base(checkpoint: Path, tmp_path: Path) -> None:
    write_yaml(tmp_path / "other.yaml", {"data": {"prompt": "from elsewhere"}})
    beside(checkpoint, {}, base="../other.yaml")
    with pytest.raises(ConfigError, match="base"):
        find_model(checkpoint)


@pytest.mark.parametrize("name", [RESOLVED_NAME, INFERENCE_NAME, CALIBRATION_NAME])
def test_no_link_out_of_the_folder_is_followed(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """A copy of `calibration.json` went into every export."""
    file = beside(checkpoint, {})
    inside = file if name == RESOLVED_NAME else checkpoint / name
    contents = {
        RESOLVED_NAME: file.read_text(),
        INFERENCE_NAME: (CHECKPOINT / INFERENCE_NAME).read_text(),
        CALIBRATION_NAME: '{"format": 1, "calibrations": []}',
    }
    (tmp_path / "elsewhere").write_text(contents[name])
    inside.unlink(missing_ok=True)
    inside.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="link"):
        notes_of(checkpoint, "name")
    inside.unlink()
    inside.with_name("own").write_text(contents[name])
    inside.symlink_to("own")
    notes_of(checkpoint, "name")


def test_a_model_in_the_cache_of_the_hub_is_read(checkpoint: Path, tmp_path: Path) -> None:
    """Its files are links from `snapshots` to `blobs`."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    shutil.copytree(checkpoint, snapshot)
    blobs.mkdir()
    shutil.copy(CHECKPOINT / INFERENCE_NAME, blobs / "abc")
    (snapshot / INFERENCE_NAME).symlink_to("../../blobs/abc")
    assert find_model(snapshot).settings.to_json() == (CHECKPOINT / INFERENCE_NAME).read_text()


# ---- what an export copies -------------------------------------------------------------------------------------------


def test_only_files_of_a_model_are_exported_and_what_is_left_out_is_said(checkpoint: Path, tmp_path: Path) -> None:
    """`LICENSE -> ~/.ssh/id_rsa` was published, and so would a chat template be that is such a link."""
    private = tmp_path / "id_rsa"
    private.write_text(SECRET)
    shutil.copy(CHECKPOINT / INFERENCE_NAME, checkpoint)
    for name in ("LICENSE", "chat_template.jinja", "tokenizer_secrets.txt", "weights.model", "inside.link"):
        (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / "LICENSE").symlink_to(private)
    (checkpoint / "chat_template.jinja").symlink_to(private)
    (checkpoint / "additional_chat_templates").symlink_to(tmp_path)
    (checkpoint / "loop.safetensors").symlink_to("loop.safetensors")
    (checkpoint / "NOTICE.own").write_text("mine")
    (checkpoint / "NOTICE").symlink_to("NOTICE.own")
    for stranger in ("tokenizer_secrets.txt", "weights.model", "photograph.jpg"):
        (checkpoint / stranger).write_text(SECRET)
    (checkpoint / "training_state").mkdir()
    with only_its_files(checkpoint) as (shown, left_out):
        seen = {path.relative_to(shown): path.read_bytes() for path in shown.rglob("*") if path.is_file()}
    links = ("LICENSE", "additional_chat_templates", "chat_template.jinja", "loop.safetensors")
    strangers = ("photograph.jpg", "tokenizer_secrets.txt", "weights.model")
    assert sorted(left_out) == sorted([*(f"{name} (a link that leaves the folder)" for name in links), *strangers])
    assert {"config.json", "model.safetensors", "NOTICE"} <= {str(path) for path in seen}
    assert not any(SECRET.encode() in content for content in seen.values())
    notes = notes_of(checkpoint, "cells")
    assert (notes["NOTICE"], notes["NOTICE.own"]) == ("mine", "mine")
    assert not any(SECRET in text for text in notes.values())


def test_a_model_that_is_elsewhere_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").rename(tmp_path / "config.json")
    (checkpoint / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="link"), only_its_files(checkpoint):
        pass


@pytest.mark.parametrize("messages", [[{}], [{"role": "user"}], [{"role": "user", "content": 3}], [{"content": "a"}]])
def test_settings_without_a_prompt_are_an_error_that_names_the_file(messages: Any, checkpoint: Path) -> None:
    settings = json.loads((CHECKPOINT / INFERENCE_NAME).read_text())
    (checkpoint / INFERENCE_NAME).write_text(json.dumps(settings | {"messages": messages}))
    with pytest.raises(ConfigError, match=INFERENCE_NAME) as raised:
        find_model(checkpoint)
    assert "messages" in raised.value.found
