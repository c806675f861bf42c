"""`data.augment`: boxes and polygons follow the pixels; a picture depends on seed, epoch and sample id alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from learner.config.load import load_config
from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.config.sections.augment import AugmentConfig, stays_upright
from learner.data.augment import Augmenter, augmented, moved, placed
from learner.data.batches import Batches
from learner.data.views import open_images, render, shown_images, with_small_images
from learner.records import DetectionObject, EncodedPrompt, GeometryKind, Sample, View
from learner.rollout.requests import infer_request, sent_pictures
from learner.tasks.detection.bins import bounding_box, to_bins, to_pixels
from shared.config.model import ConfigErrors
from shared.config.parse import write_yaml
from shared.errors import DataError
from shared.images import ImageRules, Images
from tests.unit.learner.data.fakes import make_run

WIDTH, HEIGHT = 180, 120
FINE = 8  # shapes are drawn so much larger first, because Pillow draws a polygon's border too
IMAGES = Images(ImageRules())
STILL = {"smallest_crop": 1.0, "colors": 0.0}
TRANSFORMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "horizontal flip": {"horizontal_flip": 1.0},
    "quarter turn": {"quarter_turn": 1.0},
    "crop": {"smallest_crop": 0.4},
    "all": {"horizontal_flip": 0.5, "quarter_turn": 0.75, "smallest_crop": 0.4},
}


def config_of(**keys: Any) -> AugmentConfig:
    return AugmentConfig(**{**STILL, **keys})


def draw_scene(
    folder: Path, kind: GeometryKind, corners: Sequence[int], name: str = "cell", sample_id: str = "a"
) -> Sample:
    """Return a white shape on black, labelled."""
    picture, path = Image.new("RGB", (WIDTH * FINE, HEIGHT * FINE)), folder / f"{sample_id}.png"
    outline = corners_of(corners) if kind == "bbox_2d" else corners
    ImageDraw.Draw(picture).polygon([FINE * value for value in outline], fill="white")
    picture.reduce(FINE).save(path)
    return Sample(
        sample_id=sample_id,
        messages=({"role": "user", "content": "<image>Detect."},),
        images=(str(path),),
        objects=(DetectionObject(name, kind, to_bins(corners, WIDTH, HEIGHT)),),
        width=WIDTH,
        height=HEIGHT,
    )


def corners_of(box: Sequence[int], cut: int = 0) -> list[int]:
    """Return the outline of a box, whose corners are cut off."""
    x1, y1, x2, y2 = box
    left, right, top, bottom = x1 + cut, x2 - cut, y1 + cut, y2 - cut
    return [left, y1, right, y1, x2, top, x2, bottom, right, y2, left, y2, x1, bottom, x1, top]


def found_box(picture: Image.Image) -> tuple[int, int, int, int] | None:
    """Return the box where the picture is bright."""
    rows, columns = np.nonzero(np.asarray(picture.convert("L")) > 127)
    return (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else None


def box_of(obj: DetectionObject, sample: Sample) -> tuple[float, ...]:
    return to_pixels(bounding_box(obj), sample.width, sample.height)


boxes = st.tuples(st.integers(0, 120), st.integers(0, 70), st.integers(20, 60), st.integers(20, 50)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[0] + drawn[2], drawn[1] + drawn[3])
)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", ["bbox_2d", "poly"])
@settings(max_examples=12, deadline=None)
@given(box=boxes, epoch=st.integers(0, 1000))
def test_labels_follow_their_pixels(
    name: str, kind: GeometryKind, box: Sequence[int], epoch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The box of what is bright, and that of the label or ignore region, differ by a pixel at most."""
    corners = box if kind == "bbox_2d" else corners_of(box, cut=6)
    sample = draw_scene(tmp_path_factory.getbasetemp(), kind, corners)
    seen = Augmenter([sample], config_of(**TRANSFORMS[name]), seed=3)(0, epoch)
    if seen.view is None:
        return  # no draw showed the object
    picture = render(seen.view, seen.images[0], IMAGES)
    assert picture.size == seen.view.size == (seen.width, seen.height)
    labelled = [box_of(obj, seen) for obj in (*seen.objects, *seen.ignored)]
    found = found_box(picture)
    if not labelled:  # a sliver can be seen, or nothing
        assert found is None or min(found[2] - found[0], found[3] - found[1]) <= 2
    else:
        assert found is not None
        blur = 0.5 if kind == "poly" else 0.0  # a slanted edge's tip is grey where it is cut
        assert np.allclose(labelled[0], found, atol=1.0 + blur)
    assert all(0 <= bin_ <= 999 for obj in (*seen.objects, *seen.ignored) for bin_ in obj.bins)
    assert list(seen.objects) == sorted(seen.objects, key=lambda obj: bounding_box(obj)[1::-1])


