"""Topologies without a GPU: the configurations, what is watched, and what a run's events come to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

import bench.watch
from bench import topologies
from bench.runs import Server
from bench.topologies import MODES, WARM_UP_STEPS, Topology, Workload, markdown, run_config, summary, taken_away
from bench.watch import family, gpu_use, peak_memory, read_smi, watch
from deploy.launch import Process
from learner.config.load import load_config
from rollout_server.config import load_server_config
from shared.config.parse import write_yaml
from tests.waits import wait_until


def work(folder: Path, *, on_gpu: bool) -> Workload:
    return Workload(
        model=folder / "model",
        data=folder,
        folder=folder,
        steps=20,
        samples_per_step=64,
        max_new_tokens=192,
        num_gpus=4 if on_gpu else 0,
        modes=tuple(MODES),
        limit_s=10.0,
    )


def ended_servers(number: int) -> list[Server]:
    process = Process("server", subprocess.Popen([sys.executable, "-c", ""]))
    process.popen.wait()
    return [Server(process=process, url=f"http://127.0.0.1:{9000 + i}") for i in range(number)]


@pytest.mark.parametrize("text", ["3+1", "2+2", "1+1"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_a_configuration_that_the_programs_take(text: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "qwen3"}'
    )  # both programs refuse a folder without a model
    topology = Topology.read(text)
    assert topology.name == text
    servers, learner = topology.devices(4)
    assert sorted([device for mine in servers for device in mine] + learner) == list(range(len(servers) + len(learner)))
    served = ended_servers(len(servers))
    path = tmp_path / "run.yaml"
    write_yaml(path, run_config(topology, mode, served, work(tmp_path, on_gpu=True), tmp_path / "run"), "test")
    config = load_config(str(path), world_size=len(learner))
    assert config.stage2_ab is None or config.stage2_ab.async_actor_learner.enabled is mode.endswith("ahead")
    for on_gpu in (True, False):
        write_yaml(path, topologies.server_config(work(tmp_path, on_gpu=on_gpu)), "test")
        assert load_server_config(path).enforce_eager is not on_gpu


@pytest.mark.parametrize("text", ["3", "3+", "0+1", "a+b"])
def test_a_topology_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        Topology.read(text)


def test_utilisation_is_read_per_gpu_and_a_cut_line_is_left_out() -> None:
    use = read_smi("0, 100, 5000\n1, 0, 10\n0, 50, 6000\n1, 20, 10\n0, 1")
    assert (use[0].busy_mean, use[0].memory_mib) == (0.75, 6000.0)
    assert use[1].busy_median == pytest.approx(0.1)
    assert read_smi("") == {}


SMI = """#!/bin/sh
while true; do echo "3, 50, 700"; echo "3, 100, 900"; touch "$0.ran"; sleep 0.02; done
"""


def test_gpus_are_sampled_while_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in nvidia-smi's place prints the same lines."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with gpu_use(20, ["3"]) as use:
        wait_until((tmp_path / "nvidia-smi.ran").exists)
        assert use == {}
    assert list(use) == [3]
    assert use[3].memory_mib == 900.0
    assert use[3].busy_mean == pytest.approx(0.75, abs=0.26)


def test_the_most_memory_that_a_program_held_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def resident_bytes(pid: int) -> int:
        found.append(resident(pid))
        return found[-1]

    resident = bench.watch.resident_bytes
    monkeypatch.setattr(bench.watch, "resident_bytes", resident_bytes)
    code = "import sys; held = b'x' * (64 << 20); sys.stdin.readline(); del held; print('left', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with peak_memory({"holder": holder.pid}) as peaks:
        wait_until(lambda: peaks["holder"] > 64 << 20)
        print(file=holder.stdin, flush=True)
        assert holder.stdout.readline() == "left\n"
        wait_until(lambda: found[-1] < 64 << 20)
    assert peaks["holder"] > 64 << 20
    holder.communicate("\n")


WRITER = """
import sys, pathlib
for name, num_bytes in (("new", 300_000), ("newer", 150_000)):
    pathlib.Path(sys.argv[1], name).write_bytes(bytes(num_bytes))
    input()
