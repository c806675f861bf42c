"""Evaluation: every sample once, in order, on any number of ranks; written so that the report can read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bench.tiny import build_tokenizer
from learner.config.sections.task import TaskConfig
from learner.policy.parallel import Ranks
from learner.records import DetectionObject, Rollout, Sample
from learner.steps import evaluation as evaluation_module
from learner.steps.evaluation import Evaluation, draw_scenes, evaluate, write_evaluation
from learner.tasks.detection.scores import CalibrationFile, scored_objects, token_scores
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of
from shared.images import ImageRules
from tests.unit.learner.trainer_world import Meeting, ThreadRanks

TOKENIZER: Any = build_tokenizer()
TASK = DetectionTask(TaskConfig(), TOKENIZER)


def scene(i: int) -> Sample:
    objects = tuple(DetectionObject(desc="seven", kind="bbox_2d", bins=(k * 99, i, k * 99 + 60, 500)) for k in range(3))
    turn = {"role": "user", "content": "Detect."}
    return Sample(sample_id=f"t{i}", messages=(turn,), images=(), objects=objects, width=100, height=50)


class Oracle:
    """Answers sample i with the first i % 4 objects of the truth, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int, bool]] = []

    def generate(
        self,
        samples: Sequence[Sample],
        *,
        global_step: int,
        micro_step_idx: int,
        first_req_idx: int,
        greedy: bool = False,
    ) -> list[Rollout]:
        self.asked.append(([s.sample_id for s in samples], first_req_idx, greedy))
        return [self._answer(sample) for sample in samples]

    def close(self) -> None: ...

    def _answer(self, sample: Sample) -> Rollout:
        text = TASK.serialize(sample.objects[: int(sample.sample_id[1:]) % 4], after=None).text
        tokens = tuple(TOKENIZER.encode(text, add_special_tokens=False))
        return Rollout(
            sample=sample, prompt_token_ids=(1,), response_token_ids=tokens, finish_reason="stop", ver=7, seed=None
        )


class Noisy(Oracle):
    """Some boxes are beside their object. The tokens of right ones are a little more probable."""

    def _answer(self, sample: Sample) -> Rollout:
        rng = np.random.default_rng(int(sample.sample_id[1:]))
        right = rng.random(len(sample.objects)) < 0.5
        shifts = np.where(right, rng.integers(0, 12, len(right)), 45)
        objects = [
            obj._replace(bins=(obj.bins[0] + int(by), obj.bins[1], obj.bins[2] + int(by), obj.bins[3]))
            for obj, by in zip(sample.objects, shifts, strict=True)
        ]
        tokens = tuple(TOKENIZER.encode(TASK.serialize(objects, after=None).text, add_special_tokens=False))
        rollout = Rollout(
            sample=sample, prompt_token_ids=(1,), response_token_ids=tokens, finish_reason="stop", ver=7, seed=None
        )
        parsed, logprobs = TASK.parse(rollout), np.zeros(len(tokens))
        for predicted, is_right in zip(parsed.objects, right, strict=True):
            for slot in predicted.slots:
                logprobs[parsed.slots.start[slot]] = -rng.exponential(0.2 if is_right else 0.5)
        return replace(rollout, logprobs=tuple(logprobs.tolist()))


def evaluate_on(
    world_size: int, count: int, made: type[Oracle] = Oracle, **options: Any
) -> list[tuple[Evaluation, Oracle]]:
    samples, meeting = [scene(i) for i in range(count)], Meeting(world_size)

    def rank_main(rank: int) -> tuple[Evaluation, Oracle]:
        ranks = ThreadRanks(rank=rank, world_size=world_size, meeting=meeting) if world_size > 1 else Ranks()
        oracle = made()
        return evaluate(oracle, samples, TASK, ranks, global_step=3, **options), oracle

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_main, range(world_size)))


