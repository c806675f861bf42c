"""The demo's scenes: real digits, boxes that are tight, splits that share nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.demo import scenes
from deploy.demo.scenes import DEMO, DIGIT_WORDS, INK, SPLITS, STYLES, StyleName, draw_scene, iou, load_bank
from tests.examples import examples


def test_splits_are_disjoint_complete_and_stratified() -> None:
    banks = [load_bank(split) for split in SPLITS]
    indices = np.concatenate([bank.indices for bank in banks])
    assert sorted(indices.tolist()) == list(range(1797))
    counts = np.stack([np.bincount(bank.labels, minlength=10) for bank in banks])  # [split, class]
    assert np.abs(counts / counts.sum(axis=0) - np.array([[0.7], [0.1], [0.2]])).max() < 0.01


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(STYLES)))
@settings(max_examples=examples(60), deadline=None)
def test_boxes_lie_on_the_canvas_and_overlap_as_the_style_says(seed: int, name: StyleName) -> None:
    style = STYLES[name]
    scene = draw_scene(np.random.default_rng(seed), load_bank("train"), style)
    assert scene.pixels.shape == (style.canvas, style.canvas, 3)
    assert scene.pixels.dtype == np.uint8
    assert 1 <= len(scene.objects) <= style.max_digits
    for i, item in enumerate(scene.objects):
        x1, y1, x2, y2 = item.box
        assert 0 <= x1 < x2 <= style.canvas
        assert 0 <= y1 < y2 <= style.canvas
        assert item.desc in DIGIT_WORDS
        assert all(iou(item.box, other.box) <= style.max_iou for other in scene.objects[:i])


def test_hard_scenes_are_crowded_and_their_digits_overlap() -> None:
    drawn = [draw_scene(np.random.default_rng(i), load_bank("train"), STYLES["hard"]) for i in range(60)]
    counts = [len(scene.objects) for scene in drawn]
    assert max(counts) >= 26
    assert 12 <= np.mean(counts) <= 19
    pairs = [iou(a.box, b.box) for scene in drawn for a in scene.objects for b in scene.objects if a is not b]
    assert np.mean(np.array(pairs) > DEMO.max_iou) > 0.01


def test_distractors_are_no_glyph_of_the_bank() -> None:
    """Every quarter of a glyph moves, so what is painted differs from the digit that it was made of."""
    for scramble in scenes._SCRAMBLES:
        assert sorted(scramble) == [0, 1, 2, 3]
        assert all(place != quarter for place, quarter in enumerate(scramble))
    bank, style = load_bank("train"), STYLES["hard"]
    canvas = np.full((style.canvas, style.canvas, 3), 128, dtype=np.float32)
    scenes._distract(np.random.default_rng(5), canvas, bank, style)
    assert (canvas != 128).any()


@given(which=st.integers(0, 1000), height=st.floats(20, 48), stretch=st.floats(0.85, 1.2))
@settings(max_examples=examples(60), deadline=None)
def test_stamps_are_tight_around_the_ink(which: int, height: float, stretch: float) -> None:
    stamp = scenes._stamp(load_bank("train").opacity[which], height=height, stretch=stretch)
    for border in (stamp[0], stamp[-1], stamp[:, 0], stamp[:, -1]):
        assert border.max() >= INK
    assert abs(stamp.shape[0] - height) <= 0.15 * height + 2


def test_a_digit_changes_the_canvas_inside_its_box_only() -> None:
    rng = np.random.default_rng(3)
    canvas = np.full((DEMO.canvas, DEMO.canvas, 3), 128, dtype=np.float32)
    stamp = scenes._stamp(load_bank("train").opacity[0], height=30.0, stretch=1.0)
    box = (10, 20, 10 + stamp.shape[1], 20 + stamp.shape[0])
    scenes._paint(rng, canvas, stamp, box)
    changed = np.argwhere((canvas != 128).any(axis=2))
    assert changed.min(axis=0).tolist() >= [20, 10]
    assert (changed.max(axis=0) < [box[3], box[2]]).all()
    assert np.abs(canvas - 128).max() > scenes.MIN_CONTRAST / 2


def test_the_same_generator_state_gives_the_same_scene() -> None:
    first, second = (draw_scene(np.random.default_rng([7, 0, 3]), load_bank("val")) for _ in range(2))
    assert (first.pixels == second.pixels).all()
    assert first.objects == second.objects


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ((0, 0, 4, 4), (0, 0, 4, 4), 1.0),
        ((0, 0, 4, 4), (4, 0, 8, 4), 0.0),
        ((0, 0, 4, 4), (2, 0, 6, 4), 8 / 24),
    ],
)
def test_iou(a: scenes.Box, b: scenes.Box, wanted: float) -> None:
    assert iou(a, b) == pytest.approx(wanted)
