"""The benchmark of changes against full syncs: what it sends, and how it judges (`bench.deltas`)."""

from __future__ import annotations

import pytest
import torch

from bench import deltas
from bench.changed import changed_share
from learner.policy.weights import checksum


def test_as_many_values_change_as_were_asked_for() -> None:
    values = deltas.Values("tiny")
    before = {name: tensor.clone() for name, tensor in values.tensors.items()}
    assert {spec.dtype for spec in values.weight_specs()} == {"bfloat16"}
    values.change(0.05)
    assert changed_share(before, values.tensors) == pytest.approx(0.05, rel=0.05)


def test_a_server_with_other_weights_fails_its_canary() -> None:
    tensors = [torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)]
    found = deltas.logprobs(map(checksum, tensors))
    tensors[1].view(torch.int16)[3] ^= 1
    assert deltas.logprobs(map(checksum, tensors)) != found
    assert all(-1000.0 <= value <= -1.0 for value in found)


def test_the_ratio_at_the_smallest_rate_is_judged() -> None:
    def syncs(seconds: float, sent_bytes: int) -> list[dict[str, float]]:
        return [{"seconds": seconds, "num_bytes": 1e9, "sent_bytes": sent_bytes, "pause_s": 0.1}] * 3

    found = {"full": syncs(10.0, 10**9), "1e-6": syncs(0.9, 10**7), "1e-5": syncs(2.0, 10**8), "1e-4": syncs(4.0, 1)}
    made = {figure.name: figure for figure in deltas.figures(found)}
    judged = [figure for figure in made.values() if figure.wanted is not None]
    assert [(figure.value, figure.good) for figure in judged] == [(pytest.approx(0.09), True)]
    assert made["the same as a rate"].value == pytest.approx(0.8)
    found["1e-6"] = syncs(1.1, 10**7)
    assert [figure.good for figure in deltas.figures(found) if figure.wanted is not None] == [False]
