"""A run can be repeated from the `config.yaml` in its folder: same samples, same rollouts, same weights to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.config.load import load_config
from shared.config.parse import dump_yaml
from tests.unit.learner.trainer_world import make_config, run


@pytest.mark.parametrize("variant", ["sft", "rollout_matching_sft"])
def test_the_resolved_configuration_repeats_the_run(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """The run itself writes it; what came from a base or a variable is in it."""
    settings = {"variant": variant, "max_steps": 2, "effective_batch_size": 4, "per_device_train_batch_size": 2}
    base = make_config(tiny_text, tmp_path, **settings).model_dump(mode="json", exclude={"model"})
    (tmp_path / "base.yaml").write_text(dump_yaml(base))
    (tmp_path / "run.yaml").write_text("base: base.yaml\nmodel: {path: '${MODEL}'}\n")
    config = load_config(tmp_path / "run.yaml", world_size=1, env={"MODEL": str(tiny_text)})

    (first,) = run(config, monkeypatch)
    left = Path(config.training.output_dir).rename(tmp_path / "kept") / "config.yaml"
    again = load_config(left, world_size=1, env={})
    assert again == config
    (second,) = run(again, monkeypatch)

    assert second.rows == first.rows
    assert second.calls == first.calls
    assert len(first.gradients) == 2
    for name, weight in first.weights.items():
        assert torch.equal(second.weights[name], weight), name
    assert (Path(again.training.output_dir) / "config.yaml").read_bytes() == left.read_bytes()
