"""The arithmetic of the parts, their model, and that the part without a server runs. No clock decides anything here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from bench import infer, models, stages, sync, training, watch
from learner.records import SyncReceipt


def test_the_stages_are_measured_in_every_format(tmp_path: Path) -> None:
    figures = stages.measure(tmp_path, num_rollouts=2, num_objects=3, passes=2)
    assert [len(figure.samples) for figure in figures] == [2, 2, 2, 2]
    assert all(figure.value > 0 for figure in figures)
    for word in ("index_map", "array", "tokens", "digits"):
        assert sum(word in figure.name for figure in figures) == 2


def test_idle_is_what_is_neither_rollout_nor_computing_nor_sync() -> None:
    step = {"event": "step", "metrics": {"step_s": 2.0, "rollout_s": 1.0, "learn_s": 0.5, "sync_s": 0.3, "data_s": 0.2}}
    sync = {"event": "sync", "seconds": 0.25}
    events: list[Mapping[str, Any]] = [sync, step] * (training.WARM_UP_STEPS + 1)
    found = {figure.name: figure.value for figure in training.figures(events)}
    assert found["sync, all checks included"] == 0.25
    assert found["idle share of a step (not rollout, not computing, not sync)"] == pytest.approx(0.1)
    assert found["sync's share of a step"] == pytest.approx(0.15)


def test_resident_memory_of_this_process_is_there() -> None:
    assert watch.resident_bytes(os.getpid()) > 10 << 20


def receipt(mode: Literal["full", "adapter"], seconds: float, num_bytes: int) -> SyncReceipt:
    sizes = {"num_bytes": num_bytes, "num_tensors": 2}
    return SyncReceipt(ver=1, mode=mode, seconds=seconds, canary_gap=seconds / 10, canary_gap_max=0.1, **sizes)


def test_both_kinds_of_sync_stand_side_by_side() -> None:
    """R08: bytes and seconds of each, and what the adapter saves."""
    full = [receipt("full", s, 40 << 20) for s in (0.3, 0.5, 0.4)]
    adapter = [receipt("adapter", s, 1 << 20) for s in (0.1, 0.3, 0.2)]
    found = {figure.name: figure.value for figure in sync.adapter_figures(full, adapter)}
    assert (found["full sync, merged"], found["adapter sync, rank 16"]) == (0.4, 0.2)
    assert (found["full sync, merged: bytes"], found["adapter sync, rank 16: bytes"]) == (40.0, 1.0)
    assert found["bytes of an adapter sync against a full one"] == pytest.approx(1 / 40)
    assert found["largest canary gap of an adapter sync"] == pytest.approx(0.03)


def test_the_first_token_comes_after_data_sync_and_rollout() -> None:
    """R02: what follows the token is no part of it, nor are the first steps."""
    step = {"event": "step", "metrics": {"step_s": 2.0, "data_s": 0.1, "sync_s": 0.3, "rollout_s": 0.2, "learn_s": 1.0}}
    slow = {"event": "step", "metrics": {"rollout_s": 9.0}}
    events: list[Mapping[str, Any]] = [slow] * training.WARM_UP_STEPS + [step, {"event": "sync", "seconds": 5.0}]
    assert training.first_token_figure("server", events).samples == [pytest.approx(0.6)]


def test_a_sync_has_seconds_rate_and_share_of_the_raw_broadcast() -> None:
    receipts = [receipt("full", seconds, 8 * 10**9) for seconds in (0.05, 0.04, 0.1)]
    found = {figure.name: figure for figure in sync.full_figures("8B", receipts, [320.0])}
    one = found["sync, 8B to one server, all checks included"]
    assert (one.value, one.good) == (0.05, True)
    assert found["the same as a rate"].value == pytest.approx(160.0)
    assert found["what the whole sync keeps of the raw broadcast"].value == pytest.approx(0.5)
    assert found["canary gap, worst"].value == pytest.approx(0.01)
    several = [receipt("full", seconds, 8 * 10**9) for seconds in (0.06, 0.08, 0.1)]
    assert sync.several_figure(one, several, 3).good is False
    assert sync.trl_figures(one, [0.1, 0.12, 0.09])[1].value == pytest.approx(2.0)


def test_ratios_are_of_the_rounds_that_belong_together() -> None:
    rates = {"straight to the engine": [100.0, 200.0], "through /infer/": [98.0, 190.0]}
    found = {figure.name: figure for figure in infer.text_figures("4B", 256, rates)}
    assert "4B, /infer/ against through TRL's server" not in found
    against = found["4B, /infer/ against straight to the engine"]
    assert list(against.samples) == [0.98, 0.95]
    assert against.good is False
    assert found["4B, 256 requests of 256 tokens, through /infer/"].value == 144.0


def test_the_model_speaks_with_every_token(tmp_path: Path) -> None:
    num_parameters = models.build(tmp_path, "tiny", device=torch.device("cpu"))
    tokenizer = models.grown_tokenizer(4096)
    assert num_parameters > 4096 * 64
    assert len(tokenizer) == 4096
    assert all(tokenizer.decode([i]) for i in range(1000, 4096))
