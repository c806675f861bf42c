"""Tests of how a vLLM output is read (R03, R09), on outputs of its shape; real ones:
tests/integration/test_backends.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import RolloutError
from shared.generation import Prompt, read_cached_score, read_generation, read_scores

STOPS = {7, 8}


def output(token_ids: list[int], finish_reason: str) -> Any:
    completion = SimpleNamespace(token_ids=token_ids, finish_reason=finish_reason, text="text")
    return SimpleNamespace(prompt_token_ids=[1, 2], outputs=[completion])


@pytest.mark.parametrize(
    ("token_ids", "finish_reason", "kept"),
    [
        ([3, 4, 7], "stop", [3, 4]),
        ([8], "stop", []),
        ([3, 4], "stop", [3, 4]),  # a stop string: no token ended it
        ([3, 4, 7], "length", [3, 4, 7]),  # cut at a token that would have ended it
        ([], "length", []),
    ],
)
def test_responses_are_stop_trimmed(token_ids: list[int], finish_reason: str, kept: list[int]) -> None:
    read = read_generation(output(token_ids, finish_reason), STOPS)
    assert (read.response_token_ids, read.finish_reason, read.prompt_token_ids) == (kept, finish_reason, [1, 2])


def test_an_answer_that_was_ended_for_repeating_itself_is_cut_off() -> None:
    read = read_generation(output([3, 7, 3, 7], "repetition"), STOPS)
    assert (read.response_token_ids, read.finish_reason, read.stop_token_id) == ([3, 7, 3, 7], "length", None)


def test_log_probabilities_are_those_of_the_kept_tokens() -> None:
    """R39: and the stop token's, which is cut off, by itself."""
    answer = output([3, 4, 7], "stop")
    answer.outputs[0].logprobs = [{i: SimpleNamespace(logprob=-float(i)), 0: None} for i in (3, 4, 7)]
    read = read_generation(answer, STOPS)
    assert (read.response_token_ids, read.logprobs) == ([3, 4], [-3.0, -4.0])
    assert (read.stop_token_id, read.stop_logprob) == (7, -7.0)
    answer.outputs[0].logprobs[1] = {4: SimpleNamespace(logprob=float("nan"))}
    with pytest.raises(RolloutError, match="not finite"):
        read_generation(answer, STOPS)


def test_log_probabilities_in_vllm_s_flat_form_are_read_alike() -> None:
    """A position has its sampled token first, and others after it if they were asked for."""
    answer = output([3, 4, 7], "stop")
    answer.outputs[0].logprobs = SimpleNamespace(
        start_indices=[0, 2, 3], token_ids=[3, 9, 4, 7], logprobs=[-3.0, -0.1, -4.0, -7.0]
    )
    read = read_generation(answer, {7})
    assert (read.response_token_ids, read.logprobs) == ([3, 4], [-3.0, -4.0])
    assert read.stop_logprob == -7.0
    answer.outputs[0].logprobs.logprobs[2] = float("nan")
    with pytest.raises(RolloutError):
        read_generation(answer, {7})


def scored(*logprobs: float) -> Any:
    """Return a prompt of two tokens, a response of tokens 10, 11, ...; at each position vLLM gives more than its
    token."""
    response = list(range(10, 10 + len(logprobs)))
    rows = [
        {i: SimpleNamespace(logprob=p), 99: SimpleNamespace(logprob=-0.1)}
        for i, p in zip(response, logprobs, strict=True)
    ]
    return SimpleNamespace(prompt_token_ids=[1, 2, *response], prompt_logprobs=[None, {2: None}, *rows])


def test_scores_are_those_of_the_response() -> None:
    scores = read_scores(scored(-1.0, -2.0, -3.0), 3)
    assert (scores.logprobs, scores.prompt_token_ids) == ([-1.0, -2.0, -3.0], [1, 2])


def test_a_score_through_the_prefix_cache_is_that_of_the_forced_token() -> None:
    answer = output([12], "length")
    answer.outputs[0].logprobs = [{12: SimpleNamespace(logprob=-3.5)}]
    assert read_cached_score(answer) == -3.5
    answer.outputs[0].logprobs[0][12].logprob = float("nan")
    with pytest.raises(RolloutError, match="not finite"):
        read_cached_score(answer)


def test_scores_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(RolloutError, match="not finite") as caught:
        read_scores(scored(-1.0, float("nan")), 2)
    assert "learning_rate" in caught.value.remedy


def test_a_prompt_without_images_brings_no_images() -> None:
    """An empty list would make vLLM look for a processor that a text-only model does not have."""
    assert Prompt(token_ids=[1], images=[]).for_engine() == {"prompt_token_ids": [1]}
