"""What is known about labels with gaps: estimates from the photographs and from votes, signs of gaps (R49, D22)."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path

import numpy as np
import pytest

from bench.experiment.estimated import estimated
from bench.study import Regime, Study, read_rows, write_data
from learner.records import DetectionObject, Sample, Votes
from learner.tasks.detection.appearance import MIN_AUC, Looks, crops_of
from learner.tasks.detection.bins import to_bins
from learner.tasks.detection.completion import LabelCandidate, candidates, completed, estimate, tally
from learner.tasks.detection.gaps import PROBABLE, estimate_gaps, not_random
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign
from shared.images import ImageRules, Images
from tests.examples import examples
from tests.tiers import slow
from tests.unit.learner.tasks.detection.gap_worlds import ANSWERS, KINDS, Box, World, world

KEPT = Path(__file__).parents[5] / "bench/results/estimated-cpu-2026-11-28/answers/cells.jsonl"
REAL = Path(os.environ.get("REAL_GAPS") or Path(__file__).parents[6] / "shared")
pytestmark = pytest.mark.usefixtures("one_thread")


def known_of(made: World) -> tuple:
    crops = [crops_of(sample, made.free(i), made.open_image) for i, sample in enumerate(made.samples)]
    return estimate_gaps(made.samples, made.found, crops, ANSWERS)


def line_of(made: World, found: list[list[LabelCandidate]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return probabilities, votes, and what is right, of all free candidates."""
    free = [one for own in found for one in own if one.relation == "free"]
    right = np.array([one for own in made.right for one in own])
    return np.array([one.probability for one in free]), np.array([one.votes for one in free]), right


@pytest.mark.parametrize("kind", ["border", slow("20% at random"), *map(slow, sorted(KINDS.keys() - {"border"}))])
def test_photographs_say_what_is_right_in_every_kind_of_gap(kind: str) -> None:
    made = world(1, KINDS[kind], photographs=40 if kind == "border" else 60)  # with 40 too few labels are left of some
    known, found = known_of(made)
    assert (known.source, (known.auc or 0) > MIN_AUC) == ("appearance", True)
    probable, votes, right = line_of(made, found)
    for least in (1, 2, 3, 4):
        at = votes >= least
        assert probable[at].mean() == pytest.approx(right[at].mean(), abs=0.10)
        assert known.free_right(least) == pytest.approx(probable[at].mean(), abs=1e-3)
    gained = 2 * right[probable >= PROBABLE].sum() - (probable >= PROBABLE).sum()
    assert gained >= max(2 * right[votes >= v].sum() - (votes >= v).sum() for v in range(1, ANSWERS + 1)) > 0
    truly = right.sum() / (right.sum() + sum(len(sample.objects) for sample in made.samples))
    assert known.missing == pytest.approx(truly, abs=0.10)
    assert bool(known.not_random) == ("random" not in kind)


def test_names_at_labels_say_how_often_names_are_right() -> None:
    """Classes that look alike, each with few labels: pixels say that there is an object, not which one."""
    made = world(1, KINDS["60% at random"], misnamed=0.3)
    known, found = known_of(made)
    assert known.source == "appearance"
    probable, votes, right = line_of(made, found)
    for least in (1, 2, 3, 4):
        assert probable[votes >= least].mean() == pytest.approx(right[votes >= least].mean(), abs=0.10)
    gained = 2 * right[probable >= PROBABLE].sum() - (probable >= PROBABLE).sum()
    assert gained > 1.1 * max(2 * right[votes >= v].sum() - (votes >= v).sum() for v in range(1, ANSWERS + 1))


def test_complete_labels_stay_as_they_are() -> None:
    made = world(2, lambda *_: True, photographs=30)
    known, found = known_of(made)
    assert known.min_votes is None
    assert known.may_be_complete
    assert known.why
    assert not any(made.right[i][j] for i in range(30) for j in range(len(made.right[i])))
    assert sum((one.probability or 0) >= PROBABLE for own in found for one in own) < 10


def test_finds_are_added_one_by_one() -> None:
    often, once = (replace(free(box), probability=p) for box, p in (((0, 0, 90, 90), 0.4), ((300, 300, 400, 400), 0.6)))
    sample = Sample(sample_id="s", messages=(), images=(), objects=(), width=999, height=999)
    by_votes = completed(sample, [often, once], 1)
    by_probability = completed(sample, [often, once], 1, probable=PROBABLE)
    assert len(by_votes.objects) == 2
    assert [obj.bins for obj in by_probability.objects] == [once.object.bins]


