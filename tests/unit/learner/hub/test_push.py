"""An export reaches the hub with its card: the real client against a fake hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from safetensors.numpy import save_file

from learner.config.inference import InferenceSettings
from learner.config.sections.task import TaskConfig
from learner.detector.model import notes_of
from learner.hub.push import PushOptions, push
from shared.addresses import free_port
from shared.config.parse import write_yaml
from shared.errors import ConfigError, HubError
from tests.unit.docs.blocks import ROOT
from tests.unit.learner.config.examples import minimal
from tests.unit.learner.hub.fake_hub import TOKEN, Hub, serving
from tests.unit.learner.report.fake_run import write_run

BASE = "owner/base"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the large files go by git-lfs
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with serving() as hub:
        yield hub


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return an export of the checkpoint after step 40 of a run, which improved from step 0 to 40."""
    run = write_run(tmp_path / "runs/cells", num_scenes=6)
    data = {"train": f"{tmp_path}/annotations/train.json", "val": f"{tmp_path}/annotations/val.json"}
    write_yaml(run / "config.yaml", {**minimal(), "model": {"path": BASE}, "data": data})
    folder = tmp_path / "export"
    write_model(folder)
    write_model(run / "checkpoint-40")
    for name, text in notes_of(run / "checkpoint-40").items():
        (folder / name).write_text(text)
    return folder


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(3, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "training_state").mkdir()
    (folder / "training_state/optimizer.safetensors").write_bytes(b"state")
    (folder / "trainer_state.json").write_text("{}")
    prompt = [{"role": "user", "content": "<image>Find every cell."}]
    settings = InferenceSettings(task=TaskConfig(), messages=prompt, classes=["platelet", "red cell"])
    (folder / "inference.json").write_text(settings.to_json())


def test_an_export_is_uploaded_with_its_card(hub: Hub, export: Path, tmp_path: Path) -> None:
    hub.licenses[BASE] = "apache-2.0"
    assert push(PushOptions(model=export, repo="me/cells", private=True), endpoint=hub.endpoint) == 0
    assert hub.repos["me/cells"]["visibility"] == "private"
    assert set(hub.files) == {"README.md", "config.json", "inference.json", "model.safetensors"}
    assert hub.files["model.safetensors"] == (export / "model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---")[1])
    assert (metadata["license"], metadata["base_model"]) == ("apache-2.0", BASE)
    result = metadata["model-index"][0]["results"][0]
    assert result["metrics"][0]["type"] == "f1@0.5"
    row = re.search(r"f1@0\.5 \| (0\.\d+) \[.*?\] \| (0\.\d+) \[", card)
    assert row is not None
    assert 0 < float(row[1]) < float(row[2])
    assert float(row[2]) == pytest.approx(result["metrics"][0]["value"], abs=1e-3)
    wanted = ("annotations/train.json", "rollout matching", "Find every cell.", "red cell", "vllm serve me/cells")
    assert [text for text in (*wanted, "from_pretrained", "rollout-learner predict") if text not in card] == []
    assert str(tmp_path) not in card


def test_what_is_no_part_of_a_model_stays_and_is_named(
    hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody exported into a folder with private photographs and annotations."""
    mine = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json", "LICENSE"}
    private = {"train.json", "photographs/1.png", "photographs/model.safetensors", "notes.txt"}
    (export / "photographs").mkdir()
    for name in mine | private:
        (export / name).write_text("text")
    push(PushOptions(model=export, repo="me/cells", license="mit"), endpoint=hub.endpoint)
    assert set(hub.files) == {"README.md", "config.json", "inference.json", "model.safetensors"} | mine
    assert "4 of the folder's files" in capsys.readouterr().out


def test_a_second_push_goes_to_the_same_repository_with_the_edited_card(hub: Hub, export: Path) -> None:
    options = PushOptions(model=export, repo="me/cells", license="mit")
    push(options, endpoint=hub.endpoint)
    (export / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    push(options, endpoint=hub.endpoint)
    assert hub.files["README.md"].decode().endswith("# Mine\n")


def test_a_dry_run_writes_the_card_and_uploads_nothing(
    hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert push(PushOptions(model=export, repo="me/cells", license="mit", dry_run=True), endpoint=hub.endpoint) == 0
    assert "license: mit" in (export / "README.md").read_text()
    assert "model.safetensors" in capsys.readouterr().out
    assert hub.asked == []


def test_without_a_run_the_card_has_no_figures(hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (export / "origin.json").unlink()
    push(PushOptions(model=export, repo="me/cells"), endpoint=hub.endpoint)
    assert "f1@0.5" not in hub.files["README.md"].decode()
    assert "--run" in capsys.readouterr().out


def test_the_best_step_of_a_named_run_is_shown(hub: Hub, export: Path) -> None:
    (export / "origin.json").unlink()
    run = export.parent / "runs/cells"
    push(PushOptions(model=export, repo="me/cells", run=run), endpoint=hub.endpoint)
    assert "this model, step 40" in hub.files["README.md"].decode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": Path("nowhere")}, ("--model", "no such folder")),
        ({"model": Path("empty")}, ("--model", "an exported model")),
        ({"model": Path("adapter")}, ("--model", "adapter", "rollout-learner export")),
        ({"repo": "cells"}, ("--repo", "owner/name")),
        ({"run": Path("empty")}, ("--run", "training.output_dir")),
    ],
)
def test_a_wrong_argument_is_named(
    hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(export.parent)
    Path("empty").mkdir()
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    options: dict[str, object] = {"model": export, "repo": "me/cells", **change}
    with pytest.raises(ConfigError) as caught:
        push(PushOptions(**options), endpoint=hub.endpoint)  # type: ignore[arg-type]
    assert [word for word in words if word not in str(caught.value)] == []
    assert hub.asked == []


def test_a_missing_token_is_an_error_with_advice(
    hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    with pytest.raises(ConfigError, match="hf auth login"):
        push(PushOptions(model=export, repo="me/cells"), endpoint=hub.endpoint)
    assert hub.asked == []


def test_a_token_without_the_right_is_a_hub_error(hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(HubError, match="403: You don't have the rights") as caught:
        push(PushOptions(model=export, repo="me/cells", license="mit"), endpoint=hub.endpoint)
    assert "HF_TOKEN" in caught.value.remedy
    assert hub.files == {}


def test_a_hub_that_does_not_answer_is_a_hub_error(hub: Hub, export: Path) -> None:
    with pytest.raises(HubError, match="Connect") as caught:
        push(PushOptions(model=export, repo="me/cells", license="mit"), endpoint=f"http://127.0.0.1:{free_port()}")
    assert "HF_ENDPOINT" in caught.value.remedy


def test_the_command_line_takes_the_hub_of_the_environment(hub: Hub, export: Path) -> None:
    switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "learner", "push", "--model", str(export), "--repo", "me/cells"],
        env={**os.environ, **switches, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.endpoint}/me/cells"
    assert "model.safetensors" in hub.files