"""


def test_what_a_program_writes_is_counted_and_a_large_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(bytes(200_000))
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WRITER!r}, {str(tmp_path)!r}])"
    starter = subprocess.Popen([sys.executable, "-c", f"input(); {child}"], stdin=subprocess.PIPE, text=True, bufsize=1)
    assert starter.stdin is not None
    with watch({"one": starter.pid, "me": os.getpid()}, [tmp_path], large_bytes=100_000) as seen:
        assert os.getpid() in family(os.getpid())
        print(file=starter.stdin)
        wait_until(lambda: len(seen.new_files) == 1)
        print(file=starter.stdin)
        wait_until(lambda: len(seen.new_files) == 2)  # a look at the files follows one at what was written
    starter.communicate("\n")
    assert seen.new_files == {str(tmp_path / "new"): 300_000, str(tmp_path / "newer"): 150_000}
    assert 300_000 <= seen.written["one"] < 1_000_000
    assert seen.gpus == {} or all(0 <= use.busy_mean <= 1 for use in seen.gpus.values())


def test_a_file_that_is_taken_away_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("w")
    with taken_away(file):
        assert not file.exists()
    assert file.read_text() == "w"


def test_a_runs_events_come_to_rates_and_phases() -> None:
    steps = [
        {
            "event": "step",
            "channel": "B",
            "metrics": {"step_s": 2.0, "rollout_s": 1.0, "learn_s": 0.5, "rollout_tokens": 100.0},
        }
        for _ in range(WARM_UP_STEPS + 4)
    ]
    syncs = [{"event": "sync", "seconds": 0.1 * i, "num_bytes": 10**9, "canary_gap": 0.01} for i in range(1, 6)]
    row = summary([*steps, *syncs])
    assert row["steps_per_s"] == pytest.approx(0.5)
    assert row["rollout_tokens_per_s"] == pytest.approx(50.0)
    assert row["phases_s"]["rollout_s"] == 1.0
    assert row["sync_s"] == pytest.approx(0.45)
    assert row["wall"] == pytest.approx(2.0 / 1.5, abs=1e-3)
    assert row["synced_bytes"] == 5 * 10**9
    watched = {"gpus": {"0": {"busy_mean": 0.5}}, "written_bytes": {"server 0": 2e6}, "new_large_files": {}}
    text = markdown(
        [{"topology": "3+1", "mode": "m", **row, **watched}, {"topology": "2+2", "mode": "n", "error": "e"}]
    )
    assert "| 3+1 | m | 0.50 | 1.00, 0.50, 0.00, 0.00 | 50% | 5 | 0.450 | 5.00 | 2.0 | none |" in text
    assert "| 2+2 | n | e |" in text


def test_rollouts_beside_learning_count_in_the_wall_time() -> None:
    """In step a rollout is no phase of its own: what is hidden behind learning is a metric of the step (D9)."""
    metrics = {"step_s": 1.0, "learn_s": 0.6, "wait_s": 0.2, "sync_s": 0.1, "stage2_ab/rollout_s": 0.9}
    steps = [{"event": "step", "channel": "B", "metrics": metrics} for _ in range(WARM_UP_STEPS + 2)]
    ground_truth = {"event": "step", "channel": "A", "metrics": {"step_s": 0.7, "learn_s": 0.6}}
    sync = {"event": "sync", "seconds": 0.1, "num_bytes": 1, "canary_gap": 0.0}
    row = summary([*steps, ground_truth, sync])
    assert row["wall"] == pytest.approx(0.9 / 1.5, abs=1e-3)
    assert summary([*[ground_truth] * (WARM_UP_STEPS + 1), sync])["wall"] is None


@pytest.mark.parametrize(("num_gpus", "servers", "learner"), [(1, [[0], [0], [0]], [0]), (2, [[0], [0], [0]], [1])])
def test_too_few_gpus_are_shared(tmp_path: Path, num_gpus: int, servers: list[list[int]], learner: list[int]) -> None:
    topology = Topology.read("3+1")
    assert topology.devices(num_gpus) == (servers, learner)
    assert topology.fits(num_gpus, shared=True)
    assert not topology.fits(num_gpus, shared=False)
    assert not Topology.read("2+2").fits(num_gpus, shared=True), "ranks of a learner need GPUs of their own"
    few = replace(work(tmp_path, on_gpu=True), num_gpus=num_gpus, shared=True)
    config = run_config(topology, next(iter(MODES)), ended_servers(3), few, tmp_path / "run")
    server = config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]
    assert server["allow_shared_gpu"] == (num_gpus == 1), "servers that share a GPU without the learner need no leave"


def test_each_servers_answers_and_failed_calls_are_counted() -> None:
    def call(url: str, number: int, error: str = "") -> dict[str, object]:
        return {"base_url": url, "num_requests": number, "error": error}

    step = {"event": "step", "channel": "B", "metrics": {"step_s": 1.0, "learn_s": 0.6, "stage2_ab/rollout_s": 0.9}}
    sync = {"event": "sync", "seconds": 0.1, "num_bytes": 1, "canary_gap": 0.0}
    first = {"event": "rollout_call", "calls": [call("a", 4), call("b", 5), call("c", 3, "gone")]}
    second = {"event": "rollout_call", "calls": [call("a", 4)]}
    row = summary([*[step] * (WARM_UP_STEPS + 1), sync, first, second])
    assert (row["requests_by_server"], row["failed_calls"]) == ([8, 5], 1)