def free(box: tuple[int, int, int, int]) -> LabelCandidate:
    obj = DetectionObject("a", "bbox_2d", box, Votes(2, 4))
    return LabelCandidate(object=obj, relation="free", names={"a": 2}, agreement=0.5)


def test_what_overlaps_a_surer_find_is_not_counted() -> None:
    """It would not be added either."""
    sure = DetectionObject("a", "bbox_2d", (100, 100, 200, 200))
    other = DetectionObject("b", "bbox_2d", (140, 100, 240, 200))
    sample = Sample(sample_id="s", messages=(), images=(), objects=(), width=999, height=999)
    found = candidates(sample, [[sure, other], [sure]])
    assert [one.relation for one in found] == ["free", "repeats"]
    assert tally(found, 2)[:, 2].tolist() == [0, 0, 1]
    named = candidates(sample, [[sure, other], [sure]], can_be_label=lambda obj: obj.desc == "b")
    assert [(one.object.desc, one.relation) for one in named] == [("b", "free")]


@pytest.mark.parametrize(
    ("kind", "invented"), [slow("20% at random", 1.0), slow("60% at random", 1.0), ("60% at random", 4.0)]
)
def test_votes_say_what_is_right_where_labels_are_missing_at_random(kind: str, invented: float) -> None:
    """Over 20 draws."""
    errors = []
    for seed in range(20):
        made = world(seed, KINDS[kind], invented=invented, labelled_more=0, draw=False)
        known = estimate(
            tally(list(chain.from_iterable(made.found)), ANSWERS), sum(len(sample.objects) for sample in made.samples)
        )
        _, votes, right = line_of(made, made.found)
        errors.append([known.free_right(v) - right[votes >= v].mean() for v in range(2, 7)])
    assert np.abs(np.mean(errors, axis=0)).max() <= 0.05


