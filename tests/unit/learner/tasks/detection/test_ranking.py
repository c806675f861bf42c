"""Models compared by labels with gaps (R49, D22)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import kendalltau

from learner.records import DetectionObject
from learner.tasks.detection.audit import AuditedFind
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign
from learner.tasks.detection.ranking import GapJudge, GapScore, has_gaps, is_decided, rank
from shared.images import ImageRules, Images
from tests.unit.learner.tasks.detection.gap_worlds import KINDS, World, world
from tests.unit.learner.tasks.detection.test_gaps import REAL, cells, read

pytestmark = pytest.mark.usefixtures("one_thread")

# shares of labelled objects, of others, and of wrong boxes that a model's answer has
MODELS = [(0.9, 0.1, 0.1), (0.8, 0.3, 0.2), (0.8, 0.5, 0.15), (0.75, 0.7, 0.2), (0.7, 0.2, 0.05), (0.85, 0.8, 0.3)]


def answers_of(made: World, model: tuple[float, float, float], seed: int) -> list[list[DetectionObject]]:
    rng = np.random.default_rng(seed)
    answers = []
    for i, sample in enumerate(made.samples):
        free = [
            obj
            for obj, right in zip(made.free(i), made.right[i], strict=True)
            if rng.random() < model[1 if right else 2]
        ]
        labelled = [obj for obj in sample.objects if rng.random() < model[0]]
        answers.append([obj._replace(votes=None) for obj in (*labelled, *free)])
    return answers


def f1(answers: Sequence[Sequence[DetectionObject]], truth: Sequence[Sequence[DetectionObject]]) -> float:
    hits = 0
    for own, objects in zip(answers, truth, strict=True):
        iou = iou_matrix(own, objects)
        same = np.array([[a.desc == b.desc for b in objects] for a in own], dtype=bool).reshape(iou.shape)
        hits += len(assign(iou, (iou >= 0.5) & same))
    return 2 * hits / max(1, sum(map(len, answers)) + sum(map(len, truth)))


def test_models_keep_their_true_order_where_labels_have_gaps() -> None:
    made = world(1, KINDS["border"], photographs=40)
    truth = [
        [*sample.objects, *(obj for obj, right in zip(made.free(i), made.right[i], strict=True) if right)]
        for i, sample in enumerate(made.samples)
    ]
    answers = [answers_of(made, model, seed) for seed, model in enumerate(MODELS[:4])]
    judge = GapJudge(made.samples, made.open_image)
    scores = [judge.score(own) for own in answers]
    assert judge.why == ""
    known = [one for one in scores if one is not None]
    objects = judge.objects(known, answers)
    ranked = rank([str(i) for i in range(4)], known, objects)
    true = [f1(own, truth) for own in answers]
    assert kendalltau([one.f1.estimate for one in ranked], true).statistic >= 0.8
    assert all(one.low < one.f1.low < one.f1.estimate < one.f1.high for one in ranked)
    assert all(one.low <= value <= one.high + 0.03 for one, value in zip(ranked, true, strict=True))
    assert has_gaps(known[3], judge.num_labels)


@pytest.mark.slow
def test_later_models_are_drawn_towards_the_first_also_after_a_resume() -> None:
    """A few hundred finds err by as much as models differ, if each model is judged by its own alone."""
    made = world(1, KINDS["border"], photographs=40)
    first, second = (answers_of(made, model, 0) for model in ((0.8, 0.8, 0.05), (0.8, 0.2, 0.3)))
    judge, alone, resumed = (GapJudge(made.samples, made.open_image) for _ in range(3))
    before = judge.score(first)
    resumed.shares = {
        (name, border): own
        for name, border, own in json.loads(json.dumps([[*key, own] for key, own in judge.shares.items()]))
    }
    after, own, again = (one.score(second) for one in (judge, alone, resumed))
    assert before is not None
    assert after is not None
    assert own is not None
    assert again is not None
    share = [float(one.unlabelled.sum() / one.free.sum()) for one in (own, after, before)]
    assert share[0] < share[1] < share[2]
    assert again.right.tolist() == after.right.tolist()


@pytest.mark.slow
def test_names_at_labels_say_how_often_names_without_a_label_are_right() -> None:
    """Classes that look alike, each with few labels: pixels say that there is an object, not which one."""
    made = world(1, KINDS["60% at random"], misnamed=0.3)
    judge = GapJudge(made.samples, made.open_image)
    score = judge.score([[one.object._replace(votes=None) for one in own] for own in made.found])
    assert score is not None, judge.why
    assert score.unlabelled.sum() == pytest.approx(sum(map(sum, made.right)), rel=0.1)


def test_complete_labels_have_no_gaps() -> None:
    made = world(2, lambda *_: True, photographs=30)
    judge = GapJudge(made.samples, made.open_image)
    score = judge.score(answers_of(made, (0.8, 0, 0.3), 0))
    assert score is not None
    assert not has_gaps(score, judge.num_labels)


def test_few_labels_rank_no_models() -> None:
    made = world(3, KINDS["border"], photographs=5)
    judge = GapJudge(made.samples, made.open_image)
    assert judge.score(answers_of(made, MODELS[0], 0)) is None
    assert "few" in judge.why


def score_of(right: Sequence[float], boxes: Sequence[float]) -> GapScore:
    values = np.array(right, dtype=float)
    return GapScore(right=values, unlabelled=values / 2, free=values, boxes=np.array(boxes, dtype=float))


def test_an_order_that_depends_on_the_number_of_objects_is_not_decided() -> None:
    """The careful one is better of few objects, the other of many."""
    careful, thorough = score_of([40, 40], [42, 42]), score_of([60, 60], [95, 95])
    assert careful.f1(120) > thorough.f1(120)
    assert careful.f1(400) < thorough.f1(400)
    assert not is_decided(careful, thorough, (120, 400))
    assert is_decided(careful, thorough, (300, 400))
    ranked = rank(["a", "b"], [careful, thorough], (120, 400))
    assert [one.undecided for one in ranked] == [(), ("a",)]
    assert ranked[1].precision == pytest.approx(60 / 95)


@pytest.mark.slow
def test_second_boxes_and_other_names_at_labels_are_wrong() -> None:
    made = world(4, KINDS["20% at random"], photographs=40)
    judge = GapJudge(made.samples, made.open_image)
    twice = [[*sample.objects, *sample.objects] for sample in made.samples]
    renamed = [[obj._replace(desc="other") for obj in sample.objects] for sample in made.samples]
    for boxes, right in ((twice, judge.num_labels), (renamed, 0)):
        score = judge.score(boxes)
        assert score is not None
        assert (score.right.sum(), score.boxes.sum()) == (right, sum(map(len, boxes)))


def test_verdicts_correct_the_scores() -> None:
    made = world(5, KINDS["border"], photographs=40)
    boxes = answers_of(made, (0.8, 0.8, 0.3), 0)
    nothing = [AuditedFind(i, 4, 8, 0.9, "nothing there") for i in range(60)]
    before, after = (GapJudge(made.samples, made.open_image, own).score(boxes) for own in ((), nothing))
    assert before is not None
    assert after is not None
    assert after.unlabelled.sum() < 0.8 * before.unlabelled.sum()


@pytest.mark.slow
def test_cells_rank_models_as_redone_labels_do() -> None:
    """Answers are made of published labels, and of finds that are right or wrong by the redone labels."""
    if not (REAL / "gaps" / "val_finds.json").is_file():
        pytest.skip(f"{REAL}/gaps and {REAL}/data (BCCD with its labels redone) are not on this machine; see REAL_GAPS")
    samples, finds, right = cells("val")
    redone, _ = read(REAL / "data" / "bccd_redone" / "val_redone.json")
    is_right = iter(right.tolist())
    known = [[(obj, next(is_right)) for obj in own] for own in finds]
    answers = []
    for seed, model in enumerate(MODELS):
        rng = np.random.default_rng(seed)
        answers.append(
            [
                [obj for obj in sample.objects if rng.random() < model[0]]
                + [obj._replace(votes=None) for obj, so in own if rng.random() < model[1 if so else 2]]
                for sample, own in zip(samples, known, strict=True)
            ]
        )
    judge = GapJudge(samples, Images(ImageRules()).load)
    scores = [one for one in map(judge.score, answers) if one is not None]
    objects = judge.objects(scores, answers)
    ranked = [one.f1.estimate for one in rank([str(i) for i in range(len(MODELS))], scores, objects)]
    true = [f1(own, [redone[sample.sample_id] for sample in samples]) for own in answers]
    assert kendalltau(ranked, true).statistic >= 0.8
    assert true[int(np.argmax(ranked))] >= max(true) - 0.01
    assert objects[0] <= sum(len(own) for own in redone.values()) <= objects[1]
