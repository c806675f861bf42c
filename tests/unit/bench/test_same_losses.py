"""The comparison of two records of `bench.same_losses`: what it finds, and what it must not find."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench import same_losses
from bench.same_losses import NUM_STEPS, VARIANTS, compare, first_difference, read_run, weights_digest
from shared.errors import ServerError

LOSS = 0.1 + 0.2


def step(loss: float = LOSS, num_supervised: int = 7) -> dict[str, Any]:
    counts = {"channel": "A", "num_segments": 4, "num_rows": 2, "num_tokens": 9, "num_supervised": num_supervised}
    return {"event": "step", **counts, "loss": loss, "grad_norm": 1.0, "ver": 3}


def write_run(folder: Path, steps: list[dict[str, Any]], weights: dict[str, Any]) -> Path:
    checkpoint = folder / f"checkpoint-{NUM_STEPS}"
    checkpoint.mkdir(parents=True)
    save_file(weights, checkpoint / "model.safetensors")
    lines = [json.dumps(event) for event in [{"event": "sync"}, *steps]]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    return read_run(write_run(tmp_path / "run", [step()] * NUM_STEPS, {"w": np.zeros(2, np.float32)}))


def test_a_record_holds_every_bit_and_equals_itself(run: dict[str, Any]) -> None:
    assert [float.fromhex(s["loss"]) for s in run["steps"]] == [LOSS] * NUM_STEPS
    assert first_difference(run, json.loads(json.dumps(run))) is None


def test_the_first_difference_is_told_by_step_and_field(run: dict[str, Any]) -> None:
    """The last bit of a loss, and what came before it where that differs too."""
    other = copy.deepcopy(run)
    other["weights"] = "f" * 64
    assert str(first_difference(run, other)).startswith("final weights")
    other["steps"][4]["loss"] = float(np.nextafter(LOSS, 1)).hex()
    assert str(first_difference(run, other)).startswith("step 5, loss")
    other["steps"][4]["num_supervised"] = 8
    assert str(first_difference(run, other)).startswith("step 5, num_supervised: 7 there, 8 here")
    other["steps"][2]["grad_norm"] = None  # was not finite
    assert str(first_difference(run, other)).startswith("step 3, grad_norm")


def test_a_run_that_lacks_a_step_is_no_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [step()] * (NUM_STEPS - 1), {"w": np.zeros(2, np.float32)})
    with pytest.raises(ServerError, match=f"{NUM_STEPS - 1} steps"):
        read_run(folder)


def test_the_digest_is_of_names_shapes_and_bytes(tmp_path: Path) -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones(2, np.float32)
    variants: dict[str, dict[str, Any]] = {
        "same": {"b": b, "a": a},
        "other name": {"c": b, "a": a},
        "other shape": {"b": b, "a": a.reshape(2, 2)},
        "other dtype": {"b": b, "a": a.view(np.int32)},
        "other bytes": {"b": b, "a": np.nextafter(a, 9, dtype=np.float32)},
    }
    plain = weights_digest(_checkpoint(tmp_path / "plain", {"a": a, "b": b}))
    digests = {name: weights_digest(_checkpoint(tmp_path / name, tensors)) for name, tensors in variants.items()}
    assert [name for name, digest in digests.items() if digest == plain] == ["same"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServerError, match="no weights"):
        weights_digest(tmp_path / "empty")


def _checkpoint(folder: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": folder.name})
    return folder


def test_a_variant_that_is_missing_is_not_the_same(run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    record = {**same_losses.circumstances(), "variants": {"sft": run}}
    assert compare(record, record, ["sft"])
    assert not compare(record, record, ["sft", "lora"])
    assert not compare({**record, "variants": {}}, record, ["sft"])
    assert "warning" not in capsys.readouterr().out
    elsewhere = copy.deepcopy(record)
    elsewhere["hardware"]["cpu"] = "another"
    assert compare(elsewhere, record, ["sft"]), "equal bits are equal, wherever they were made"
    assert "hardware.cpu: another there" in capsys.readouterr().out


def test_a_changed_key_reaches_the_configuration(tmp_path: Path) -> None:
    changes = same_losses.changes_of(["training.seed=8", "loss.missed_order=random"])
    config = same_losses.merged(same_losses.learner_config(VARIANTS["sft"], tmp_path, tmp_path, None), changes)
    assert config["training"]["seed"] == 8
    assert config["training"]["max_steps"] == NUM_STEPS
    assert config["loss"] == {"missed_order": "random"}
