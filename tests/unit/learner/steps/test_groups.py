"""Tests of the way from groups of rollouts to segments, with real task, tokenizer and rewards (R37)."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.config.load import config_of
from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.loss import LossConfig
from learner.extensions import Task
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import EncodedPrompt, Rollout, Sample, Segment
from learner.rollout.backend import MicroStep
from learner.steps.groups import GroupSource
from learner.steps.totals import StepTotals
from learner.tasks.rewards import Rewards
from shared.errors import ConfigError, PromptMismatchError
from tests.runs import events
from tests.tiers import slow
from tests.unit.learner.policy.rows import gradients, policy_of, row
from tests.unit.learner.steps.test_segments import (
    IGNORED,
    PLACE,
    TASK,
    TOKENIZER,
    answer_text,
    sample,
    segments_in,
    truth,
)
from tests.unit.learner.trainer_world import FakeBackend, Seen, make_config, run, snapshot, trainer

EOS = TOKENIZER.eos_token_id
LONGEST = 200


class Answers:
    """A backend with fixed texts, in groups. `finish` "length": that answer has no stop token. It streams its rollouts
    in any order."""

    def __init__(self, texts: Sequence[str], *, logprobs: bool = True, cut: Sequence[int] = ()) -> None:
        self.texts, self.has_logprobs, self.cut = texts, logprobs, cut
        self.closed = False

    def generate(self, samples: Sequence[Sample], **place: Any) -> list[Rollout]:
        assert place == PLACE
        return [self._rollout(i, one) for i, one in enumerate(samples)]

    def _rollout(self, i: int, one: Sample) -> Rollout:
        ids = tuple(TOKENIZER.encode(self.texts[i], add_special_tokens=False))
        stop = None if i in self.cut else EOS
        sampled = len(ids) + (stop is not None)
        return Rollout(
            sample=one,
            prompt_token_ids=prompt_of(one).token_ids,
            response_token_ids=ids,
            finish_reason="length" if stop is None else "stop",
            ver=9,
            seed=i,
            stop_token_id=stop,
            logprobs=tuple(-i - k / 1000 for k in range(sampled)) if self.has_logprobs else None,
        )

    def close(self) -> None:
        self.closed = True


class Arriving:
    """Rollouts in a given order; `taken` counts them."""

    def __init__(self, rollouts: Sequence[Rollout], order: Sequence[int]) -> None:
        self.rollouts, self.order, self.taken = rollouts, order, 0

    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        for place in self.order:
            self.taken += 1
            yield place, self.rollouts[place]

    def close(self) -> None: ...


def prompt_of(one: Sample) -> EncodedPrompt:
    return EncodedPrompt(token_ids=(5, 6, 7 + int(one.sample_id[1:])), vision=None)


def source_of(
    backend: Any, *, task: Task = TASK, weights: dict[str, float] | None = None, ranks: Any = None, **grpo: Any
) -> Any:
    rewards = Rewards(tokenizer=TOKENIZER, weights=weights or {"f1": 1.0}, task=task)
    return GroupSource(
        backend,
        task,
        rewards,
        grpo=GrpoConfig(**grpo),
        loss=LossConfig(),
        ranks=ranks or Ranks(),
    )


def made(texts: Sequence[str], size: int, *, logprobs: bool = True, cut: Sequence[int] = (), **grpo: Any) -> list[Any]:
    """The segments of these answers, `size` of each sample."""
    samples = [sample(i // size) for i in range(len(texts))]
    source = source_of(Answers(texts, logprobs=logprobs, cut=cut), num_generations=size, **grpo)
    return segments_in(source, samples, [prompt_of(one) for one in samples])


def learned(segment: Segment) -> np.ndarray:
    return segment.labels[segment.prompt_length :]


def advantages(segment: Any) -> np.ndarray:
    return segment.policy.advantages[segment.prompt_length :]


ONE, TWO = sample(0), sample(1)
SHORT, WHOLE = truth(ONE, 1), truth(ONE)  # F1 0.5 and 1


def test_a_segment_is_the_prompt_and_the_rollout_s_own_tokens() -> None:
    """Each place has one, in order; the stop token is learned, and an answer that was cut has none."""
    texts = [SHORT, WHOLE, truth(TWO), "no idea"]
    segments = made(texts, 2, cut=[1])
    assert [s.sample_id for s in segments] == ["s0", "s0", "s1", "s1"]
    for i, (one, text) in enumerate(zip(segments, texts, strict=True)):
        assert one.ver == 9
        assert answer_text(one) == text + ("" if i == 1 else TOKENIZER.eos_token)
        assert (learned(one) == one.input_ids[one.prompt_length :]).all()
        assert (one.labels[: one.prompt_length] == IGNORED).all()
        drawn = one.policy.rollout_logprobs
        np.testing.assert_allclose(drawn[one.prompt_length :], [-i - k / 1000 for k in range(len(learned(one)))], 1e-6)
        assert np.isnan(drawn[: one.prompt_length]).all()
        assert np.isnan(one.policy.first_logprobs).all()


def test_rollouts_of_the_learner_s_own_weights_bring_no_logprobs() -> None:
    assert all(np.isnan(one.policy.rollout_logprobs).all() for one in made([SHORT, WHOLE], 2, logprobs=False))


def test_each_rollout_is_compared_with_its_own_group() -> None:
    segments = made([SHORT, WHOLE, "no idea", truth(TWO)], 2)
    for one, wanted in zip(segments, [-0.25, 0.25, -0.5, 0.5], strict=True):
        np.testing.assert_allclose(advantages(one), wanted, atol=1e-6)
        assert not one.policy.advantages[: one.prompt_length].any()
    batch = made([SHORT, WHOLE, "no idea", truth(TWO)], 2, advantage="batch")
    for one, wanted in zip(batch, [-0.125, 0.375, -0.625, 0.375], strict=True):
        np.testing.assert_allclose(advantages(one), wanted, atol=1e-6)


def test_groups_and_rewards_are_counted_once() -> None:
    segments = made([SHORT, WHOLE, WHOLE, SHORT, truth(TWO), truth(TWO), truth(TWO), truth(TWO)], 4)
    totals: dict[str, float] = {}
    for one in segments:
        for name, value in one.stats.items():
            totals[name] = totals.get(name, 0.0) + value
    wanted = {"grpo/groups": 2.0, "grpo/no_signal": 1.0, "grpo/reward_std": 0.25, "scored": 8.0}
    wanted |= {"rewarded": 7.0, "reward/f1": 7.0}
    assert {name: totals[name] for name in wanted} == pytest.approx(wanted)
    assert totals["matched"] == 2 * 1 + 2 * 3 + 4 * 3


@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize("credit", ["sequence", "object"])
def test_equal_rewards_are_no_signal_whatever_the_rounding(size: int, credit: str) -> None:
    """F1 of 0.8 for all: the mean of equal numbers may differ from them in the last bit."""
    equal = made([truth(ONE, 2)] * size, size, credit=credit)
    assert sum(one.stats.get("grpo/no_signal", 0.0) for one in equal) == 1.0
    for one in equal:
        np.testing.assert_allclose(advantages(one), 0.0, atol=1e-6)
        assert one.loss_weights.sum() == len(learned(one))


# ---- the whole step (D21) ------------------------------------------------------------------------------------------


class WindowAnswers:
    """A backend that answers place i of a step, counted over all ranks, with `texts[i]`."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.answers = Answers(texts)

    def generate_window(self, window: Sequence[MicroStep], *, global_step: int) -> list[list[Rollout]]:
        return [
            [self.answers._rollout(step.first_req_idx + i, one) for i, one in enumerate(step.samples)]
            for step in window
        ]


