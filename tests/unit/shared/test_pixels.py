"""R45: the two sides' pixels, with planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoProcessor

from bench.tiny_models import build_qwen3_vl
from shared import pixels
from shared.errors import ServerMismatchError
from shared.pixels import ImageProcessing, check_pixels
from shared.wire import ProcessedImages

Dtype = Literal["uint8", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("uint8", "bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_qwen3_vl(path)
    return path


def photograph() -> Image.Image:
    noise = torch.randint(0, 256, (67, 99, 3), dtype=torch.uint8, generator=torch.manual_seed(3))
    return Image.fromarray(noise.numpy())


def processor_of(model: Path, **changes: Any) -> Any:
    processor = AutoProcessor.from_pretrained(model).image_processor
    for name, value in changes.items():
        setattr(processor, name, type(processor.size)(**value) if name == "size" else value)
    return processor


def look(model: Path, *images: Image.Image, dtype: Dtype = "uint8", **changes: Any) -> ProcessedImages:
    processor = processor_of(model, **changes)
    inputs = processor(images=list(images), return_tensors="pt")
    return ImageProcessing.of(processor).processed(inputs["pixel_values"], inputs["image_grid_thw"], dtype)


def check(mine: ProcessedImages, theirs: ProcessedImages) -> float:
    return check_pixels(mine, theirs, sample_id="s7", name="http://a")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_pixels_pass_and_a_rounding_too(model: Path, dtype: Dtype) -> None:
    mine = look(model, photograph(), dtype=dtype)
    assert check(mine, look(model, photograph(), dtype=dtype)) == 0.0
    (image,) = mine.images
    step = 1.0 if dtype == "uint8" else 0.008
    near = image.model_copy(update={"digest": "other", "values": [value + step for value in image.values]})
    other_version = mine.settings | {"pillow": "0.1"}
    rounded = mine.model_copy(update={"images": [near], "settings": other_version})
    assert check(mine, rounded) == pytest.approx(step)
    bicubic = mine.model_copy(update={"images": [near], "settings": mine.settings | {"resample": "0"}})
    with pytest.raises(ServerMismatchError):
        check(mine, bicubic)


@pytest.mark.parametrize("normalizes", [True, False])
def test_levels_are_those_before_normalization(model: Path, normalizes: bool) -> None:
    """vLLM sends levels of 0 to 255 to the device. The learner has normalized ones."""
    every_level = Image.fromarray(torch.arange(256, dtype=torch.uint8).repeat(3 * 64).view(256, 64, 3).numpy())
    changes = {"do_resize": False}
    levels = processor_of(model, do_rescale=False, do_normalize=False, **changes)
    processor = processor_of(model, do_normalize=normalizes, **changes)
    wanted, got = (one(images=[every_level], return_tensors="pt")["pixel_values"] for one in (levels, processor))
    back = torch.cat([part.flatten(1) for part in ImageProcessing.of(processor).as_type(got, "uint8")])
    assert torch.equal(back, wanted.to(torch.uint8))


def test_every_value_counts_and_places_are_spread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(12_000.0).view(40, 300)
    grids = torch.tensor([[1, 4, 4], [1, 4, 6]])
    monkeypatch.setattr(pixels, "_ROWS", 7)
    processing = ImageProcessing(settings={}, scale=(1.0,), shift=(0.0,))
    seen = processing.processed(values, grids, "float32")
    other = values.clone()
    other[39, 299] += 1
    changed = processing.processed(other, grids, "float32")
    assert [a.digest == b.digest for a, b in zip(seen.images, changed.images, strict=True)] == [True, False]
    places = [int(value) for value in seen.images[0].values]
    assert places == sorted(set(places))
    assert len(places) == pixels.NUM_VALUES
    assert max(places) > 0.99 * 16 * 300
    whole = pixels.seen_image([values[:16]], size=16 * 300, grid=[1, 4, 4])
    assert whole == seen.images[0], "however the values are cut"


def cut_off(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.paste((128, 128, 128), (0, 30, *image.size))
    return image


def swapped(image: Image.Image) -> Image.Image:
    red, green, blue = image.split()
    return Image.merge("RGB", (blue, green, red))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"size": {"shortest_edge": 4096, "longest_edge": 4096}}, "size"),
        ({"resample": Image.Resampling.NEAREST}, "resample"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
        ({"do_normalize": False}, "do_normalize"),
        (ImageOps.mirror, "EXIF"),
        (lambda image: image.rotate(90, expand=True), "EXIF"),
        (lambda image: image.resize((60, 120)), "another size"),
        (cut_off, "cut off"),
        (swapped, "colour channels"),
    ],
)
def test_planted_faults_are_found_and_named(model: Path, fault: Any, named: str, dtype: Dtype) -> None:
    mine = look(model, photograph(), dtype=dtype)
    wrong = (photograph(), fault) if isinstance(fault, dict) else (fault(photograph()), {})
    theirs = look(model, wrong[0], dtype=dtype, **wrong[1])
    with pytest.raises(ServerMismatchError) as raised:
        check(mine, theirs)
    error = raised.value
    assert named in error.what
    assert "s7" in error.what
    assert str([mine.images[0].grid]) in error.wanted
    assert str([theirs.images[0].grid]) in error.found
    assert "size longest_edge=" in error.wanted
    assert "min_pixels" in error.remedy


def test_another_number_of_images(model: Path) -> None:
    with pytest.raises(ServerMismatchError, match="2, not 1"):
        check(look(model, photograph()), look(model, photograph(), photograph()))


def test_another_version_of_the_processor_is_named(model: Path) -> None:
    """A version that makes other pixels, not only rounds them."""
    mine = look(model, photograph())
    newer = look(model, photograph(), resample=Image.Resampling.LANCZOS)
    theirs = newer.model_copy(update={"settings": mine.settings | {"transformers": "9.9.9"}})
    with pytest.raises(ServerMismatchError, match=r"transformers 9\.9\.9"):
        check(mine, theirs)
