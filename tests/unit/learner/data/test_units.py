"""What the numbers of boxes mean (D23): each unit becomes the same bins, and another unit is never silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from learner.config.sections.data import DataConfig, ResizedCopy
from learner.data.check import check_split
from learner.data.survey import survey, warnings_of
from learner.data.units import PixelLimits, resized
from learner.records import Size, Unit
from shared.errors import DataError
from tests.tiers import slow
from tests.unit.learner.config.examples import minimal, only_mistake, valid
from tests.unit.learner.data.annotations import box, coco, refusal, samples_of, split_of, yolo
from tests.unit.learner.data.fakes import draw, make_run

# Boxes as shares, in many places up to the edges.
SHARES = [(0.02 * i, 0.5 - 0.02 * i, 0.02 * i + 0.5, 0.98 - 0.02 * i) for i in range(24)]


def rows(folder: Path, size: Size, scale: tuple[float, float], *, per_image: int = 2, **fields: Any) -> Path:
    """Write JSONL of photographs of `size` whose boxes are SHARES times `scale`."""
    lines = []
    for i in range(0, len(SHARES), per_image):
        name = f"images/p{i}.jpg"
        if not (folder / name).exists() or Image.open(folder / name).size != size:
            draw(folder, name, size=size)
        objects = [
            {"desc": "cat", "bbox_2d": [round(v * scale[k % 2], 4) for k, v in enumerate(one)]}
            for one in SHARES[i : i + per_image]
        ]
        turn = {"role": "user", "content": "<image>Detect."}
        lines.append(json.dumps({"messages": [turn], "images": [name], "objects": objects, **fields}))
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder / "train.jsonl"


def hint(path: Path, **data: Any) -> str:
    return split_of(path, on_bad_record="drop", **data).bad.reach.hint()


@pytest.mark.parametrize(
    ("unit", "scale"),
    [("thousandths", (1000, 1000)), ("shares", (1, 1)), ("percent", (100, 100)), ("pixels", (640, 480))],
)
@pytest.mark.parametrize("size", [(640, 480), slow((4032, 3024)), slow((3024, 4032)), (1500, 1100)])
def test_a_split_in_another_unit_warns_with_the_unit_that_fits(
    tmp_path: Path, size: Size, unit: Unit, scale: tuple[float, float]
) -> None:
    file = rows(tmp_path, size, size if unit == "pixels" else scale)
    said = hint(file)
    assert (f"data.coordinates: {unit}" in said) == (unit != "pixels")
    assert hint(file, coordinates=unit) == ""
    wrong: Unit = "percent" if unit != "percent" else "thousandths"
    assert f"data.coordinates: {unit}" in hint(file, coordinates=wrong)
    found = samples_of(file, coordinates=unit)
    expected = samples_of(rows(tmp_path, size, size))
    for one, other in zip(found, expected, strict=True):
        assert [obj.desc for obj in one.objects] == [obj.desc for obj in other.objects]
        for a, b in zip(one.objects, other.objects, strict=True):
            assert max(abs(x - y) for x, y in zip(a.bins, b.bins, strict=True)) <= 1


def test_the_warning_reaches_check_survey_and_errors(tmp_path: Path) -> None:
    """Whether boxes lie outside (an error) or not."""
    large = rows(tmp_path, (4032, 3024), (1000, 1000))
    assert any("thousandths" in line for line in warnings_of(survey(split_of(large))))
    small = rows(tmp_path, (640, 480), (1000, 1000))
    assert "data.coordinates: thousandths" in refusal(small)
    config, _ = make_run(train=str(small))
    first, *others = check_split(config, "train", str(small)).mistakes
    assert first.path == "data.train"
    assert "data.coordinates: thousandths" in first.found
    assert others


def test_photographs_of_many_sizes_in_thousandths(tmp_path: Path) -> None:
    """Some boxes lie outside, others do not: the split as a whole says it."""
    lines = []
    for i, size in enumerate([(640, 480), (4032, 3024), (800, 1200), (1024, 768)] * 5):
        draw(tmp_path, f"{i}.jpg", size=size)
        coords = [round(1000 * v) for v in SHARES[i]]
        objects = [{"desc": "cat", "bbox_2d": coords}]
        lines.append({"messages": [{"role": "user", "content": "?"}], "images": [f"{i}.jpg"], "objects": objects})
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert "data.coordinates: thousandths" in hint(file)


@pytest.mark.parametrize(
    ("boxes", "width", "height"),
    [
        ([(3, 4, 40, 60), (400, 100, 630, 470), (10, 200, 90, 300)] * 10, 640, 480),
        ([(30, 40, 60, 70)] * 24, 320, 240),  # one place in all photographs, which are small
        ([(i, 2 * i, i + 20, 2 * i + 30) for i in range(100)], 100, 200),
        slow([(5 * i, 3 * i, 5 * i + 90, 3 * i + 60) for i in range(180)], 1000, 600),
    ],
)
def test_right_boxes_raise_no_doubt(tmp_path: Path, boxes: list[Any], width: int, height: int) -> None:
    found = []
    for i, one in enumerate(boxes):
        draw(tmp_path, f"{i}.png", size=(width, height))
        turn = {"role": "user", "content": "?"}
        found.append({"messages": [turn], "images": [f"{i}.png"], "objects": [{"desc": "a", "bbox_2d": list(one)}]})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, found)))
    assert hint(tmp_path / "a.jsonl") == ""


def test_pixels_of_a_resized_copy(tmp_path: Path) -> None:
    """Qwen2.5-VL answers in the pixels that its processor shows it. A copy of one size may change the shape, too."""
    limit = 1280 * 28 * 28
    copy = resized((4032, 3024), PixelLimits(most=limit, factor=28))
    assert copy == (1148, 840)
    file = rows(tmp_path, (4032, 3024), copy)
    assert f"max_pixels: {limit}" in hint(file)
    expected = samples_of(rows(tmp_path, (4032, 3024), (4032, 3024)))
    file = rows(tmp_path, (4032, 3024), copy)
    found = samples_of(file, coordinates=ResizedCopy(max_pixels=limit))
    assert found[0].objects[0].bins == pytest.approx(expected[0].objects[0].bins, abs=1)
    square = rows(tmp_path, (1920, 1080), (640, 640))
    found = samples_of(square, coordinates={"width": 640, "height": 640})
    assert found[0].objects[0].bins == pytest.approx(expected[0].objects[0].bins, abs=1)


def test_a_fixed_copy_is_recognized(tmp_path: Path) -> None:
    assert "{width: 640, height: 640}" in hint(rows(tmp_path, (4000, 2000), (640, 640)))


def test_the_copys_size_may_be_in_the_record(tmp_path: Path) -> None:
    file = rows(tmp_path, (400, 300), (200, 150), width=200, height=150)
    assert "data.coordinates: resized" in refusal(file)
    found = samples_of(file, coordinates="resized")
    assert (found[0].width, found[0].height) == (400, 300)
    same = rows(tmp_path, (400, 300), (400, 300))
    assert [s.objects for s in found] == [s.objects for s in samples_of(same)]
    assert "resized copy" in refusal(same, coordinates="resized")


def test_a_copy_needs_a_size() -> None:
    for copy in ({}, {"width": 5}, {"width": 5, "height": 5, "max_pixels": 9}):
        assert only_mistake(minimal(), {"data.coordinates": copy}).path == "data.coordinates"
    assert valid(minimal(), {"data.coordinates": {"max_pixels": 9}}).data.coordinates == ResizedCopy(max_pixels=9)


def test_yolo_has_shares_unless_the_key_says_otherwise(tmp_path: Path) -> None:
    file = yolo(tmp_path, "0 0.5 0.5 0.5 0.5")
    assert samples_of(f"{file}:train")[0].objects == (box("cat", 250, 250, 749, 749),)
    (tmp_path / "labels/train/a.txt").write_text("0 100 50 100 50\n0 150 50 90 80\n1 40 50 60 90")
    assert "data.coordinates: pixels" in refusal(f"{file}:train")
    assert box("cat", 250, 250, 749, 749) in samples_of(f"{file}:train", coordinates="pixels")[0].objects


def test_coco_with_corners(tmp_path: Path) -> None:
    corners = [[20, 30, 100, 90], [50, 20, 190, 95], [100, 10, 199, 60], [90, 40, 198, 99]]
    file = coco(tmp_path, *({"bbox": one} for one in corners))
    assert "data.box_format: xyxy" in hint(file)
    assert box("cat", 100, 300, 500, 899) in samples_of(file, box_format="xyxy")[0].objects


def test_every_split_can_have_its_own_unit(tmp_path: Path) -> None:
    from learner.config.split import as_read_for

    data = DataConfig(train="a", val={"path": "b", "coordinates": "percent"}, coordinates="thousandths")  # type: ignore[arg-type]
    assert as_read_for(data, "val").coordinates == "percent"
    assert as_read_for(data, "train").coordinates == "thousandths"


def test_a_part_without_samples_names_the_unit(tmp_path: Path) -> None:
    """All boxes are too small to be kept: the photographs stay, and the warning with them."""
    file = rows(tmp_path, (640, 480), (1, 1))
    try:
        said = hint(file)
    except DataError as error:
        said = str(error)
    assert "data.coordinates: shares" in said
