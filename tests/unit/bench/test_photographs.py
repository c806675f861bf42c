"""The benchmark of photographs without a GPU: its configurations, and what it makes of a run's events."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bench.photographs import MODES, Topology, Workload, busy_shares, run_config, server_config
from bench.runs import Server
from deploy.launch import Process
from learner.config.load import load_config
from rollout_server.config import load_server_config
from shared.config.parse import write_yaml


@pytest.mark.parametrize("text", ["2+2", "1+1"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_a_configuration_that_the_programs_take(text: str, mode: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')  # both programs refuse a folder without a model
    topology = Topology.read(text)
    assert topology.name == text
    devices, learner = topology.devices(on_gpu=True)
    assert sorted([device for mine in devices for device in mine] + learner) == list(range(topology.num_gpus))
    process = Process("server", subprocess.Popen([sys.executable, "-c", ""]))
    process.popen.wait()
    servers = [Server(process=process, url=f"http://127.0.0.1:{9000 + i}") for i in range(len(devices))]
    work = Workload(
        model=model,
        data=tmp_path,
        folder=tmp_path,
        steps=20,
        samples_per_step=64,
        max_new_tokens=512,
        row_tokens=16_384,
        on_gpu=True,
        limit_s=10.0,
        modes=(mode,),
    )
    path = tmp_path / "run.yaml"
    write_yaml(path, run_config(MODES[mode], topology, servers, work, tmp_path / "run"), "test")
    config = load_config(str(path), world_size=len(learner))
    assert (config.stage2_ab is not None) is mode.startswith("async")
    for on_gpu in (True, False):
        write_yaml(path, server_config(model, tmp_path, on_gpu=on_gpu, adapts=True, compiles=False), "test")
        assert load_server_config(path).enforce_eager is not on_gpu


@pytest.mark.parametrize("text", ["3", "3+", "0+1", "a+b"])
def test_a_topology_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        Topology.read(text)


def test_rollouts_count_as_busy_beside_learning_and_before_it() -> None:
    ahead = {"step_s": 4.0, "learn_s": 3.0, "sync_s": 0.5, "stage2_ab/rollout_s": 3.6}
    in_turn = {"step_s": 4.0, "learn_s": 1.0, "rollout_s": 2.8}
    assert busy_shares([ahead]) == {"learner": 0.75, "rollouts": 0.9}
    assert busy_shares([ahead, in_turn]) == {"learner": 0.5, "rollouts": 0.8}
