"""`check --draw N`: pictures of training photographs with their labels, before and after `data.augment`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from learner.__main__ import main
from learner.doctor.pictures import LABEL
from shared.config.parse import dump_yaml
from tests.unit.learner.config.examples import changed, minimal
from tests.unit.learner.data.annotations import FINE, jsonl

PLAIN = {"custom.trainer_variant": "sft"}
FLIPPED = {"smallest_crop": 1.0, "horizontal_flip": 1.0}


def write(folder: Path, **values: object) -> str:
    (folder / "run.yaml").write_text(dump_yaml(changed(minimal(), values)))
    return str(folder / "run.yaml")


def green_columns(picture: Image.Image) -> tuple[int, int]:
    """Return least and largest x of what is drawn in the color of labels, within the JPEG's losses."""
    found = [
        x
        for x in range(picture.width)
        for y in range(picture.height)
        if sum(abs(a - b) for a, b in zip(picture.getpixel((x, y)), LABEL, strict=True)) < 60  # type: ignore[call-overload]
    ]
    return min(found), max(found)


def test_each_photograph_is_drawn_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = jsonl(tmp_path, *[{**FINE, "desc": "cell"}] * 5)
    path = write(tmp_path, **{"data.train": str(train), "data.augment": FLIPPED, **PLAIN})
    out = tmp_path / "drawn"
    assert main(["check", "--config", path, "--draw", "2", "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    first, second = sorted(out.iterdir())
    assert (first.name, second.name) == ("001-0.jpg", "002-2.jpg")
    with Image.open(first) as drawn:
        picture = drawn.convert("RGB")
    width = (picture.width - 12) // 2
    before, after = (green_columns(picture.crop((left, 0, left + width, picture.height))) for left in (0, width + 12))
    assert abs(before[0] - (width - after[1])) < 8, "mirrored"
    assert before != after


def test_without_augmentation_photographs_alone_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, **{"data.train": str(jsonl(tmp_path, FINE))})
    assert main(["check", "--config", path, "--draw", "9", "--out", str(tmp_path / "drawn"), "--json"]) == 0
    (drawn,) = json.loads(capsys.readouterr().out)["pictures"]
    with Image.open(drawn) as picture:
        assert picture.size == (200, 100)


def test_several_images_stand_side_by_side(tmp_path: Path) -> None:
    """Each has its own labels: the left half of the second image, and nothing of the first."""
    turn = [{"role": "user", "content": "<image><image>?"}]
    obj = {"desc": "x", "image": 2, "bbox_2d": [0, 20, 100, 80]}
    train = jsonl(tmp_path, obj, images=["1.png", "1.png"], messages=turn)
    path, out = write(tmp_path, **{"data.train": str(train)}), tmp_path / "drawn"
    assert main(["check", "--config", path, "--draw", "1", "--out", str(out)]) == 0
    (drawn,) = out.iterdir()
    with Image.open(drawn) as picture:
        assert picture.size == (412, 100)
        left, right = green_columns(picture.convert("RGB"))
    assert abs(left - 212) < 8
    assert abs(right - 312) < 8


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, **{"data.train": str(jsonl(tmp_path, FINE))})
    (tmp_path / "drawn").write_text("")
    assert main(["check", "--config", path, "--draw", "1", "--out", str(tmp_path / "drawn")]) != 0
    assert "Traceback" not in capsys.readouterr().err


def test_check_names_the_classes_that_are_not_mirrored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = jsonl(tmp_path, {**FINE, "desc": "7"}, {**FINE, "desc": "cell"})
    path = write(tmp_path, **{"data.train": str(train), "data.augment": {"horizontal_flip": 0.5}, **PLAIN})
    assert main(["check", "--config", path]) == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "neither mirrored" in line]
    assert warning.endswith(": 7")
