"""`--check` reads the annotations: file, line and reason, without torch or transformers (R12)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.__main__ import main
from shared.config.parse import dump_yaml
from tests.unit.learner.config.examples import changed, minimal
from tests.unit.learner.data.fakes import draw

HEAVY = ("torch", "transformers", "vllm", "peft", "numpy", "shapely")
ROW = {
    "id": "a",
    "messages": [{"role": "user", "content": "<image>Detect."}],
    "images": ["1.png"],
    "objects": [{"desc": "cat", "bbox_2d": [10, 50, 20, 90]}],
    "width": 200,
    "height": 100,
}


TWO_IMAGES = [{"role": "user", "content": "<image><image>Detect."}]


def write(folder: Path, *rows: Any, **changes: Any) -> str:
    draw(folder, "1.png")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "run.yaml"
    path.write_text(dump_yaml(changed(minimal(), {"data.train": str(folder / "train.jsonl"), **changes})))
    return str(path)


def test_samples_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, ROW, {**ROW, "id": "b"})
    assert main(["--config", path, "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == {"train": 2}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({**ROW, "id": "b", "objects": [{"desc": " ", "bbox_2d": [1, 1, 5, 5]}]}, "blank"),
        ({**ROW, "id": "b", "objects": [{"desc": "cat", "bbox_2d": [9, 9, 1, 1]}]}, "on_bad_record.no_area"),
        ({**ROW, "id": "b", "width": None}, "width"),
        ({**ROW, "id": "b", "images": ["1.png", "1.png"], "messages": TWO_IMAGES}, "which of the 2 images it is in"),
        (ROW, "id"),
    ],
)
def test_a_broken_row_is_told_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: Any, reason: str
) -> None:
    assert main(["--config", write(tmp_path, ROW, broken), "--check"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("data.train: found ")
    assert "train.jsonl, line 2: " in err
    assert reason in err


def test_several_images_are_not_augmented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R16: this is known before a model is loaded."""
    objects = [{"desc": "cat", "image": 2, "bbox_2d": [10, 50, 20, 90]}]
    two = {**ROW, "images": ["1.png", "1.png"], "messages": TWO_IMAGES, "objects": objects}
    plain = {"custom.trainer_variant": "sft"}
    assert main(["--config", write(tmp_path, two, **plain), "--check"]) == 0
    assert main(["--config", write(tmp_path, two, **{**plain, "data.augment": {}}), "--check"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("data.augment: found sample 'a' can't be augmented: 2 images")
    assert said.count("\n") == 1


def test_every_split_that_is_wrong_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {})
    missing = {"data.train": f"{tmp_path}/train.jsonl", "data.val": "gone.jsonl", "data.test": f"{tmp_path}/1.png"}
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(changed(minimal(), missing)))
    assert main(["--config", str(path), "--check"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    keys = [line.split(": ")[0] for line in err.splitlines()]
    assert list(dict.fromkeys(keys)) == ["data.train", "data.val", "data.test"]
    assert all(line.count("; ") >= 2 for line in err.splitlines())


def test_every_record_that_is_wrong_is_told_and_above_fifty_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R41."""
    flat = [{"desc": "cat", "bbox_2d": [9, 9, 9, 20]}]
    path = write(tmp_path, ROW, *({**ROW, "id": i, "objects": flat} for i in range(53)))
    assert main(["--config", path, "--check"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 51
    assert [f"line {n}: " in lines[n - 2] for n in range(2, 52)] == [True] * 50
    assert all("[9.0, 9.0, 9.0, 20.0]" in line for line in lines[:50])
    assert "3 more" in lines[-1]


def test_what_is_dropped_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, ROW, {**ROW, "id": "b", "objects": [{"desc": "cat", "bbox_2d": [9, 9, 9, 20]}]})
    path = tmp_path / "run.yaml"
    keys = {"data.train": str(tmp_path / "train.jsonl"), "data.on_bad_record": "drop"}
    path.write_text(dump_yaml(changed(minimal(), keys)))
    assert main(["--config", str(path), "--check"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["samples"] == {"train": 2}
    assert report["bad_records"] == {"train": {"no_area": {"drop": 1}}}


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from learner.__main__ import main; main(['--config', sys.argv[1], '--check']);"
        f"print(sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, write(tmp_path, ROW)], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"
