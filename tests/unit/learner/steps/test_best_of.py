"""One segment of several rollouts (`best_of`): which rollout is learned and how, and that a sample stays one place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.config.load import config_of
from learner.config.schema import BestOfConfig, LossConfig, RunConfig
from learner.extensions import Task
from learner.records import Rollout, Sample, Segment
from learner.rollout.backend import MicroStep
from learner.run.log import PhaseClock
from learner.run.metrics import BEST_OF
from learner.steps.best_of import BestOfSource
from learner.steps.segments import RolloutSource
from learner.tasks.rewards import Rewards
from shared.errors import ConfigError, PromptMismatchError
from tests.unit.learner.steps.test_groups import Answers, Arriving, prompt_of
from tests.unit.learner.steps.test_segments import (
    IGNORED,
    PLACE,
    SAMPLES,
    TASK,
    TOKENIZER,
    answer_text,
    sample,
    truth,
)
from tests.unit.learner.steps.test_stage2 import stage2_config, stand_in, steps_of
from tests.unit.learner.trainer_log import all_learned, everyone
from tests.unit.learner.trainer_world import make_config, run

ONE = SAMPLES[0]
EOS = TOKENIZER.eos_token
Texts = Sequence[Sequence[str]]


class Asked(Answers):
    """Fixed texts, as `Answers`, which remembers the places that it was asked for."""

    def __init__(self, texts: Texts, **settings: Any) -> None:
        super().__init__([text for group in texts for text in group], **settings)
        self.window: list[MicroStep] = []

    def generate_window(self, window: Sequence[MicroStep], *, global_step: int) -> list[list[Rollout]]:
        assert global_step == PLACE["global_step"]
        self.window = list(window)
        return [[self._rollout(i, one) for i, one in enumerate(step.samples)] for step in window]

    def generate(self, samples: Sequence[Sample], *, global_step: int, **place: int) -> list[Rollout]:
        return self.generate_window([MicroStep(samples=samples, **place)], global_step=global_step)[0]


def source_of(backend: Any, number: int, *, task: Task = TASK, loss: LossConfig | None = None, **best: Any) -> Any:
    return BestOfSource(
        backend,
        task,
        Rewards(tokenizer=TOKENIZER, weights={"f1": 1.0}, task=task),
        best_of=BestOfConfig(rollouts_per_sample=number, **best),
        loss=loss or LossConfig(),
    )


def made(texts: Texts, *, cut: Sequence[int] = (), samples: Sequence[Sample] | None = None, **best: Any) -> Any:
    """The segments of these answers, those of sample 0 first."""
    samples = samples or [sample(i) for i in range(len(texts))]
    source = source_of(Asked(texts, cut=cut), len(texts[0]), **best)
    return source.segments(samples, [prompt_of(one) for one in samples], **PLACE, clock=PhaseClock())


def alone(text: str, one: Sample = ONE) -> Segment:
    """The segment of a single rollout."""
    rewards = Rewards(tokenizer=TOKENIZER, weights={"f1": 1.0}, task=TASK)
    source = RolloutSource(Asked([[text]]), TASK, rewards, loss=LossConfig())  # type: ignore[arg-type]
    return source.segments([one], [prompt_of(one)], **PLACE, clock=PhaseClock())[0]


def same(found: Segment, wanted: Segment) -> bool:
    return all(
        np.array_equal(getattr(found, name), getattr(wanted, name)) for name in ("input_ids", "labels", "loss_weights")
    )


def learns_nothing(segment: Segment) -> bool:
    return bool((segment.labels == IGNORED).all()) and not segment.loss_weights.any() and segment.extra_weight == 0


# ---- which rollout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_best_rollout_is_learned_as_if_it_were_the_only_one(seed: int) -> None:
    """Against the plainest search: of the largest reward the first. Equal rewards with other texts are among them."""
    rng = random.Random(seed)
    samples = [sample(i) for i in range(4)]
    reordered = [TASK.serialize([*reversed(one.objects)][:2], after=None).text for one in samples]
    choices = [
        [truth(one, n) for n in range(4)] + ["no idea", again] for one, again in zip(samples, reordered, strict=True)
    ]
    texts = [[rng.choice(own) for _ in range(3)] for own in choices]
    for segment, own, one in zip(made(texts, samples=samples), texts, samples, strict=True):
        f1 = {truth(one, n): 2 * n / (n + 3) for n in range(4)} | {"no idea": 0.0}
        rewards = [f1.get(text, 2 * 2 / 5) for text in own]
        best = rewards.index(max(rewards))
        assert same(segment, alone(own[best], one)), (own, best)
        assert segment.ver == 9
        assert segment.stats["best_of/reward"] == pytest.approx(max(rewards))
        assert segment.stats["rewarded"] == pytest.approx(sum(rewards))
        assert segment.stats["matched"] == alone(own[best], one).stats["matched"]
        assert (segment.stats["scored"], segment.stats["best_of/samples"]) == (3.0, 1.0)
        lengths = [len(TOKENIZER.encode(text, add_special_tokens=False)) for text in own]
        assert segment.stats["rollout_tokens"] == sum(lengths)


def test_one_rollout_per_sample_is_the_plain_source() -> None:
    """Tokens, labels, weights and every count; only `best_of/...` comes on top."""
    texts = [[truth(sample(0), 1)], ["no idea"], [truth(sample(2))]]
    for i, segment in enumerate(made(texts)):
        plain = alone(texts[i][0], sample(i))
        assert same(segment, plain)
        assert {k: v for k, v in segment.stats.items() if not k.startswith("best_of/")} == plain.stats


def test_a_sample_is_k_places_in_a_row_for_the_backend() -> None:
    """Within a window as without one, and over all ranks: a rank's first place follows those of the ranks before."""
    texts = [[truth(sample(i), n) for n in (1, 3)] for i in range(3)]
    backend, samples = Asked(texts), [sample(i) for i in range(3)]
    source, prompts = source_of(backend, 2), [prompt_of(sample(i)) for i in range(3)]
    direct = source.segments(samples, prompts, **PLACE, clock=PhaseClock())
    places = {key: value for key, value in PLACE.items() if key != "global_step"}
    source.begin_window([MicroStep(samples=samples, **places)], global_step=PLACE["global_step"], clock=PhaseClock())
    (asked,) = backend.window
    assert [one.sample_id for one in asked.samples] == ["s0", "s0", "s1", "s1", "s2", "s2"]
    assert (asked.micro_step_idx, asked.first_req_idx) == (PLACE["micro_step_idx"], 2 * PLACE["first_req_idx"])
    backend.window = []
    windowed = source.segments(samples, prompts, **PLACE, clock=PhaseClock())
    assert not backend.window, "rolled out again"
    assert all(same(one, other) for one, other in zip(direct, windowed, strict=True))
    assert source.segments([], [], **PLACE, clock=PhaseClock()) == []


