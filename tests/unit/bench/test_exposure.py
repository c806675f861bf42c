"""What a model loses behind its own words, on answers whose loss is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.exposure import KINDS, compare, table
from deploy.demo import build_data, model
from learner.config.schema import DataConfig, ModelConfig, TaskConfig
from learner.data.readers import load_samples
from learner.policy.load import Policy, load_policy
from learner.records import Assignment, DetectionObject, Rollout, Sample
from learner.tasks.detection.task import DetectionTask


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, DetectionTask, list[Sample]]:
    folder = tmp_path_factory.mktemp("exposure")
    model.build(folder / "model", "tiny")
    build_data.build(build_data.Build(train=6, val=0, test=0), folder)
    policy = load_policy(ModelConfig(path=str(folder / "model")), device=torch.device("cpu"))
    task = DetectionTask(TaskConfig(iou_threshold=0.3), policy.tokenizer)
    data = str(folder / "train.jsonl")
    return policy, task, load_samples(DataConfig(train=data), data, task)


def answered(policy: Policy, task: DetectionTask, sample: Sample, said: Sequence[DetectionObject]) -> Assignment:
    ids = policy.tokenizer.encode(task.serialize(said, after=None).text)
    rollout = Rollout(
        sample=sample, prompt_token_ids=(), response_token_ids=tuple(ids), finish_reason="stop", ver=0, seed=None
    )
    return task.match(task.parse(rollout))


def test_behind_the_truth_s_own_words_nothing_is_lost(world: tuple[Policy, DetectionTask, list[Sample]]) -> None:
    policy, task, samples = world
    assignments = [answered(policy, task, sample, sample.objects[:1]) for sample in samples]
    found = list(compare(policy, task, assignments))
    assert len(found) == len(samples)
    for one, sample in zip(found, samples, strict=True):
        np.testing.assert_allclose(one.own, one.truth, rtol=1e-5)
        assert (one.own > 0).all()
        assert (one.kinds == "coordinates").sum() == 4 * (len(sample.objects) - 1)
        assert (one.kinds == "names").sum() >= len(sample.objects) - 1


def test_other_words_before_change_what_follows(world: tuple[Policy, DetectionTask, list[Sample]]) -> None:
    policy, task, samples = world
    others = [[obj._replace(desc="nine" if obj.desc != "nine" else "one") for obj in s.objects[:1]] for s in samples]
    assignments = [answered(policy, task, s, said) for s, said in zip(samples, others, strict=True)]
    found = list(compare(policy, task, assignments))
    assert len(found) == len(samples)
    assert all(np.abs(one.own - one.truth).max() > 1e-4 for one in found)
    shown = table(found)
    assert shown.row_count == len(KINDS)
    numbers = [int(str(cell)) for cell in shown.columns[1].cells]
    assert numbers[-1] == sum(numbers[:-1]) == sum(len(one.own) for one in found)


def test_a_scene_without_a_usable_answer_is_left_out(world: tuple[Policy, DetectionTask, list[Sample]]) -> None:
    policy, task, samples = world
    nothing = answered(policy, task, samples[0], ())
    broken = task.match(task.parse(replace(nothing.parsed.rollout, response_token_ids=(5, 6, 7))))
    assert list(compare(policy, task, [broken])) == []
