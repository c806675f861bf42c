"""An update is what was scored, and what was sent (R09)."""

from __future__ import annotations

import re

import pytest
import torch

from learner.policy.weights import checksum
from learner.sync.server_delivery import check_reply, check_sent
from shared.errors import SyncError
from shared.sync.buckets import digest_of
from shared.wire import Bucket, ScoreReply, TensorSpec, UpdateWeightsReply

WEIGHTS = {name: torch.full((4,), float(i)) for i, name in enumerate("abcd", start=1)}
SUMS = {name: checksum(tensor) for name, tensor in WEIGHTS.items()}
PLAN = ["ab", "cd"]  # tensors of each bucket
BUCKETS = [
    Bucket(tensors=[TensorSpec(name=name, dtype="float32", shape=[4]) for name in names], num_bytes=32)
    for names in PLAN
]


def sent(**replaced: torch.Tensor) -> list[torch.Tensor]:
    """Return the checksum of each bucket, some tensors of which are others."""
    weights = WEIGHTS | replaced
    return [checksum(torch.cat([weights[name] for name in names])) for names in PLAN]


def reply(**changes: int) -> UpdateWeightsReply:
    fields = {"ver": 7, "num_bytes": 64, "num_tensors": 4} | changes
    scores = ScoreReply(ver=7, logprobs=[], prompt_token_ids=[])
    return UpdateWeightsReply(**fields, seconds=1.0, drain_s=0.0, scores=scores)


def test_the_weights_that_were_scored_pass() -> None:
    check_sent(BUCKETS, sent(), SUMS)


@pytest.mark.parametrize(("name", "index", "names"), [("a", 0, "a to b"), ("d", 1, "c to d")])
def test_an_old_tensor_is_found_with_its_bucket(name: str, index: int, names: str) -> None:
    old = WEIGHTS[name].clone()
    old[0] += 1e-3
    with pytest.raises(SyncError, match=re.escape(f"1 of 2 buckets differ; first bucket {index}: {names}")):
        check_sent(BUCKETS, sent(**{name: old}), SUMS)


def test_a_bucket_is_compared_only_if_all_its_tensors_were_scored() -> None:
    some = {name: SUMS[name] for name in "acd"}
    check_sent(BUCKETS, sent(a=torch.zeros(4)), some)
    with pytest.raises(SyncError, match="first bucket 1"):
        check_sent(BUCKETS, sent(a=torch.zeros(4), c=torch.zeros(4)), some)
    check_sent(BUCKETS, sent(a=torch.zeros(4), c=torch.zeros(4)), {})


@pytest.mark.parametrize("field", ["ver", "num_bytes", "num_tensors"])
def test_a_server_must_confirm_the_update_that_was_sent(field: str) -> None:
    check_reply(7, BUCKETS, reply(), "http://a")
    with pytest.raises(SyncError, match="http://a: ") as caught:
        check_reply(7, BUCKETS, reply(**{field: 3}), "http://a")
    assert (caught.value.wanted, "3" in caught.value.found) == ("(7, 64, 4)", True)


def test_the_digest_depends_on_every_seal_and_on_their_order() -> None:
    seals = [torch.full((32,), i, dtype=torch.uint8) for i in range(3)]
    others = [seals[:2], seals[::-1], [*seals[:2], seals[0]]]
    assert len({digest_of(one) for one in [seals, *others]}) == 4
    assert digest_of(seals) == digest_of([seal.clone() for seal in seals])
