"""The canary's comparison, and the buckets that a sync is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.sync.canary import Canary, score_items
from learner.sync.source import check_specs, sealed_buckets
from shared.canary import CanaryGap, cached_positions
from shared.errors import CanaryError, PromptMismatchError, RolloutError, SyncError
from shared.sync.buckets import plan_buckets, unpack
from shared.wire import ScoreReply
from tests.syncs import scorer_of
from tests.unit.learner.sync.fakes import PROMPT_IDS, Weights, canary_items

LOGPROBS = st.lists(st.floats(-50, 0), min_size=2, max_size=2)
CPU = torch.device("cpu")


def canary(tolerance: float = 1.0, num_items: int = 2) -> Canary:
    return Canary(items=canary_items(num_items), scorer=scorer_of(tuple), tolerance=tolerance)


def reply(logprobs: list[list[float]], prompts: int = 2) -> ScoreReply:
    return ScoreReply(ver=3, logprobs=logprobs, prompt_token_ids=[list(PROMPT_IDS)] * prompts)


@given(st.lists(LOGPROBS, min_size=2, max_size=2), st.lists(LOGPROBS, min_size=2, max_size=2))
def test_the_gap_is_the_mean_and_the_largest_difference(learner: list[list[float]], served: list[list[float]]) -> None:
    found = canary(1e9).compare(learner, reply(served), "u")
    gaps = [abs(a - b) for here, there in zip(learner, served, strict=True) for a, b in zip(here, there, strict=True)]
    assert found.mean == pytest.approx(sum(gaps) / 4)
    assert found.max == max(gaps)


@pytest.mark.parametrize("worst", [-3.0, math.nan, -math.inf])
def test_above_the_tolerance_the_worst_token_is_named(worst: float) -> None:
    """A gap that is no number is above every tolerance."""
    with pytest.raises(CanaryError) as caught:
        canary(0.4).compare([[-1, -1], [-1, -1]], reply([[-1, -1], [-1, worst]]), "http://u")
    assert "http://u" in caught.value.what
    assert "token 1 of sample 's1'" in caught.value.found
    causes = caught.value.remedy
    assert causes.index("dtype") < causes.index("model configuration") < causes.index("canary_tolerance")


def test_what_the_prefix_cache_gives_has_a_mean_of_its_own() -> None:
    """Few tokens are read through it: among all others they would not count."""
    learner = [[-1.0] * 1000] * 2
    wrong = [[-1.0] * 4, [-1.0, -1.0, -1.0, -3.0]]
    answer = reply(learner).model_copy(update={"cached_logprobs": wrong})
    items = [replace(item, response_token_ids=(3,) * 1000) for item in canary_items(2)]
    checked = replace(canary(0.2), items=items)
    with pytest.raises(CanaryError, match="prefix cache") as caught:
        checked.compare(learner, answer, "u")
    assert "0.2500" in caught.value.found
    assert "token 875 of sample 's1'" in caught.value.found
    right = answer.model_copy(update={"cached_logprobs": [[-1.0] * 4, [-1.0, -1.0, -1.0, -1.5]]})
    assert checked.compare(learner, right, "u") == CanaryGap(mean=0.0, max=0.5)


@given(st.integers(1, 500))
def test_tokens_that_are_read_through_the_cache_are_different_ones_of_the_answer(num_tokens: int) -> None:
    positions = cached_positions(num_tokens)
    assert positions == sorted(set(positions))
    assert set(positions) <= set(range(num_tokens))
    assert len(positions) == min(num_tokens, 4)


@pytest.mark.parametrize(
    ("configured", "learner", "served", "tolerance"),
    [
        (None, torch.float32, torch.float32, 0.01),
        (None, torch.float32, torch.bfloat16, 0.1),
        (None, torch.bfloat16, torch.float32, 0.1),
        (None, torch.float32, None, 0.1),  # servers that differ, or do not say
        (0.3, torch.float32, torch.float32, 0.3),
        (0.05, torch.bfloat16, torch.bfloat16, 0.05),
    ],
)
def test_the_tolerance_follows_the_precision(
    configured: float | None, learner: torch.dtype, served: torch.dtype | None, tolerance: float
) -> None:
    checked = Canary(items=canary_items(1), scorer=scorer_of(tuple), tolerance=configured, dtype=learner)
    assert checked.tolerance_with(served) == tolerance
    assert checked.expected("a", 1, [[-1.0, -1.0]], served).tolerance == tolerance
    with pytest.raises(CanaryError):
        checked.compare([[-1.0, -1.0]], reply([[-1.0, -1.0 - 2.1 * tolerance]], 1), "u", served)


@pytest.mark.parametrize(("logprobs", "prompts"), [([[-1.0, -1.0]], 2), ([[-1.0], [-1.0, -1.0]], 2),
                                                    ([[-1.0, -1.0], [-1.0, -1.0]], 1)])  # fmt: skip
def test_a_reply_of_another_shape(logprobs: list[list[float]], prompts: int) -> None:
    with pytest.raises(RolloutError, match="/score/"):
        canary().compare([[-1, -1], [-1, -1]], reply(logprobs, prompts), "u")


def test_other_tokens_through_the_cache() -> None:
    answer = reply([[-1.0, -1.0]] * 2).model_copy(update={"cached_logprobs": [[-1.0, -1.0], [-1.0]]})
    with pytest.raises(RolloutError, match="/score/"):
        canary().compare([[-1, -1], [-1, -1]], answer, "u")


def test_prompts_are_compared_too() -> None:
    """R03."""
    other = ScoreReply(ver=1, logprobs=[[-1.0, -1.0]], prompt_token_ids=[[5, 6, 8]])
    with pytest.raises(PromptMismatchError, match="s0"):
        canary(num_items=1).compare([[-1, -1]], other, "u")


def test_a_canary_brings_its_images() -> None:
    item = score_items(canary_items(1))[0]
    assert item.request.images == ["/data/0.png"]
    assert item.response_token_ids == [3, 4]


@given(st.integers(1, 3000))
def test_buckets_hold_every_tensor_once_whatever_their_size(bucket_bytes: int) -> None:
    """R09: the plan comes from the specs, the bytes from a second pass, and they fit."""
    weights = Weights()
    plan = plan_buckets(weights.weight_specs(torch.bfloat16), bucket_bytes)
    buckets = sealed_buckets(weights, plan, key=b"key", ver=1, dtype=torch.bfloat16, device=CPU)
    found = dict(pair for specs, buffer in zip(plan, buckets, strict=True) for pair in unpack(buffer, specs))
    assert list(found) == list(weights.tensors)
    for name, tensor in weights.named_weights(torch.bfloat16):
        assert torch.equal(found[name], tensor)


class Unannounced(Weights):
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().named_weights(dtype)
        yield "extra", torch.zeros(1)


def test_a_weight_that_was_not_announced() -> None:
    weights = Unannounced()
    plan = plan_buckets(weights.weight_specs(), 400)
    with pytest.raises(SyncError, match="extra"):
        list(sealed_buckets(weights, plan, key=b"key", ver=1, dtype=None, device=CPU))


def test_names_must_be_there_and_differ() -> None:
    specs = Weights().weight_specs()
    check_specs(specs)
    for wrong in ([], [*specs, specs[0]]):
        with pytest.raises(SyncError):
            check_specs(wrong)
