"""Tests of what a model loses behind its own words, on answers whose loss is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.demo_model import build
from deploy.demo import build_data
from learner.config.sections.data import DataConfig
from learner.config.sections.model import ModelConfig
from learner.config.sections.task import TaskConfig
from learner.data.splits import load_samples
from learner.policy.load import Policy, load_policy
from learner.predict.exposure import KINDS, Compared, compare, teacher_forced
from learner.predict.features import KIND_NAMES
from learner.records import Assignment, DetectionObject, Rollout, Sample
from learner.tasks.detection.task import DetectionTask

World = tuple[Policy, DetectionTask, list[Sample]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("exposure")
    build(folder / "model", "tiny")
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


def compared(world: World, answers: Sequence[Sequence[DetectionObject]]) -> list[Compared]:
    policy, task, samples = world
    found = []
    for sample, said in zip(samples, answers, strict=True):
        one = compare(policy, task, answered(policy, task, sample, said), teacher_forced(policy, task, sample))
        assert one is not None
        found.append(one)
    return found


def test_behind_the_truth_s_own_words_nothing_is_lost(world: World) -> None:
    samples = world[2]
    for one, sample in zip(compared(world, [s.objects[:1] for s in samples]), samples, strict=True):
        np.testing.assert_allclose(one.own, one.truth, rtol=1e-5)
        assert (one.own > 0).all()
        assert (one.kinds == "coordinates").sum() == 4 * (len(sample.objects) - 1)
        assert (one.kinds == "names").sum() >= len(sample.objects) - 1


def test_other_words_before_change_what_follows(world: World) -> None:
    samples = world[2]
    others = [[obj._replace(desc="nine" if obj.desc != "nine" else "one") for obj in s.objects[:1]] for s in samples]
    for one in compared(world, others):
        assert np.abs(one.own - one.truth).max() > 1e-4
        assert len(KINDS) == len(KIND_NAMES)
        sums = {kind: one.sums(kind) for kind in KINDS}
        np.testing.assert_allclose(sums["structure"] + sums["names"] + sums["coordinates"], sums["all"])
        assert sums["all"].tolist() == pytest.approx([one.own.sum(), one.truth.sum(), len(one.own)])


def test_a_scene_without_a_usable_answer_is_left_out(world: World) -> None:
    policy, task, samples = world
    nothing = answered(policy, task, samples[0], ())
    broken = task.match(task.parse(replace(nothing.parsed.rollout, response_token_ids=(5, 6, 7))))
    assert compare(policy, task, broken, teacher_forced(policy, task, samples[0])) is None


def test_the_truth_costs_what_its_tokens_cost(world: World) -> None:
    policy, task, samples = world
    forced = teacher_forced(policy, task, samples[0])
    (logprobs,) = policy.logprobs([(policy.encoder.encode(samples[0]), forced.target.token_ids.tolist())])
    np.testing.assert_allclose(forced.nats, -np.array(logprobs), rtol=1e-5)