class ThreadRanks:
    """A rank that is a thread: gathers through a barrier."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank, self._barrier, self._box = rank, barrier, box

    def all_gather_object(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait(timeout=30)
        values = list(self._box)
        self._barrier.wait(timeout=30)
        return values


def step_advantages(texts: Sequence[str], *, num_ranks: int, micro_steps: int, **grpo: Any) -> list[np.ndarray]:
    """The advantages of a step of these answers in pairs, cut into micro-steps, those dealt to ranks."""
    each = len(texts) // (num_ranks * micro_steps)
    barrier, box = threading.Barrier(num_ranks), [None] * num_ranks

    def learn(rank: int) -> list[Any]:
        source = source_of(
            WindowAnswers(texts), ranks=ThreadRanks(rank, barrier, box), num_generations=2, advantage="batch", **grpo
        )
        firsts = [(rank * micro_steps + i) * each for i in range(micro_steps)]
        window = [
            MicroStep(
                samples=tuple(sample((first + k) // 2) for k in range(each)), micro_step_idx=i, first_req_idx=first
            )
            for i, first in enumerate(firsts)
        ]
        source.begin_window(window, global_step=3, clock=PhaseClock())
        return [
            segment
            for step in window
            for segment in source.segments(
                step, [prompt_of(one) for one in step.samples], global_step=3, clock=PhaseClock()
            )
        ]

    with ThreadPoolExecutor(num_ranks) as pool:
        return [advantages(one) for segments in pool.map(learn, range(num_ranks)) for one in segments]


@pytest.mark.parametrize("credit", ["sequence", "object"])
def test_a_batch_is_the_step_whatever_its_micro_steps_and_ranks(credit: str) -> None:
    """D21. Rewards of the first half are higher, so a part's own mean would be another one."""
    texts = [truth(sample(i // 2)) if i < 4 else "no idea" for i in range(7)] + [truth(sample(3), 1)]
    whole = step_advantages(texts, num_ranks=1, micro_steps=1, credit=credit)
    for num_ranks, micro_steps in ((1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        parts = step_advantages(texts, num_ranks=num_ranks, micro_steps=micro_steps, credit=credit)
        for found, wanted in zip(parts, whole, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_a_batch_is_compared_with_the_mean_of_all_rewards() -> None:
    """Computed by hand: rewards 1, 1, 1, 1, 0, 0, 0 and 0.5."""
    texts = [truth(sample(i // 2)) if i < 4 else "no idea" for i in range(7)] + [truth(sample(3), 1)]
    rewards = np.array([1.0] * 4 + [0.0] * 3 + [0.5])
    found = [one[0] for one in step_advantages(texts, num_ranks=2, micro_steps=2)]
    np.testing.assert_allclose(found, rewards - rewards.mean(), rtol=1e-6)


# ---- credit object by object ---------------------------------------------------------------------------------------


def test_the_tokens_of_each_object_have_its_credit() -> None:
    """The short answer closes where the other goes on: F1 after 1, 2, 3 objects is 0.5, 0.8, 1."""
    short, whole = made([SHORT, WHOLE], 2, credit="object")
    parsed = TASK.parse(Answers([WHOLE])._rollout(0, ONE))
    first, second, _ = TASK.prefix_rewards(TASK.match(parsed), {"f1": 1.0}).ends
    np.testing.assert_allclose(advantages(short)[:first], -0.5, atol=1e-6)
    np.testing.assert_allclose(advantages(short)[first:], -0.5, atol=1e-6)
    np.testing.assert_allclose(advantages(whole)[:second], 0.5, atol=1e-6)
    np.testing.assert_allclose(advantages(whole)[second:], 0.0, atol=1e-6)


def test_a_duplicate_s_tokens_are_made_less_likely() -> None:
    written = TASK.serialize([*ONE.objects, ONE.objects[2]], after=None)
    right, repeated = made([WHOLE, written.text], 2, credit="object")
    parsed = TASK.parse(Answers([written.text])._rollout(0, ONE))
    ends = TASK.prefix_rewards(TASK.match(parsed), {"f1": 1.0}).ends
    assert (advantages(repeated)[ends[2] : ends[3]] < 0).all()
    assert (advantages(right)[ends[2] :] > 0).all()
    assert advantages(right)[-1] > 0  # the stop token


def test_credit_stays_bounded_where_answers_end_up_equal() -> None:
    """Both end with F1 0.8. They differ in the order in which they earned it."""
    wrong = ONE.objects[0]._replace(desc="seven")
    texts = [
        TASK.serialize(objects, after=None).text for objects in ([wrong, *ONE.objects[1:]], [*ONE.objects[1:], wrong])
    ]
    for one in made(texts, 2, credit="object"):
        assert 0.1 < np.abs(advantages(one)).max() < 4.0


def test_what_objects_do_not_earn_is_compared_rollout_by_rollout() -> None:
    samples = [ONE, ONE]
    backend = Answers([WHOLE, WHOLE[:-1]])
    source = source_of(backend, weights={"f1": 1.0, "format": 0.5}, num_generations=2, credit="object")
    whole, cut = segments_in(source, samples, [prompt_of(ONE)] * 2)
    np.testing.assert_allclose(advantages(whole), 0.25, atol=1e-6)
    np.testing.assert_allclose(advantages(cut), -0.25, atol=1e-6)


class NoPrefixes(type(TASK)):  # type: ignore[misc]
    def prefix_rewards(self, assignment: Any, weights: Any) -> None:
        return None


def test_a_task_that_cannot_tell_is_refused() -> None:
    task = NoPrefixes(TASK.config, TOKENIZER)
    source = source_of(Answers([WHOLE, SHORT]), task=task, num_generations=2, credit="object")
    with pytest.raises(ConfigError, match="credit"):
        segments_in(source, [ONE, ONE], [prompt_of(ONE)] * 2)


# ---- as they arrive, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_hands_on_whole_groups_in_any_order_of_arrival(seed: int) -> None:
    texts = [SHORT, WHOLE, "no idea", truth(TWO), truth(sample(2)), "{}"]
    samples = [sample(i // 2) for i in range(6)]
    prompts = [prompt_of(one) for one in samples]
    backend = Answers(texts)
    source = source_of(backend, num_generations=2)
    order = random.Random(seed).sample(range(6), 6)
    arriving = Arriving(backend.generate(samples, **PLACE), order)
    places, met = [], []
    for place, segment in source._as_ready(arriving, prompts):
        places.append(place)
        met.append((place, segment))
        group = range(place - place % 2, place - place % 2 + 2)
        assert set(group) <= set(order[: arriving.taken])
    assert sorted(places) == list(range(6))
    assert all(places[i] + 1 == places[i + 1] for i in range(0, 6, 2)), "both places of a group come together"
    whole = segments_in(source, samples, prompts)
    for place, segment in met:
        assert segment.sample_id == samples[place].sample_id
        np.testing.assert_array_equal(segment.input_ids, whole[place].input_ids)
        np.testing.assert_allclose(segment.policy.advantages, whole[place].policy.advantages)


def test_another_prompt_than_the_learner_s_is_refused() -> None:
    source = source_of(Answers([WHOLE, SHORT]), num_generations=2)
    with pytest.raises(PromptMismatchError, match="s0"):
        segments_in(source, [ONE, ONE], [prompt_of(TWO)] * 2)


def test_nothing_in_nothing_out() -> None:
    assert segments_in(source_of(Answers([])), [], []) == []


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_step_in_which_no_group_has_a_signal_changes_no_weights(
    world_size: int, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R37: in the real loop, with answers that are all worthless. Its samples are used all the same, once (D11)."""
    answer = FakeBackend._answer

    def worthless(self: FakeBackend, one: Sample, seed: int) -> Rollout:
        ids = tuple(self.policy.tokenizer.encode("no idea", add_special_tokens=False))
        return replace(answer(self, one, seed), response_token_ids=ids)

    monkeypatch.setattr(FakeBackend, "_answer", worthless)
    plain = make_config(tiny_text, tmp_path, per_device_train_batch_size=4 // world_size, max_steps=2)
    values = plain.model_dump(exclude_unset=True)
    values["training"] |= {"effective_batch_size": 8}
    values["custom"]["trainer_variant"] = "grpo"
    values["custom"]["extra"]["rollout_matching"]["decoding"]["temperature"] = 1.0
    values["grpo"] = {"num_generations": 2}
    config = config_of(values)
    with trainer(config, Ranks(), monkeypatch, Seen()) as made_before:
        before = snapshot(made_before.policy)
    seen = run(config, monkeypatch, world_size)
    for rank in seen:
        assert len(rank.gradients) == 2
        assert not any(gradient.any() for step in rank.gradients for gradient in step.values())
        assert all(torch.equal(rank.weights[name], tensor) for name, tensor in before.items())
    for step in events(tmp_path / "run", "step"):
        assert (step["loss"], step["metrics"]["grpo/no_signal"]) == (0.0, 1.0)
    assert Counter(sample_id for rank in seen for sample_id in rank.learned) == {f"s{i}": 2 for i in range(8)}


# ---- what a step divides by ----------------------------------------------------------------------------------------


def test_a_step_is_the_mean_over_its_tokens(tiny_text: Path) -> None:
    """Two rollouts of different length: the step's gradient against the definition, from log-probabilities alone."""
    policy = policy_of(tiny_text, grpo=GrpoConfig())
    segments = made([SHORT, WHOLE], 2, logprobs=False)
    totals, one_row = StepTotals(), row(*segments)
    totals.add(one_row, policy.backward(one_row))
    lengths = [len(learned(one)) for one in segments]
    assert totals.weight == pytest.approx(sum(lengths), rel=1e-5)
    found = {name: grad / totals.weight for name, grad in gradients(policy).items()}

    wanted = dict.fromkeys(found, torch.zeros(()))
    for one in segments:
        policy.model.zero_grad()
        taught = Segment(
            sample_id="",
            input_ids=one.input_ids,
            labels=one.labels,
            prompt_length=one.prompt_length,
            loss_weights=(one.labels != IGNORED).astype(np.float32),
        )
        policy.backward(row(taught))
        factor = float(advantages(one)[0]) / sum(lengths)
        wanted = {name: wanted[name] + factor * grad for name, grad in gradients(policy).items()}
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-3)
