"""The GPU benchmark without a GPU: its arithmetic, its model, and that it says what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.figures import Figure
from bench.gpu import infer, models, results, run, sync
from learner.records import SyncReceipt


def receipt(seconds: float) -> SyncReceipt:
    return SyncReceipt(
        ver=1, mode="full", seconds=seconds, num_bytes=8 * 10**9, num_tensors=3, canary_gap=0.01, canary_gap_max=0.1
    )


def test_a_sync_is_told_as_seconds_rate_and_share_of_the_wire() -> None:
    figures = sync._figures("8B", [receipt(0.05), receipt(0.04), receipt(0.1)], [320.0])
    found = {figure.name: figure for figure in figures}
    one = found["sync, 8B to one server, all checks included"]
    assert (one.value, one.good) == (0.05, True)
    assert found["the same as a rate"].value == pytest.approx(160.0)
    assert found["what the whole sync keeps of the raw broadcast"].value == pytest.approx(0.5)
    assert sync._several(one, [receipt(0.06), receipt(0.08), receipt(0.1)], 3).good is False
    assert sync._against_trl(one, [0.1, 0.12, 0.09])[1].value == pytest.approx(2.0)


def test_ratios_are_of_the_rounds_that_belong_together() -> None:
    rates = {"straight to the engine": [100.0, 200.0], "through /infer/": [98.0, 190.0]}
    found = {figure.name: figure for figure in infer._figures("4B", 256, rates)}
    against = found["4B, /infer/ against straight to the engine"]
    assert list(against.samples) == [0.98, 0.95]
    assert against.good is False


def test_figures_survive_the_way_between_processes(tmp_path: Path) -> None:
    figures = [Figure(name="a", value=1.0, unit="s", wanted=2.0, at_least=False, samples=[1.0, 1.5])]
    results.write(tmp_path / "figures.json", figures)
    assert results.read(tmp_path / "figures.json") == figures


def test_the_model_speaks_with_every_token(tmp_path: Path) -> None:
    num_parameters = models.build(tmp_path, "tiny", device=torch.device("cpu"))
    tokenizer = models.grown_tokenizer(4096)
    assert num_parameters > 4096 * 64
    assert len(tokenizer) == 4096
    assert all(tokenizer.decode([i]) for i in range(1000, 4096))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_the_machine_is_too_small_for_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run._measure("several", tmp_path) == []
    assert "needs 4 GPUs" in capsys.readouterr().err
