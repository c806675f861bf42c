"""A server's answer as a rollout: log-probabilities of sampled tokens (R37, R39)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from learner.config.sections.decoding import DecodingConfig
from learner.records import Rollout
from learner.rollout.requests import Decodings, asks_pixels, infer_request, read_rollout, request_config
from shared.errors import RolloutError
from shared.wire import RolloutOutput
from tests.unit.learner.rollout.fakes import output, sample

SAMPLED = DecodingConfig(decode_mode="sample", temperature=1.0)


def read(
    logprobs: list[list[float]], *, stop: tuple[int, float | None] | None = (7, -0.5), asked: bool = True
) -> Rollout:
    """Read the answer of three tokens and a stop token with this id and log-probability."""
    answer: dict[str, Any] = output({"messages": [{"content": "request 3"}], "uuid": "u"}, seed=11)
    answer |= {"response_token_ids": [3, 4, 5], "rollout_logprobs": logprobs}
    if stop is not None:
        answer["response"]["choices"][0] |= {"stop_token_id": stop[0], "stop_logprob": stop[1]}
    return read_rollout(
        RolloutOutput.model_validate(answer),
        sample=sample(3),
        request_uuid="u",
        seed=11,
        served=None,
        base_url="http://h:1",
        logprobs=asked,
    )


def test_the_stop_token_s_comes_last() -> None:
    rollout = read([[-1.0, -2.0, -3.0]])
    assert (rollout.logprobs, rollout.stop_token_id) == ((-1.0, -2.0, -3.0, -0.5), 7)


def test_an_answer_that_was_cut_has_no_stop_token() -> None:
    rollout = read([[-1.0, -2.0, -3.0]], stop=None)
    assert (rollout.logprobs, rollout.stop_token_id) == ((-1.0, -2.0, -3.0), None)


@pytest.mark.parametrize(
    ("logprobs", "stop"),
    [
        ([[-1.0, -2.0]], (7, -0.5)),
        ([[-1.0, -2.0, -3.0, -4.0]], (7, -0.5)),
        ([[-1.0, -2.0, -3.0]], (7, None)),
        ([[-1.0, -2.0]], None),
        ([], (7, -0.5)),
    ],
)
def test_each_sampled_token_must_have_one(logprobs: list[list[float]], stop: tuple[int, float | None] | None) -> None:
    """Otherwise the gradient would silently count the rollout as the learner's own."""
    with pytest.raises(RolloutError, match="rollout_logprobs"):
        read(logprobs, stop=stop)


def test_none_are_wanted_that_were_not_asked_for() -> None:
    assert read([], stop=(7, None), asked=False).logprobs is None


def test_they_are_asked_for_of_drawn_and_of_greedy_answers() -> None:
    assert request_config(SAMPLED, logprobs=True).logprobs
    assert not request_config(SAMPLED).logprobs
    assert request_config(SAMPLED, greedy=True, logprobs=True).logprobs
    assert not request_config(SAMPLED, greedy=True).logprobs


def test_another_temperature_is_asked_for_without_the_runs_limits() -> None:
    """R48: from all tokens, whatever the run decodes by; nothing else changes."""
    configured = DecodingConfig(decode_mode="sample", temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=99)
    decodings = Decodings(configured, logprobs=True)
    assert decodings.of() == request_config(configured, logprobs=True)
    assert not Decodings(configured).of().logprobs
    assert Decodings(configured).of(greedy=True).logprobs
    assert decodings.of(greedy=True) == request_config(configured, greedy=True, logprobs=True)
    drawn = decodings.of(temperature=1.0)
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens) == (1.0, 1.0, -1, 99)
    assert drawn.logprobs


def test_a_request_asks_for_pixels_only_if_it_is_told_to() -> None:
    assert not infer_request(sample(0)).pixels
    assert infer_request(sample(0), pixels=True).pixels


def test_a_share_of_the_samples_with_images_asks_for_pixels_another_one_in_each_step() -> None:
    samples = [replace(sample(i), images=("a.png",)) for i in range(400)]
    steps = [[asks_pixels(0.25, one, global_step=step) for one in samples] for step in (0, 0, 1)]
    assert steps[0] == steps[1] != steps[2], "all rollouts of a sample in a step decide alike"
    assert all(0.15 < sum(asks) / len(asks) < 0.35 for asks in steps)
    assert all(asks_pixels(1.0, one, global_step=3) for one in samples)
    assert not any(asks_pixels(0.0, one, global_step=3) for one in samples)
    assert not any(asks_pixels(1.0, replace(one, images=()), global_step=3) for one in samples), "nothing to send"