views = st.builds(
    lambda window, turn, horizontal, vertical: View((100, 80), window, (50, 40), turn, horizontal, vertical),
    st.sampled_from([(0, 0, 100, 80), (10, 20, 90, 60), (50, 0, 100, 40)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=50)
@given(view=views, bins=st.lists(st.integers(0, 999), min_size=6, max_size=12).filter(lambda one: len(one) % 2 == 0))
def test_a_polygons_box_is_the_box_transformed(view: View, bins: list[int]) -> None:
    polygon = DetectionObject("cell", "poly", tuple(bins))
    box = DetectionObject("cell", "bbox_2d", bounding_box(polygon))
    outline = moved(polygon, view)
    spanned = (min(outline[0::2]), min(outline[1::2]), max(outline[0::2]), max(outline[1::2]))
    assert np.allclose(spanned, moved(box, view))


@pytest.mark.parametrize(
    ("box", "label", "region"),
    [
        ((60, 30, 80, 50), (60, 30, 80, 50), None),  # inside
        ((30, 30, 70, 50), (50, 30, 70, 50), None),  # half of it
        ((20, 30, 60, 50), None, (50, 30, 60, 50)),  # a quarter
        ((60, 30, 62, 50), None, (60, 30, 62, 50)),  # too narrow
        ((10, 30, 50, 50), None, None),  # outside
    ],
)
def test_what_is_cut_off_becomes_an_ignore_region(
    box: tuple[int, ...], label: tuple[int, ...] | None, region: tuple[int, ...] | None
) -> None:
    """The crop is the right half of a picture of 100 pixels a side."""
    view = View((100, 100), (50, 0, 100, 100), (50, 100))
    obj = DetectionObject("cell", "bbox_2d", to_bins(box, 100, 100))
    as_label, as_region = placed(obj, view)
    for found, wanted in ((as_label, label), (as_region, region)):
        assert len(found) == (wanted is not None)
        if wanted is not None:
            shifted = (wanted[0] - 50, wanted[1], wanted[2] - 50, wanted[3])
            assert np.allclose(to_pixels(found[0].bins, 50, 100), shifted, atol=0.2)


def test_ignore_regions_follow_too(tmp_path: Path) -> None:
    sample = draw_scene(tmp_path, "bbox_2d", (20, 30, 60, 70))
    sample = replace(sample, objects=(), ignored=sample.objects)
    seen = Augmenter([sample], config_of(horizontal_flip=1.0), seed=1)(0, 0)
    (region,) = seen.ignored
    assert np.allclose(box_of(region, seen), (120, 30, 160, 70), atol=0.2)


# ---- the same picture everywhere ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PixelEncoder:
    """Token ids: a checksum of what the model sees."""

    def encode(self, sample: Sample) -> EncodedPrompt:
        checksums = [zlib.crc32(picture.tobytes()) for picture in open_images(sample, IMAGES)]
        return EncodedPrompt(token_ids=tuple(checksums), vision=None)


@pytest.fixture
def scenes(tmp_path: Path) -> list[Sample]:
    return [draw_scene(tmp_path, "bbox_2d", (10 + i, 20, 60 + i, 70), sample_id=f"s{i}") for i in range(5)]


AUGMENT = {"horizontal_flip": 0.5}


def batches_of(scenes: list[Sample], rank: int = 0, ranks: int = 1, **data: Any) -> Batches:
    config, plan = make_run(samples_per_rank=2 // ranks, ranks=ranks, augment=AUGMENT, **data)
    seen = augmented(config, plan, scenes)
    return Batches(scenes, config=config, plan=plan, rank=rank, encoder=PixelEncoder(), augmented=seen)


def pixels_of(batches: Iterator[Any], number: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return checksums by epoch and sample."""
    taken = [next(batches) for _ in range(number)]
    return {
        (batch.epoch, sample.sample_id): prompt.token_ids
        for batch in taken
        for sample, prompt in zip(batch.samples, batch.prompts, strict=True)
    }


def test_pixels_are_the_same_on_any_rank_in_any_worker_and_after_a_resume(scenes: list[Sample]) -> None:
    with closing(batches_of(scenes)) as whole:
        wanted = pixels_of(whole, 6)  # two epochs of three micro-batches
    assert len(set(wanted.values())) == 10, "each epoch has other pictures"
    split: dict[Any, Any] = {}
    for rank in range(2):
        with closing(batches_of(scenes, rank, 2)) as own:
            split |= pixels_of(own, 6)
    assert split == wanted
    with closing(batches_of(scenes)) as first, closing(batches_of(scenes, num_workers=1)) as second:
        before = pixels_of(first, 2)
        second.restore(first.state())
        assert before | pixels_of(second, 4) == wanted


def test_what_is_announced_is_what_is_handed_out(scenes: list[Sample]) -> None:
    """Rollouts are asked for with `upcoming`, and learned with `take`: of the same picture."""
    with closing(batches_of(scenes)) as batches:
        announced = [share.samples for share in batches.upcoming(3)]
        assert [next(batches).samples for _ in range(3)] == announced


def test_completed_labels_reach_a_picture_that_was_being_encoded(scenes: list[Sample]) -> None:
    """`labels.complete` changes the list of samples in place, behind the prefetch."""
    with closing(batches_of(scenes, shuffle=False)) as batches:
        (announced,) = batches.upcoming(1)
        scenes[0] = replace(scenes[0], objects=())
        batch = next(batches)
        assert announced.samples[0].objects != ()
        assert batch.samples[0].objects == ()
        assert batch.prompts[0].token_ids == PixelEncoder().encode(batch.samples[0]).token_ids


def test_what_a_resume_owes_has_the_epoch_in_which_it_was_handed_out(scenes: list[Sample]) -> None:
    with closing(batches_of(scenes)) as batches:
        taken = [next(batches) for _ in range(4)]  # an epoch, and the first micro-batch of the second
        again, last = [one.sample_id for one in taken[3].samples], taken[2].samples[0]
        assert batches.last_epochs(again) == [1, 1]
        assert batches.seen_in(1, again[0]) == taken[3].samples[0]
        if last.sample_id not in again:
            assert batches.last_epochs([last.sample_id]) == [0]
        assert batches.seen_in(0, last.sample_id) == last


def test_equal_places_stay_one_sample(scenes: list[Sample]) -> None:
    """`grpo`: a group's picture is made once."""
    config, plan = make_run(samples_per_rank=4, augment={**AUGMENT, "rollouts": True})
    config = config.model_copy(
        update={
            "custom": config.custom.model_copy(update={"trainer_variant": "grpo"}),
            "grpo": config.grpo.model_copy(update={"num_generations": 4}),
        }
    )
    seen = augmented(config, plan, scenes)
    with closing(Batches(scenes, config=config, plan=plan, rank=0, encoder=PixelEncoder(), augmented=seen)) as batches:
        assert len({id(sample) for sample in next(batches).samples}) == 1


# ---- whom it applies to ---------------------------------------------------------------------------------------------

STAGE2 = {"schedule": {"b_ratio": 0.5}}


def run_config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", "augment": sections.pop("augment", {})},
            "training": {"output_dir": "out", "max_steps": 10, "effective_batch_size": 2},
            "custom": {"trainer_variant": sections.pop("variant", "stage2_ab_training")},
            **sections,
        }
    )


@pytest.mark.parametrize("rollouts", [False, True])
def test_rollouts_see_augmented_pictures_only_where_asked(scenes: list[Sample], rollouts: bool) -> None:
    config = run_config(augment={"rollouts": rollouts}, stage2_ab=STAGE2)
    seen = augmented(config, resolve(config, 1), scenes)
    assert seen is not None
    changed = [seen(0, 0, position).view is not None for position in range(4)]  # channels A, B, A, B
    assert changed == [True, rollouts, True, rollouts]
    ahead = augmented(config, resolve(config, 1), scenes, rollouts=True)
    assert (ahead is not None) == rollouts


def test_without_the_section_samples_are_seen_as_they_are(scenes: list[Sample]) -> None:
    config, plan = make_run()
    assert augmented(config, plan, scenes) is None


def test_servers_get_the_pixels_that_are_learned(scenes: list[Sample]) -> None:
    augmenter = Augmenter(scenes, AugmentConfig(), seed=1)
    seen = [augmenter(i, 0) for i in (0, 0, 1)]
    samples = [seen[0], seen[0], seen[2], scenes[3]]
    pictures = sent_pictures(samples, IMAGES)
    assert len(pictures) == 2, "each is made once"
    requests = [infer_request(sample, pictures.get(id(sample))) for sample in samples]
    for request, sample in zip(requests, samples, strict=True):
        (wanted,) = open_images(sample, IMAGES)
        assert IMAGES.load(str(request.images[0])).tobytes() == wanted.tobytes()
    assert requests[3].images == list(scenes[3].images)
    assert len({request.uuid for request in requests}) == 4


@pytest.mark.parametrize(("side", "wanted"), [(64, (64, 64)), (150, (150, HEIGHT)), (999, (WIDTH, HEIGHT))])
def test_small_images_travel_in_the_sample(scenes: list[Sample], side: int, wanted: tuple[int, int]) -> None:
    turned = Augmenter(scenes, config_of(horizontal_flip=1.0), seed=1)(0, 0)
    for sample in (scenes[0], turned):
        small = with_small_images(sample, IMAGES, side)
        (picture,) = open_images(small, IMAGES)
        assert picture.size == (small.width, small.height) == wanted
        assert infer_request(small).images == list(small.images)
        (whole,) = open_images(sample, IMAGES)
        assert picture.tobytes() == whole.resize(wanted).tobytes()
    text = replace(scenes[0], images=(), width=0, height=0)
    assert with_small_images(text, IMAGES, side) == text


def test_logs_show_the_picture_that_the_model_saw(scenes: list[Sample]) -> None:
    seen = Augmenter(scenes, config_of(horizontal_flip=1.0), seed=1)(0, 0)
    (shown,) = shown_images(seen)
    (wanted,) = open_images(seen, IMAGES)
    difference = np.asarray(IMAGES.load(shown)).astype(int) - np.asarray(wanted)
    assert np.abs(difference).mean() < 5
    Path(scenes[0].images[0]).unlink()
    assert shown_images(seen) == []


# ---- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "oriented"),
    [
        ("7", True),
        ("42", True),
        ("A", True),
        ("left shoe", True),
        ("Arrow", True),
        ("cell", False),
        ("leftover", False),
        ("WBC", False),
        ("", False),
    ],
)
def test_a_class_that_a_mirror_changes_is_known_by_its_name(name: str, oriented: bool) -> None:
    assert stays_upright(name) == oriented


@pytest.mark.parametrize(("name", "turned"), [("7", False), ("cell", True)])
def test_photographs_with_such_classes_are_not_turned(tmp_path: Path, name: str, turned: bool) -> None:
    """All eight ways to lie occur, or one."""
    sample = draw_scene(tmp_path, "bbox_2d", (20, 30, 60, 70), name)
    augmenter = Augmenter([sample], config_of(horizontal_flip=0.5, quarter_turn=0.75), seed=1)
    views = [augmenter(0, epoch).view for epoch in range(100)]
    ways = {(view.quarter_turn, view.flip_horizontal, view.flip_vertical) for view in views if view is not None}
    assert len(ways) == (8 if turned else 1)


def test_nothing_is_turned_unless_asked(scenes: list[Sample]) -> None:
    augmenter = Augmenter(scenes, AugmentConfig(), seed=1)
    views = [augmenter(i, epoch).view for i in range(5) for epoch in range(4)]
    assert not any(view.quarter_turn or view.flip_horizontal or view.flip_vertical for view in views if view)


def test_a_picture_that_fits_no_row_is_not_used(scenes: list[Sample]) -> None:
    """The photograph itself does: the reader has checked it."""
    augmenter = Augmenter(
        scenes, config_of(), seed=1, too_long=lambda one: "9 tokens" if one.view is not None else None
    )
    assert augmenter(0, 0) is scenes[0]


def test_samples_that_cannot_be_augmented_are_refused(scenes: list[Sample]) -> None:
    with pytest.raises(DataError) as caught:
        Augmenter([replace(scenes[0], images=scenes[0].images * 2)], config_of(), seed=1)
    assert "s0" in str(caught.value)


def test_a_photograph_of_another_size_than_annotated_is_refused(scenes: list[Sample]) -> None:
    seen = Augmenter([replace(scenes[0], width=WIDTH * 2)], config_of(), seed=1)(0, 0)
    with pytest.raises(DataError) as caught:
        sent_pictures([seen], IMAGES)
    assert f"{WIDTH} x {HEIGHT}" in caught.value.found


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"custom": {"trainer_variant": "rollout_matching_sft"}}, "data.augment.rollouts"),
        ({"task": {"type": "key_value"}}, "data.augment"),
    ],
)
def test_what_would_have_no_effect_or_no_meaning_is_refused(changes: dict[str, Any], path: str, tmp_path: Path) -> None:
    run = {
        "model": {"path": "model"},
        "data": {"train": "t.jsonl", "augment": {}},
        "training": {"output_dir": "out", "max_steps": 1, "gradient_accumulation_steps": 1},
        "custom": {"trainer_variant": "sft"},
        **changes,
    }
    write_yaml(tmp_path / "run.yaml", run, "test")
    with pytest.raises(ConfigErrors) as caught:
        load_config(str(tmp_path / "run.yaml"), world_size=1)
    assert path in [mistake.path for mistake in caught.value.mistakes]