@pytest.mark.parametrize("kind", ["bbox_2d", "poly"])
def test_objects_have_their_place_in_pixels_and_other_values_stay(kind: str) -> None:
    sample = replace(scene(0), width=500, height=250)
    item = {"desc": "a", kind: [0, 0, 999, 999]}
    (found,) = evaluation_module._with_pixels("predictions", [item], sample)
    x1, y1, x2, y2 = found.pop("pixels")
    assert found == item
    assert (x1, y1) == (0, 0)
    assert (x2, y2) == pytest.approx((500, 250), rel=0.01)
    for other in ([{"desc": "a"}], [item, 7], "text"):
        assert evaluation_module._with_pixels("predictions", other, sample) == other, "of another task"
    assert evaluation_module._with_pixels("scores", [item], sample) == [item]


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_samples_and_agree_on_the_result(world_size: int, count: int) -> None:
    """R24: also where some ranks have nothing to do."""
    [(alone, _)] = evaluate_on(1, count)
    shared = evaluate_on(world_size, count)
    for evaluation, _ in shared:
        assert evaluation.metrics == alone.metrics
        assert [a.parsed.rollout.sample.sample_id for a in evaluation.assignments] == [f"t{i}" for i in range(count)]
    places = {
        first + i: sample_id
        for _, oracle in shared
        for ids, first, greedy in oracle.asked
        for i, sample_id in enumerate(ids)
        if greedy
    }
    assert places == {i: f"t{i}" for i in range(count)}


# ---- scores --------------------------------------------------------------------------------------------------------


def test_ap_is_that_of_the_scores_by_a_slow_reference(tmp_path: Path) -> None:
    """R43: of the tokens' probabilities, and of calibrated scores; on any number of ranks. The files have the scores
    that were used."""
    [(plain, _)] = evaluate_on(1, 20, Noisy)
    [(alone, _)] = evaluate_on(1, 20, Noisy, calibrated=TASK.calibrated)
    for evaluation, is_calibrated in ((plain, 0.0), (alone, 1.0)):
        assert evaluation.metrics["coco/calibrated"] == is_calibrated
        scores = [one.scores or token_scores(one.parsed, pieces_of(TOKENIZER)) for one in evaluation.assignments]
        assert evaluation.metrics["coco/ap"] == pytest.approx(slow_ap(evaluation, scores))
        write_evaluation(evaluation, tmp_path / "some.jsonl")
        rows = json.loads((tmp_path / "some.coco.json").read_text())
        assert [row["score"] for row in rows] == [pytest.approx(score, abs=1e-5) for own in scores for score in own]
    equal = [[1.0] * len(one.parsed.objects) for one in plain.assignments]
    assert slow_ap(plain, equal) < plain.metrics["coco/ap"], "scores rank boxes"
    for evaluation, _ in evaluate_on(3, 20, Noisy, calibrated=TASK.calibrated):
        assert evaluation.metrics == pytest.approx(alone.metrics)


def test_scores_of_test_are_those_that_validation_fitted() -> None:
    [(val, _)] = evaluate_on(1, 20, Noisy)
    text = TASK.calibration(val.assignments)
    assert text is not None
    [(test, _)] = evaluate_on(1, 6, Noisy, calibrated=partial(TASK.calibrated, calibration=text))
    known = CalibrationFile.model_validate_json(text).of(0)
    for one in test.assignments:
        wanted = [found.score for found in scored_objects([one.parsed], pieces_of(TOKENIZER), known)]
        assert one.scores == pytest.approx(wanted)
    assert test.metrics["coco/calibrated"] == 1.0


def test_too_few_boxes_are_scored_by_their_tokens() -> None:
    [(few, _)] = evaluate_on(1, 6, Noisy, calibrated=TASK.calibrated)
    [(plain, _)] = evaluate_on(1, 6, Noisy)
    assert few.metrics == plain.metrics


def slow_ap(evaluation: Evaluation, scores: Sequence[Sequence[float]]) -> float:
    """Compute COCO's AP of one class by loops: of thresholds and 101 recalls, the mean of the best precision from there
    on."""
    ranked = sorted((-score, image, place) for image, own in enumerate(scores) for place, score in enumerate(own))
    answers = evaluation.assignments
    num_truth = sum(len(one.parsed.rollout.sample.objects) for one in answers)
    values = []
    for step in range(10):
        taken: set[tuple[int, int]] = set()
        right: list[bool] = []
        for _, image, place in ranked:
            box = answers[image].parsed.objects[place].object.bins
            free = [
                (slow_iou(box, obj.bins), k)
                for k, obj in enumerate(answers[image].parsed.rollout.sample.objects)
                if (image, k) not in taken
            ]
            best, k = max(free, default=(0.0, -1))
            right.append(best >= 0.5 + 0.05 * step - 1e-9)
            taken |= {(image, k)} if right[-1] else set()
        points = [(sum(right[: n + 1]) / num_truth, sum(right[: n + 1]) / (n + 1)) for n in range(len(right))]
        values += [max((p for r, p in points if r >= at), default=0.0) for at in np.linspace(0, 1, 101)]
    return sum(values) / len(values)


