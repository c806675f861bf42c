"""Scenes with several images: one sheet with all of them, and each box on its own image."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from learner.report.read import read_scene
from learner.report.scenes import load_picture, shapes_of_scene
from learner.report.sheet import Sheet
from learner.tasks.detection.bins import to_pixels
from tests.unit.learner.report.fake_run import write_run
from tests.unit.learner.report.test_live import client, write_answers
from tests.unit.learner.tasks.fakes import box

SIZES = st.lists(st.tuples(st.integers(20, 900), st.integers(20, 900)), min_size=2, max_size=8)


@given(SIZES, st.data())
def test_a_box_keeps_its_place_in_its_image(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    sheet = Sheet.of(sizes)
    number = data.draw(st.integers(1, len(sizes)))
    x, y = data.draw(st.integers(0, 900)), data.draw(st.integers(0, 900))
    obj = box("seven", x, y, x + 99, y + 99)._replace(image=number)
    left, top, right, bottom = sheet.places[number - 1]
    assert (right - left, bottom - top) == sizes[number - 1]
    wanted = to_pixels(obj.bins, *sizes[number - 1])
    found = to_pixels(sheet.placed(obj).bins, *sheet.size)
    for i, (there, here) in enumerate(zip(found, wanted, strict=True)):
        assert abs(there - (left, top)[i % 2] - here) <= sheet.size[i % 2] / 999


@given(SIZES)
def test_images_do_not_overlap_and_are_whole(sizes: list[tuple[int, int]]) -> None:
    sheet = Sheet.of(sizes)
    for i, (left, top, right, bottom) in enumerate(sheet.places):
        assert 0 <= left < right <= sheet.size[0]
        assert 0 <= top < bottom <= sheet.size[1]
        for other in sheet.places[:i]:
            assert left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]


@pytest.fixture
def line(tmp_path: Path) -> dict[str, Any]:
    """Both images have an object at the same place, and the one of the first image was found."""
    images = []
    for color, size in (("red", (60, 30)), ("blue", (40, 80))):
        images.append(str(tmp_path / f"{color}.png"))
        Image.new("RGB", size, color).save(images[-1])
    truth = [{"desc": "seven", "image": k, "bbox_2d": [100, 100, 500, 500]} for k in (1, 2)]
    sizes: dict[str, Any] = {"images": images, "width": 60, "height": 30, "sizes": [[60, 30], [40, 80]]}
    return {"id": "a", **sizes, "truth": truth, "predictions": truth[:1], "drops": {}, "truncated": False}


def test_the_report_draws_all_images(line: dict[str, Any]) -> None:
    scene = read_scene(line)
    assert scene is not None
    assert (scene.width, scene.height) == (120, 80)
    counts, shapes = shapes_of_scene(scene)
    assert counts == ["1 of 2 found"]
    assert [(color, item.bins[0] < 500) for color, _, item in shapes] == [
        ("truth", True),
        ("missed", False),
        ("hit", True),
    ]
    picture = load_picture(scene.images, [Path()], scene.sheet)
    assert picture is not None
    with Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2]))) as shown:
        seen = [shown.convert("RGB").getpixel(at) for at in ((59, 29), (59, 31), (61, 79), (101, 10))]
    assert seen == [(255, 0, 0), (255, 255, 255), (0, 0, 255), (255, 255, 255)]


def test_an_image_that_is_gone_leaves_its_place_empty(line: dict[str, Any]) -> None:
    scene = read_scene({**line, "images": ["gone.png", line["images"][1]]})
    assert scene is not None
    picture = load_picture(scene.images, [Path()], scene.sheet)
    assert picture is not None
    assert load_picture(["gone.png", "lost.png"], [Path()], scene.sheet) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": [[60, 30]]},
        {"sizes": [[60, 30], [0, 80]]},
        {"sizes": [[60, 30], [1 << 40, 80]]},
        {"sizes": 7},
        {"sizes": []},
    ],
)
def test_a_line_that_contradicts_itself_is_no_scene(line: dict[str, Any], changes: dict[str, Any]) -> None:
    assert read_scene({**line, **changes}) is None


def test_the_live_view_draws_all_images(tmp_path: Path, line: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", steps=2, quality=((0, 0.3),), num_scenes=1)
    write_answers(run, **line, missed=[1], pairs=[[0, 0, 0.9]])
    page = client(run).get("/").text
    assert 'viewBox="0 0 300 200"' in page
    assert json.loads((run / "answers.json").read_text())["answers"][0]["sizes"] == line["sizes"]
