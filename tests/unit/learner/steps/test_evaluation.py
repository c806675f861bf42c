"""Evaluation: every sample once, in order, on any number of ranks; written so that the report can read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.model import build_tokenizer
from learner.config.sections.task import TaskConfig
from learner.policy.parallel import Ranks
from learner.records import DetectionObject, Rollout, Sample
from learner.steps.evaluation import Evaluation, evaluate, write_evaluation
from learner.tasks.detection.task import DetectionTask
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


def evaluate_on(world_size: int, count: int) -> list[tuple[Evaluation, Oracle]]:
    samples, meeting = [scene(i) for i in range(count)], Meeting(world_size)

    def rank_main(rank: int) -> tuple[Evaluation, Oracle]:
        ranks = ThreadRanks(rank=rank, world_size=world_size, meeting=meeting) if world_size > 1 else Ranks()
        oracle = Oracle()
        return evaluate(oracle, samples, TASK, ranks, global_step=3), oracle

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_main, range(world_size)))


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


def written(k: int) -> dict[str, Any]:
    """Object k of `scene(2)`: bins, and pixels of 100 x 50."""
    pixels = [round(k * 9900 / 999, 2), 0.1, round((k * 99 + 60) * 100 / 999, 2), 25.03]
    return {"desc": "seven", "bbox_2d": [k * 99, 2, k * 99 + 60, 500], "pixels": pixels}


def test_coco_results_stand_beside_it(tmp_path: Path) -> None:
    """In pixels, by pycocotools' names; a polygon has its outline; ids are those of the annotations, if they have
    some."""
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