def test_random_gaps_raise_no_alarm() -> None:
    """Draws with 10 to 70% missing."""
    told = []
    for seed in range(0, 100, 100 // examples(100)):
        share = 0.1 + 0.6 * seed / 100

        def keep(box: Box, place: int, rng: np.random.Generator, share: float = share) -> bool:
            return bool(rng.random() >= share)

        made = world(seed, keep, labelled_more=0, photographs=30, draw=False)
        told.append(not_random(made.found, ANSWERS))
    assert [text for text in told if text] == []


@pytest.mark.parametrize(
    ("kind", "feature"),
    [("border", "border"), ("small", "smaller"), ("a class", "disc"), ("after four", "down"), ("right third", "right")],
)
def test_a_sign_of_gaps_names_its_feature(kind: str, feature: str) -> None:
    assert feature in not_random(world(3, KINDS[kind], draw=False).found, ANSWERS)


def test_photographs_that_nobody_finished_are_a_sign() -> None:
    """Half of them lack most of their labels, of no kind."""
    whole, thin = (world(4, KINDS[kind], draw=False, photographs=30) for kind in ("20% at random", "60% at random"))
    thin_found = [own if i % 2 else other for i, (own, other) in enumerate(zip(thin.found, whole.found, strict=True))]
    assert not_random(whole.found, ANSWERS) == ""
    assert "photographs" in not_random(thin_found, ANSWERS)


def test_few_labels_leave_the_estimate_to_votes_and_a_sign_takes_it_away() -> None:
    at_random, border = (world(5, KINDS[kind], photographs=16, draw=False) for kind in ("60% at random", "border"))
    known, _ = known_of(at_random)
    assert (known.source, known.not_random) == ("votes", "")
    assert known.missing is not None
    assert "at random" in known.in_words(0.5)
    known, found = known_of(border)
    assert (known.source, known.missing, known.min_votes) == ("votes", None, None)
    assert "border" in known.why
    assert known.in_words(0.5) == ""
    assert max(one.probability or 0 for own in found for one in own) == 0


def test_objects_that_look_like_their_surroundings_give_no_estimate() -> None:
    made = world(6, KINDS["20% at random"], photographs=40, draw=False)
    crops = [crops_of(sample, made.free(i), made.open_image) for i, sample in enumerate(made.samples)]
    looks = Looks(crops).judge([own.finds for own in crops], [[1] * len(own.finds) for own in crops])
    assert looks.probabilities == ()
    assert looks.auc is not None
    assert looks.auc < MIN_AUC
    assert looks.why


def test_a_box_keeps_its_edges_at_the_border() -> None:
    """An object that is cut by the border looks different there, and so do its examples."""
    made = world(7, lambda *_: True, photographs=5)
    for sample in made.samples:
        crops = crops_of(sample, [], made.open_image)
        number = sum(min(obj.bins) == 0 or max(obj.bins) == 999 for obj in sample.objects)
        assert sum(crop.at_border for crop in crops.on) >= number


# ---- blood cells, whose labels were redone ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_photographs_of_cells_say_what_is_right(split: str) -> None:
    """Published labels that lack half of the cells, and finds of eight answers: right by redone labels."""
    if not (REAL / "gaps" / f"{split}_finds.json").is_file():
        pytest.skip(f"{REAL}/gaps and {REAL}/data (BCCD with its labels redone) are not on this machine; see REAL_GAPS")
    samples, finds, right = cells(split)
    load = Images(ImageRules()).load
    crops = [crops_of(sample, own, load) for sample, own in zip(samples, finds, strict=True)]
    looks = Looks(crops).judge(
        [own.finds for own in crops], [[obj.votes.found for obj in own if obj.votes] for own in finds]
    )
    probable = np.array([p for own in looks.probabilities for p in own])
    votes = np.array([obj.votes.found for own in finds for obj in own if obj.votes])
    for least in range(2, 7):
        at = votes >= least
        assert probable[at].mean() == pytest.approx(right[at].mean(), abs=0.08)
    gained = [2 * right[votes >= v].sum() - (votes >= v).sum() for v in range(1, 9)]
    assert 2 * right[probable >= PROBABLE].sum() - (probable >= PROBABLE).sum() >= 1.1 * max(gained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [("real", 0.05), *((f"cells-{kind}", 0.135) for kind in ("missing20", "missing", "right", "thinned"))],
)
def test_eight_kept_answers_say_what_is_right_in_gaps_of_cells(name: str, most: float, tmp_path: Path) -> None:
    """Answers to photographs with published labels, or with redone ones of which some were taken."""
    if not (REAL / "data").is_dir():
        pytest.skip(f"{REAL}/data (BCCD with its labels redone) is not on this machine; see REAL_GAPS")
    sizes = dict.fromkeys(("photographs", "steps", "batch_size", "max_new_tokens"))
    study = Study(out=tmp_path, work=tmp_path, deadline=inf, data=REAL / "data", on_gpu=False, **sizes)
    write_data(study, regime := Regime.read(name))
    rows = [read_rows(study.rows(regime, "score", labels)) for labels in ("gaps", "all")]
    drawn = {one["id"]: one for one in read_rows(KEPT)}
    found = estimated(*rows, drawn)
    assert np.array(found["estimated"]) == pytest.approx(np.array(found["right"]), abs=most)


def cells(split: str) -> tuple[list[Sample], list[list[DetectionObject]], np.ndarray]:
    """Return samples with published labels, finds by sample, and which of these are right."""
    published, finds = read(REAL / "gaps" / f"{split}_finds.json")
    redone, _ = read(REAL / "data" / "bccd_redone" / f"{split}_redone.json")
    samples, right = [], []
    for name, labels in published.items():
        path = str(REAL / "data" / "bccd" / "images" / name)
        samples.append(
            Sample(sample_id=name, messages=(), images=(path,), objects=tuple(labels), width=640, height=480)
        )
        taken = {j for _, j in pairs(labels, redone[name])}
        left = [obj for j, obj in enumerate(redone[name]) if j not in taken]
        hits = {i for i, _ in pairs(finds[name], left)}
        right += [i in hits for i in range(len(finds[name]))]
    return samples, [finds[name] for name in published], np.array(right)


def pairs(a: list[DetectionObject], b: list[DetectionObject]) -> list[tuple[int, int]]:
    iou = iou_matrix(a, b)
    same = np.array([[x.desc == y.desc for y in b] for x in a], dtype=bool).reshape(iou.shape)
    return [(i, j) for i, j, _ in assign(iou, (iou >= 0.5) & same)]


def read(path: Path) -> tuple[dict[str, list[DetectionObject]], dict[str, list[DetectionObject]]]:
    """Return labels and finds of a COCO file, by file name."""
    content = json.loads(path.read_text())
    names = {one["id"]: one["file_name"] for one in content["images"]}
    classes = {one["id"]: one["name"] for one in content["categories"]}
    labels: dict[str, list[DetectionObject]] = {name: [] for name in names.values()}
    finds: dict[str, list[DetectionObject]] = defaultdict(list)
    for one in content["annotations"]:
        x, y, width, height = one["bbox"]
        box = to_bins((x, y, x + width, y + height), 640, 480)
        votes = Votes(one["votes"], one["answers"]) if "votes" in one else None
        kind = finds if votes else labels
        kind[names[one["image_id"]]].append(DetectionObject(classes[one["category_id"]], "bbox_2d", box, votes))
    return labels, finds
