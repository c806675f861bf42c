"""Tests of the way from samples to segments, with real task, tokenizer and target: one per sample, in order, from both
sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench.tiny import build_tokenizer
from learner.config.sections.loss import LossConfig
from learner.config.sections.task import TaskConfig
from learner.journal.log import PhaseClock
from learner.records import DetectionObject, EncodedPrompt, Rollout, Sample, Segment
from learner.rollout.backend import MicroStep
from learner.steps.segments import GroundTruthSource, RolloutSource, SegmentSource
from learner.tasks.detection.task import DetectionTask
from learner.tasks.rewards import Rewards
from shared.errors import PromptMismatchError

TOKENIZER: Any = build_tokenizer()
TASK = DetectionTask(TaskConfig(), TOKENIZER)
PLACE: dict[str, int] = {"global_step": 5, "micro_step_idx": 1, "first_req_idx": 4}
IGNORED = -100


def sample(i: int) -> Sample:
    objects = tuple(
        DetectionObject(desc=desc, kind="bbox_2d", bins=(100 * k, 50, 100 * k + 60, 700 + i))
        for k, desc in enumerate(("one", "two", "three"))
    )
    turn = {"role": "user", "content": "Detect."}
    return Sample(sample_id=f"s{i}", messages=(turn,), images=(), objects=objects, width=100, height=100)


SAMPLES = [sample(i) for i in range(3)]
PROMPTS = [EncodedPrompt(token_ids=(5, 6, 7 + i), vision=None) for i in range(3)]


class Answers:
    """A backend with fixed texts."""

    def __init__(self, texts: Sequence[str], prompts: Sequence[EncodedPrompt] = PROMPTS) -> None:
        self.texts, self.prompts = texts, prompts
        self.asked: dict[str, Any] = {}

    def generate(self, samples: Sequence[Sample], **place: Any) -> list[Rollout]:
        self.asked = place
        return [
            Rollout(
                sample=one,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=tuple(TOKENIZER.encode(text, add_special_tokens=False)),
                finish_reason="stop",
                ver=9,
                seed=1,
            )
            for one, prompt, text in zip(samples, self.prompts, self.texts, strict=True)
        ]

    def close(self) -> None: ...


def truth(one: Sample, count: int = 3) -> str:
    return TASK.serialize(one.objects[:count], after=None).text


def segments_in(source: SegmentSource, samples: Sequence[Sample], prompts: Sequence[EncodedPrompt]) -> list[Segment]:
    """Return the segments of a micro-step at PLACE."""
    step = MicroStep(samples=samples, micro_step_idx=PLACE["micro_step_idx"], first_req_idx=PLACE["first_req_idx"])
    return source.segments(step, prompts, global_step=PLACE["global_step"], clock=PhaseClock())


def segments(source: SegmentSource) -> list[Any]:
    return segments_in(source, SAMPLES, PROMPTS)


def rollout_source(backend: Answers) -> RolloutSource:
    return RolloutSource(backend, TASK, Rewards(tokenizer=TOKENIZER), loss=LossConfig())


def answer_text(segment: Any) -> str:
    return TOKENIZER.decode(segment.input_ids[segment.prompt_length :].tolist(), skip_special_tokens=False)


def test_ground_truth_is_the_whole_answer_and_all_of_it_is_learned() -> None:
    """R35."""
    made = segments(GroundTruthSource(TASK, loss=LossConfig()))
    for segment, one, prompt in zip(made, SAMPLES, PROMPTS, strict=True):
        assert segment.sample_id == one.sample_id
        assert segment.ver is None
        assert tuple(segment.input_ids[: segment.prompt_length]) == prompt.token_ids
        assert answer_text(segment) == truth(one) + TOKENIZER.eos_token
        assert (segment.labels[segment.prompt_length :] == segment.input_ids[segment.prompt_length :]).all()


def test_rollouts_are_completed_by_what_they_missed() -> None:
    """One answer that is right and short, one that says nothing usable, one that is complete: each becomes the whole
    truth, in the order of the samples, and only what was missed is learned as text."""
    backend = Answers([truth(SAMPLES[0], 1), "no idea", truth(SAMPLES[2])])
    made = segments(rollout_source(backend))
    assert backend.asked == PLACE
    assert [segment.sample_id for segment in made] == ["s0", "s1", "s2"]
    assert [segment.ver for segment in made] == [9, 9, 9]
    for segment, one in zip(made, SAMPLES, strict=True):
        assert answer_text(segment) == truth(one) + TOKENIZER.eos_token
    assert [(s.stats["matched"], s.stats["missed"], s.stats["unusable"]) for s in made] == [
        (1.0, 2.0, 0.0),
        (0.0, 3.0, 1.0),
        (3.0, 0.0, 0.0),
    ]
    num_learned = [int(np.sum(segment.labels != IGNORED)) for segment in made]
    assert num_learned[2] < num_learned[0] < num_learned[1]


def test_another_prompt_than_the_learner_s_is_refused() -> None:
    """R03: sample and place are named."""
    other = [PROMPTS[0], EncodedPrompt(token_ids=(5, 9, 8), vision=None), PROMPTS[2]]
    backend = Answers([truth(one) for one in SAMPLES], other)
    with pytest.raises(PromptMismatchError, match=r"sample 's1'.*token 1\b"):
        segments(rollout_source(backend))


def test_nothing_in_nothing_out() -> None:
    """A rank without samples at an epoch's end still asks, with nothing: backends may count calls."""
    source = rollout_source(Answers([], []))
    assert segments_in(source, [], []) == []
