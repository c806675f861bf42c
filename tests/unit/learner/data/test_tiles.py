"""Training on tiles of large photographs (`data.tile`): as `predict --tile` asks, with a rule at the border."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.data.views import open_images
from learner.records import Sample
from shared.images import ImageRules, Images
from tests.unit.learner.config.examples import minimal, only_mistake
from tests.unit.learner.data.annotations import samples_of
from tests.unit.learner.data.fakes import AnyTask, draw


def read(folder: Path, *boxes: list[float], **data: Any) -> list[Sample]:
    """Return the samples of one photograph of 1000 x 500 pixels and one of 300 x 200."""
    draw(folder, "large.jpg", size=(1000, 500))
    draw(folder, "small.jpg", size=(300, 200))
    names = ("large.jpg", "small.jpg")
    images = [
        {"id": i, "file_name": name, "width": w, "height": h}
        for i, (name, w, h) in enumerate([(names[0], 1000, 500), (names[1], 300, 200)])
    ]
    annotations = [{"id": i, "image_id": 0, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "nut"}]}
    (folder / "train.json").write_text(json.dumps(content))
    return samples_of(folder / "train.json", **data)


def test_a_large_photograph_is_learned_whole_and_in_tiles(tmp_path: Path) -> None:
    """Tiles of 500 x 250 begin at 0, 250 and 500. A box of 100 x 50 at 480 has a fifth of its area in the first tile,
    where it is an ignore region; in the second it is whole, and in the third it is cut at the border."""
    whole, *tiles, small = read(tmp_path, [480, 100, 100, 50], tile=500)
    assert (whole.sample_id, small.sample_id) == ("0", "1")
    assert whole.view is None
    assert small.view is None
    assert [one.sample_id for one in tiles] == [f"0@{left},{top}" for top in (0, 125, 250) for left in (0, 250, 500)]
    assert [(one.width, one.height) for one in tiles] == [(500, 250)] * 9
    del tiles[3:]
    bins = [[obj.bins for obj in one.objects] for one in tiles]
    top, bottom = round(100 / 250 * 999), round(150 / 250 * 999)
    assert bins == [[], [(round(230 / 500 * 999), top, round(330 / 500 * 999), bottom)], [(0, top, 160, bottom)]]
    assert whole.objects[0].bins == tuple(round(value * 999) for value in (0.48, 0.2, 0.58, 0.3))
    assert [len(one.ignored) for one in tiles] == [1, 0, 0]
    (picture,) = open_images(tiles[2], Images(ImageRules()))
    assert picture.size == (500, 250)
    assert picture.tobytes() == open_images(whole, Images(ImageRules()))[0].crop((500, 0, 1000, 250)).tobytes()


def test_a_tile_has_what_is_too_small_for_the_whole_photograph(tmp_path: Path) -> None:
    """Half a pixel of 1000 has no width in thousandths; in a tile of 100 it has five."""
    whole, *tiles, _ = read(tmp_path, [20.1, 30, 0.4, 20], tile=100)
    assert whole.objects == ()
    first = tiles[0]
    assert [obj.bins for obj in (*first.objects, *first.ignored)] == [], "less than a pixel of the tile"
    whole, *tiles, _ = read(tmp_path, [20.3, 30, 6.1, 20], tile=100)
    assert [obj.bins for obj in tiles[0].objects] == [tuple(round(v * 9.99) for v in (20.3, 60, 26.4, 100))]


def test_only_what_is_trained_on_is_cut(tmp_path: Path) -> None:
    assert len(read(tmp_path)) == 2
    assert len(read(tmp_path, tile=1000)) == 2, "no side is larger"
    other = tmp_path / "other.json"
    (tmp_path / "train.json").rename(other)
    data = DataConfig(train="another.json", tile=500)
    assert len(load_samples(data, str(other), AnyTask())) == 2


@pytest.mark.parametrize(("key", "value"), [("data.augment", {}), ("labels.complete", {}), ("task.type", "key_value")])
def test_tiles_stand_alone(key: str, value: object) -> None:
    mistake = only_mistake(minimal(), {"data.tile": 500, key: value, "custom.trainer_variant": "sft"})
    assert mistake.path == "data.tile"
    assert key in mistake.found