@pytest.mark.parametrize("use", ["best", "union", "rejection"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_hands_on_a_sample_when_its_last_rollout_has_ended(use: str, seed: int) -> None:
    texts = [[truth(sample(i), n) for n in (1, 3, 0)] for i in range(3)]
    samples, prompts = [sample(i) for i in range(3)], [prompt_of(sample(i)) for i in range(3)]
    source = source_of(Asked(texts), 3, use=use)
    rollouts = Asked(texts).generate([one for one in samples for _ in range(3)], **PLACE)
    order = random.Random(seed).sample(range(9), 9)
    arriving = Arriving(rollouts, order)
    whole = source.segments(samples, prompts, **PLACE, clock=PhaseClock())
    places = []
    for place, segment in source._stream_of(arriving, prompts):
        places.append(place)
        assert set(range(3 * place, 3 * place + 3)) <= set(order[: arriving.taken])
        assert same(segment, whole[place])
        assert segment.sample_id == samples[place].sample_id
    assert sorted(places) == [0, 1, 2]


def test_another_prompt_of_any_rollout_is_refused() -> None:
    backend = Asked([[truth(ONE)] * 3])
    rollouts = backend.generate([ONE, ONE, sample(1)], **PLACE)
    with pytest.raises(PromptMismatchError, match="s1"):
        source_of(backend, 3).segment_of(rollouts, prompt_of(ONE))


# ---- what is learned -----------------------------------------------------------------------------------------------


def test_the_union_keeps_what_most_rollouts_see_without_a_label() -> None:
    """An object that nobody labelled, between those of the best rollout and of the truth."""
    seen = ONE.objects[1]
    labelled = Sample(**{**_fields(ONE), "objects": (ONE.objects[0], ONE.objects[2])})
    short = TASK.serialize([ONE.objects[0], ONE.objects[2]], after=None).text
    both = TASK.serialize([ONE.objects[0], seen], after=None).text
    (best,) = made([[short, both, truth(ONE)]], samples=[labelled])
    (union,) = made([[short, both, truth(ONE)]], samples=[labelled], use="union")
    assert answer_text(best) == short + EOS
    assert union.stats["best_of/agreed"] == 1.0
    assert answer_text(union).startswith(short[:-1])
    assert seen.desc in answer_text(union)[len(short) :]
    behind = union.labels[union.prompt_length + len(TOKENIZER.encode(short, add_special_tokens=False)) :]
    assert (behind[:-1] == IGNORED).all(), "what is kept is not learned"
    assert behind[-1] == TOKENIZER.eos_token_id


def _fields(one: Sample) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


def test_rejection_learns_the_best_rollout_s_own_tokens() -> None:
    texts = [["no idea", truth(ONE, 2), truth(ONE, 1)]]
    (segment,) = made(texts, use="rejection")
    assert answer_text(segment) == truth(ONE, 2) + EOS, "nothing is appended"
    own = segment.labels[segment.prompt_length :]
    assert (own == segment.input_ids[segment.prompt_length :]).all()
    assert (segment.loss_weights[segment.prompt_length :] == 1).all()
    assert segment.stats["best_of/learned"] == 1.0


@pytest.mark.parametrize(
    ("texts", "cut", "settings", "is_learned"),
    [
        ([truth(ONE, 2)] * 3, (), {}, False),  # none is better than the others
        ([truth(ONE, 2)] * 3, (), {"min_reward": 0.8}, True),  # 2 x 2 / (2 + 3)
        (["no idea", truth(ONE, 2), "{}"], (), {"min_reward": 0.81}, False),
        (["no idea", truth(ONE, 2), "{}"], (), {}, True),
        (["no idea", truth(ONE, 2), "{}"], (1,), {}, False),  # it has no end to learn
    ],
)
def test_rejection_learns_nothing_of_other_samples(
    texts: list[str], cut: Sequence[int], settings: dict[str, Any], is_learned: bool
) -> None:
    (segment,) = made([texts], cut=cut, use="rejection", **settings)
    assert learns_nothing(segment) is not is_learned
    assert segment.stats["best_of/learned"] == float(is_learned)
    assert segment.stats["matched"] == 2.0, "it counts as used"


class NoUnion(type(TASK)):  # type: ignore[misc]
    def union(self, assignments: Any, loss: Any) -> None:
        return None


def test_a_task_that_cannot_merge_answers_is_refused() -> None:
    source = source_of(Asked([["{}", "{}"]]), 2, task=NoUnion(TASK.config, TOKENIZER), use="union")
    with pytest.raises(ConfigError, match="union"):
        source.segments([ONE], [prompt_of(ONE)], **PLACE, clock=PhaseClock())


# ---- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "use"), [(1, "best"), (2, "union")])
def test_a_run_learns_each_sample_once_of_k_rollouts(
    world_size: int, use: str, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11, R12: batches count samples, no two requests of a step share a place, an epoch uses each sample once."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 4 // world_size, "num_samples": 9, "packing": False}
    settings |= {"num_train_epochs": 1, "best_of": {"rollouts_per_sample": 3, "use": use}}
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings)
    seen = run(config, monkeypatch, world_size)
    assert all_learned(seen) == everyone(9)
    calls = [call for one in seen for call in one.calls]
    assert Counter(i for call in calls for i in call.sample_ids) == everyone(9, times=3)
    places = [(c.global_step, c.micro_step_idx, c.first_req_idx + i) for c in calls for i in range(len(c.sample_ids))]
    assert len(set(places)) == len(places) == 27
    steps = steps_of(tmp_path)
    assert [step["num_segments"] for step in steps] == [4, 4, 1]
    for step in steps:
        assert step["metrics"]["scored"] == 3 * step["num_segments"]
        assert step["metrics"]["best_of/reward"] >= step["metrics"]["reward"]
        written = {name for name in step["metrics"] if name.startswith("best_of/")}
        assert written - {metric.name for metric in BEST_OF} == set(), "not declared in learner/run/metrics.py"


def test_a_step_of_which_nothing_is_learned_changes_nothing(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejection of everything: these answers have no end. The samples are used up all the same."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "num_samples": 4, "num_train_epochs": 1}
    settings["best_of"] = {"rollouts_per_sample": 2, "use": "rejection"}
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings)
    (seen,) = run(config, monkeypatch)
    assert all_learned([seen]) == everyone(4)
    assert not any(grad.any() for gradients in seen.gradients for grad in gradients.values())
    steps = steps_of(tmp_path)
    assert [step["metrics"]["best_of/learned"] for step in steps] == [0.0, 0.0]
    assert [step["loss"] for step in steps] == [0.0, 0.0]
    assert [step["num_tokens"] for step in steps] == [2, 2]


def test_ranks_packing_and_overlap_do_not_change_what_is_learned(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R31, D5: stage 2 on two ranks, with rollouts that arrive backwards, against one rank without packing."""
    stand_in(monkeypatch)

    def config(name: str, *, packing: bool) -> RunConfig:
        settings: dict[str, Any] = {"b_ratio": 1.0, "max_steps": 2, "max_length": 512, "packing": packing}
        values = stage2_config(tiny_text, tmp_path / name, **settings).model_dump(exclude_unset=True)
        rollouts = values["custom"]["extra"]["rollout_matching"]
        rollouts |= {"best_of": {"rollouts_per_sample": 3}, "decoding": {"max_new_tokens": 16, "temperature": 1.0}}
        return config_of(values)

    (plain,) = run(config("plain", packing=False), monkeypatch)
    seen = run(config("packed", packing=True), monkeypatch, 2)
    assert all_learned(seen) == Counter(plain.learned)
    for rank in seen:
        for found, wanted in zip(rank.gradients, plain.gradients, strict=True):
            for name in wanted:
                torch.testing.assert_close(found[name], wanted[name], atol=2e-5, rtol=1e-3)