def slow_iou(a: Sequence[int], b: Sequence[int]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0, width) * max(0, height)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


# ---- files ---------------------------------------------------------------------------------------------------------


def written(k: int) -> dict[str, Any]:
    """Return object k of `scene(2)`: bins, and pixels of 100 x 50."""
    pixels = [round(k * 9900 / 999, 2), 0.1, round((k * 99 + 60) * 100 / 999, 2), 25.03]
    return {"desc": "seven", "bbox_2d": [k * 99, 2, k * 99 + 60, 500], "pixels": pixels}


def test_coco_results_stand_beside_it(tmp_path: Path) -> None:
    """They are in pixels, by pycocotools' names; a polygon has its outline; ids are those of the annotations, if they
    have some."""
    [(evaluation, _)] = evaluate_on(1, 3)
    write_evaluation(evaluation, tmp_path / "step_000003.jsonl", {"eight": 1, "seven": 4})
    rows = json.loads((tmp_path / "step_000003.coco.json").read_text())
    assert [row["image_id"] for row in rows] == ["t1", "t2", "t2"]
    x1, y1, x2, y2 = written(1)["pixels"]
    assert rows[2]["bbox"] == [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)]
    assert {(row["category_id"], row["category"], row["score"]) for row in rows} == {(4, "seven", 1.0)}
    polygon = {"desc": "new", "poly": [0, 0, 999, 0, 999, 999]}
    scenes = tuple({**scene, "predictions": [polygon], "scores": [0.5]} for scene in evaluation.scenes)
    write_evaluation(replace(evaluation, scenes=scenes), tmp_path / "test.jsonl")
    row = json.loads((tmp_path / "test.coco.json").read_text())[0]
    assert (row["bbox"], row["segmentation"]) == ([0.0, 0.0, 100.0, 50.0], [[0.0, 0.0, 100.0, 0.0, 100.0, 50.0]])
    assert row["category_id"] == 2, "the names of the ground truth come first"


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    [(evaluation, _)] = evaluate_on(1, 3)
    path = tmp_path / "eval" / "step_000003.jsonl"
    write_evaluation(evaluation, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["predictions"]) for line in lines] == [0, 1, 2]
    expected = {
        "id": "t2",
        "images": [],
        "width": 100,
        "height": 50,
        "truth": [written(k) for k in range(3)],
        "predictions": [written(k) for k in range(2)],
        "scores": [1.0, 1.0],
        "pairs": [[0, 0, 1.0], [1, 1, 1.0]],
        "drops": {},
        "truncated": False,
        "ver": 7,
    }
    assert {name: lines[2][name] for name in expected} == expected


def test_a_box_is_in_pixels_of_its_own_image(tmp_path: Path) -> None:
    """Each image of a sample with several is one of COCO's."""
    whole = (0, 0, 999, 999)
    objects = tuple(DetectionObject(desc="seven", kind="bbox_2d", bins=whole, image=k) for k in (1, 2))
    names = tuple(str(tmp_path / f"{k}.png") for k in (1, 2))
    sizes = ((100, 50), (40, 80))
    sample = replace(scene(2), images=names, objects=objects, sizes=sizes, sample_id="t2")
    for name, size in zip(names, sizes, strict=True):
        Image.new("RGB", size).save(name)
    evaluation = evaluate(Oracle(), [sample], TASK, Ranks(), global_step=1)
    assert (evaluation.metrics["f1@0.5"], evaluation.metrics["coco/ap"]) == (1.0, pytest.approx(1.0))
    write_evaluation(evaluation, tmp_path / "step.jsonl")
    rows = json.loads((tmp_path / "step.coco.json").read_text())
    assert [(row["image_id"], row["file_name"], row["bbox"]) for row in rows] == [
        ("t2#1", "1.png", [0.0, 0.0, 100.0, 50.0]),
        ("t2#2", "2.png", [0.0, 0.0, 40.0, 80.0]),
    ]
    line = json.loads((tmp_path / "step.jsonl").read_text())
    assert [one["pixels"][2:] for one in line["truth"]] == [[100.0, 50.0], [40.0, 80.0]]
    assert line["sizes"] == [[100, 50], [40, 80]]
    [(sample_id, picture)] = draw_scenes(evaluation, ImageRules())
    assert (sample_id, picture.size) == ("t2", (100 + 12 + 40, 80))
