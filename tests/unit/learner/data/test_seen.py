"""Tests of what the model sees of a photograph, from its processor's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from learner.__main__ import main
from learner.config.sections.model import ModelConfig
from learner.data.prompt import PromptEncoder
from learner.data.survey import pixel_limits, seen_by_model
from learner.data.units import PixelLimits
from learner.doctor.check import check_machine
from shared.config.parse import dump_yaml
from tests.unit.learner.config.examples import ROLLOUT, changed, minimal


@pytest.mark.parametrize(
    "limits", [{}, {"max_pixels": 20_000}, {"min_pixels": 30_000}, {"min_pixels": 9_000, "max_pixels": 40_000}]
)
def test_it_is_what_the_processor_makes(tiny_vlm: Path, limits: dict[str, int]) -> None:
    found = pixel_limits(ModelConfig(path=str(tiny_vlm), **limits))
    assert found is not None
    processor: Any = PromptEncoder.load(str(tiny_vlm), **limits).processor
    patch = processor.image_processor.patch_size
    for size in ((2000, 1333), (100, 90), (31, 400), (7, 9), (640, 480), (333, 50)):
        grid = processor.image_processor([Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0]
        seen = seen_by_model(size, found)
        assert seen.size == (int(grid[2]) * patch, int(grid[1]) * patch)
        assert seen.num_tokens == int(grid.prod()) // processor.image_processor.merge_size**2


@given(
    size=st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    most=st.integers(1024, 1 << 22),
    factor=st.sampled_from([16, 28, 32]),
)
def test_a_share_is_a_share(size: tuple[int, int], most: int, factor: int) -> None:
    seen = seen_by_model(size, PixelLimits(most=most, factor=factor))
    assert 0 < seen.share <= 1
    assert seen.num_tokens * factor**2 == seen.size[0] * seen.size[1]


@pytest.mark.parametrize("form", ["joined", "alone", "old"])
def test_every_form_of_a_checkpoints_limits_is_read(tmp_path: Path, form: str) -> None:
    own: dict[str, Any] = {"patch_size": 14, "merge_size": 2}
    own |= {"min_pixels": 3136, "max_pixels": 100_000} if form == "old" else {}
    own |= {} if form == "old" else {"size": {"shortest_edge": 3136, "longest_edge": 100_000}}
    name = "processor_config.json" if form == "joined" else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": own} if form == "joined" else own))
    assert pixel_limits(ModelConfig(path=str(tmp_path))) == PixelLimits(least=3136, most=100_000, factor=28)
    assert pixel_limits(ModelConfig(path=str(tmp_path), max_pixels=2_000)) == PixelLimits(
        least=2_000, most=2_000, factor=28
    )
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    found = pixel_limits(ModelConfig(path=str(adapter)))
    assert found is not None
    assert found.most == 100_000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"size": 3}', "[" * 100_000, '{"size": {"shortest_edge": "x"}}'])
def test_a_damaged_file_of_a_checkpoint_is_no_limit(tmp_path: Path, text: str) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(text)
    assert pixel_limits(ModelConfig(path=str(tmp_path))) is None


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return annotations of one photograph of 2000 x 1333 pixels."""
    Image.new("RGB", (2000, 1333)).save(tmp_path / "large.png")
    row = {"id": "a", "images": ["large.png"], "width": 2000, "height": 1333}
    row |= {"messages": [{"role": "user", "content": "<image>Find every cat."}]}
    row |= {"objects": [{"desc": "cat", "bbox_2d": [100, 100, 900, 900]}]}
    path = tmp_path / "large.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def test_check_says_it_without_max_pixels(
    tiny_vlm: Path, large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1% of a photograph, in silence."""
    values: dict[str, Any] = {"model.path": str(tiny_vlm), "data.train": str(large)}
    (tmp_path / "run.yaml").write_text(dump_yaml(changed(minimal(), values)))
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    told = capsys.readouterr().out
    limits = pixel_limits(ModelConfig(path=str(tiny_vlm)))
    assert limits is not None
    seen = seen_by_model((2000, 1333), limits)
    assert seen.share < 0.5
    assert f"as {seen.size[0]} x {seen.size[1]}: {seen.share:.0%} of it" in told
    assert "checkpoint's own limit" in told
    check_machine(str(tmp_path / "run.yaml"), world_size=1, environment={})
    assert "checkpoint's own limit" in capsys.readouterr().out
    short: dict[str, Any] = {"global_max_length": 8, f"{ROLLOUT}.decoding": {"max_new_tokens": 4}}
    (tmp_path / "run.yaml").write_text(dump_yaml(changed(minimal(), values | short)))
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "tokens of the smallest photograph" in capsys.readouterr().err
