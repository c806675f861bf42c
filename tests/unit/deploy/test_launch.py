"""One entry point starts both programs and leaves nothing behind (R17), with small stand-ins for the two."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deploy import launch
from deploy.launch_file import LearnerLaunch, load_launch_config
from learner.__main__ import main as learner_main
from learner.config.load import load_config
from learner.run.lock import locked
from learner.run.output_dir import JOB, JOB_VARIABLE
from rollout_server.config import load_server_config
from shared import waits
from shared.addresses import free_port, listen
from shared.config.checks import READY
from shared.config.model import ConfigErrors, Mistake
from shared.config.parse import write_yaml
from shared.errors import DeadlineError
from tests.servers import wait_gone
from tests.tiers import slow
from tests.unit.learner.config.examples import SERVER, changed, minimal
from tests.unit.learner.data.annotations import FINE, jsonl

SAID = re.compile(r"^(\w+) pid (\d+) devices (\S+)$", re.MULTILINE)
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Run:
    """A launch that has ended."""

    code: int
    out: str
    err: str
    said: list[tuple[str, int, str]]  # name, process id, devices, of what started

    def names(self) -> list[str]:
        return [name for name, _, _ in self.said]


def files(
    folder: Path,
    models: Sequence[str],
    learner: str = "exits-0",
    *,
    server: dict[str, Any] | None = None,
    launch: dict[str, Any] | None = None,
) -> Path:
    """launch.yaml and what it names, for servers and a learner that behave as the words say."""
    entries = []
    for i, words in enumerate(models):
        write_yaml(folder / f"server_{i}.yaml", {"model": words, "port": free_port(), **(server or {})})
        entries.append({"config": str(folder / f"server_{i}.yaml")})
    write_yaml(folder / "learner.yaml", changed(minimal(), {"model.path": learner}))
    path = folder / "launch.yaml"
    whole = {"servers": entries, "learner": {"config": str(folder / "learner.yaml")}, "log_dir": str(folder / "logs")}
    write_yaml(path, changed(whole, launch or {}))
    return path


def start(path: Path, *overrides: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.unit.deploy.fake_launch", "--config", str(path), *overrides]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(launcher: subprocess.Popen[str], folder: Path) -> Run:
    """Wait for the end; nothing that was started may live on."""
    try:
        out, err = launcher.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        out, err = "", "Traceback of a launcher that hangs"
    text = "".join(log.read_text() for log in sorted((folder / "logs").glob("*"))) + out
    said = [(name, int(pid), devices) for name, pid, devices in SAID.findall(text)]
    assert wait_gone([pid for _, pid, _ in said], 30.0) == []
    assert "Traceback" not in err
    return Run(launcher.returncode, out, err, said)


def mistakes_of(path: Path) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigErrors) as error:
        load_launch_config(str(path))
    return error.value.mistakes


# ---- checked before anything starts --------------------------------------------------------------------------------


def test_a_device_is_in_one_process(tmp_path: Path) -> None:
    path = files(tmp_path, ["fine", "fine"], launch={"learner.devices": [3, 1], "learner.nproc": 2})
    text = path.read_text().replace("server_0.yaml", "server_0.yaml\n  devices: [0, 1]", 1)
    path.write_text(text.replace("server_1.yaml", "server_1.yaml\n  devices: [2, 2, 0]", 1))
    told = [(mistake.path, mistake.found, mistake.wanted) for mistake in mistakes_of(path)]
    assert told == [
        ("servers[1].devices", "device 2", "each device once (servers[1].devices has it too)"),
        ("servers[1].devices", "device 0", "each device once (servers[0].devices has it too)"),
        ("learner.devices", "device 1", "each device once (servers[0].devices has it too)"),
    ]


@pytest.mark.parametrize(("share", "fits"), [(0.4, True), (0.45, True), (0.46, False)])
def test_a_shared_device_needs_room_for_all_that_share_it(tmp_path: Path, share: float, fits: bool) -> None:
    """Two servers and the learner on device 0, where the learner's configuration allows it."""
    path = files(tmp_path, ["fine", "fine"], server={"gpu_memory_utilization": share}, launch={"learner.devices": [0]})
    for i in range(2):
        path.write_text(path.read_text().replace(f"server_{i}.yaml", f"server_{i}.yaml\n  devices: [0]", 1))
    told = [mistake.remedy for mistake in mistakes_of(path)]
    assert len(told) == 2
    assert all("allow_shared_gpu" in remedy for remedy in told)

    server = "custom.extra.rollout_matching.vllm.server.allow_shared_gpu"
    write_yaml(tmp_path / "learner.yaml", changed(minimal(), {"model.path": "exits-0", server: True}))
    if fits:
        load_launch_config(str(path))
        return
    (mistake,) = mistakes_of(path)
    assert mistake.path == "servers[1].devices"
    assert "0.92" in mistake.found
    assert "gpu_memory_utilization" in mistake.remedy


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"learner.nproc": 3, "learner.devices": [0, 1]}, "learner.devices"),
        ({"learner.nproc": 1, "learner.devices": [0, 1]}, "learner.devices"),
        ({"learner.nproc": 0}, "learner.nproc"),
        ({"learner.nproc": "2"}, "learner.nproc"),
        ({"learner.devices": [-1]}, "learner.devices[0]"),
        ({"servers": []}, "servers"),
        ({"ready_timeout_s": 0}, "ready_timeout_s"),
        ({"logdir": "x"}, "logdir"),
    ],
)
def test_bad_keys(tmp_path: Path, change: dict[str, Any], path: str) -> None:
    assert [mistake.path for mistake in mistakes_of(files(tmp_path, ["fine"], launch=change))] == [path]


@pytest.mark.parametrize(
    ("servers", "learner", "path"),
    [
        ({"count": 2}, {}, "servers[0].count"),
        ({}, {"nodes": 2}, "learner.nodes"),
        ({}, {"nodes": 2, "via": ["srun"]}, "learner.nodes"),
        ({"via": ["srun"], "devices": [0]}, {}, "servers[0].devices"),
        ({}, {"via": ["srun"], "devices": [0]}, "learner.devices"),
    ],
)
def test_r46_what_one_machine_cannot_do(
    tmp_path: Path, servers: dict[str, Any], learner: dict[str, Any], path: str
) -> None:
    launch_file = files(tmp_path, ["fine"])
    values = yaml.safe_load(launch_file.read_text())
    values["servers"][0] |= servers
    values["learner"] |= learner
    write_yaml(launch_file, values)
    assert [mistake.path for mistake in mistakes_of(launch_file)] == [path]


def test_r46_torchruns_of_several_machines_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = LearnerLaunch(config="run.yaml", nproc=8, nodes=2, max_restarts=3, via=["srun"], rendezvous="n2:29400")
    argv = launch.ranks_argv(learner)
    assert argv[0] == "srun"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in argv[1:3]
    assert {"--nnodes=2", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-endpoint=n2:29400"} <= set(argv)
    assert argv[-4:] == ["-m", "learner", "--config", "run.yaml"]
    [first], [second] = (
        [word for word in launch.ranks_argv(learner) if word.startswith("--rdzv-id")] for _ in range(2)
    )
    assert first != second


@pytest.mark.parametrize("devices", [[0], [0, 1, 2]])
def test_a_server_gets_as_many_devices_as_it_asks_for(devices: list[int], tmp_path: Path) -> None:
    """More devices would be idle, and nobody would say so."""
    path = files(tmp_path, ["fine"], server={"tensor_parallel_size": 2})
    path.write_text(path.read_text().replace("server_0.yaml", f"server_0.yaml\n  devices: {devices}", 1))
    (mistake,) = mistakes_of(path)
    found = f"{len(devices)} device(s)"
    assert (mistake.path, mistake.found, mistake.wanted[:2]) == ("servers[0].devices", found, "2,")


def test_two_servers_need_two_ports(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(files(tmp_path, ["fine", "fine"], server={"port": 9000}))
    assert (mistake.path, mistake.found) == ("servers[1].config", "127.0.0.1:9000")


def test_r16_the_learner_s_mistakes_do_not_wait_for_servers(tmp_path: Path) -> None:
    path = files(tmp_path, ["fine"])
    write_yaml(tmp_path / "learner.yaml", changed(minimal(), {"training.seed": -1, "training.max_steps": "x"}))
    run = finish(start(path), tmp_path)
    assert (run.code, run.out, run.said) == (2, "", [])
    assert [line.split(":")[0] for line in run.err.splitlines()] == ["training.seed", "training.max_steps"]


def test_the_mistakes_of_all_files_are_listed_each_once(tmp_path: Path) -> None:
    """The same server file may be named twice, for two devices."""
    path = files(tmp_path, ["fine", "fine"], server={"max_model_len": "x"})
    path.write_text(path.read_text().replace("server_1.yaml", "server_0.yaml"))
    write_yaml(tmp_path / "learner.yaml", changed(minimal(), {"training.seed": -1}))
    assert [mistake.path for mistake in mistakes_of(path)] == ["training.seed", "max_model_len"]


@pytest.mark.slow
def test_r16_a_folder_with_another_run_does_not_wait_for_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job's next start goes on there, and so does a learner that is told to."""
    path, run_dir = files(tmp_path, ["fine"]), tmp_path / "run"
    settings = changed(minimal(), {"model.path": "exits-0", "training.output_dir": str(run_dir)})
    write_yaml(tmp_path / "learner.yaml", settings)
    (run_dir / "checkpoint-1").mkdir(parents=True)
    (run_dir / "checkpoint-1/manifest.json").write_text("{}")
    (run_dir / JOB).write_text("job 17")
    run = finish(start(path), tmp_path)
    assert (run.code, run.out, run.said) == (2, "", [])
    assert "training.output_dir" in run.err
    assert "training.overwrite: true" in run.err
    for change, job in (({}, "17"), ({"training.resume_from_checkpoint": "latest"}, "")):
        write_yaml(tmp_path / "learner.yaml", changed(settings, change))
        monkeypatch.setenv(JOB_VARIABLE, job)
        run = finish(start(path), tmp_path)
        assert (run.code, run.err, run.names()) == (0, "", ["server", "learner"])


def test_r16_a_folder_that_a_run_holds_does_not_wait_for_servers(tmp_path: Path) -> None:
    path, run_dir = files(tmp_path, ["fine"]), tmp_path / "run"
    write_yaml(
        tmp_path / "learner.yaml", changed(minimal(), {"model.path": "exits-0", "training.output_dir": str(run_dir)})
    )
    with locked(run_dir):
        run = finish(start(path), tmp_path)
    assert (run.code, run.out, run.said) == (2, "", [])
    assert f"process {os.getpid()}" in run.err


def test_r16_all_that_keeps_a_learner_from_starting_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "llava").mkdir()
    (tmp_path / "llava" / "config.json").write_text('{"model_type": "llava"}')
    path = files(tmp_path, ["fine"], str(tmp_path / "llava"))
    resumed = {"training.output_dir": str(tmp_path / "run"), "training.resume_from_checkpoint": "latest"}
    write_yaml(tmp_path / "learner.yaml", changed(yaml.safe_load((tmp_path / "learner.yaml").read_text()), resumed))
    run = finish(start(path), tmp_path)
    assert (run.code, run.out, run.said) == (2, "", [])
    keys = {line.split(":")[0] for line in run.err.splitlines()}
    assert keys == {"training.resume_from_checkpoint", "model.path"}


# ---- --check -------------------------------------------------------------------------------------------------------


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as ended:
        launch.app(["--config", str(path), "--check"])
    return int(ended.value.code or 0), capsys.readouterr().out.splitlines()


def test_check_says_what_the_learners_own_check_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts nothing, asks no server, and knows the devices. Two processes may share one where that is allowed."""
    path, port = files(tmp_path, ["fine"], launch={"learner.devices": [0]}), free_port()
    path.write_text(path.read_text().replace("server_0.yaml", "server_0.yaml\n  devices: [0]", 1))
    entry = {"base_url": f"http://127.0.0.1:{port}", "group_port": free_port()}
    values = {
        "model.path": str(HERE.parent / "demo" / "checkpoint"),
        "data.train": str(jsonl(tmp_path, *[FINE] * 6)),
        f"{SERVER}.servers": [entry],
        f"{SERVER}.allow_shared_gpu": True,
    }
    write_yaml(tmp_path / "learner.yaml", changed(minimal(), values))
    monkeypatch.setattr(launch, "launch", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert learner_main(["check", "--config", str(tmp_path / "learner.yaml")]) == 0
    *learner, last = capsys.readouterr().out.splitlines()
    code, told = checked(path, capsys)
    assert (code, told[: len(learner)], told[-1][: len(last)]) == (0, learner, last)
    assert "  devices: 1 devices" in told
    assert "  not checked: reachable: the launch starts them" in told
    with listen("127.0.0.1", port, what="a test"):
        code, told = checked(path, capsys)
    assert (code, told[-1].startswith(f"not {last}")) == (1, True)
    (line,) = [line for line in told if line.startswith("  wrong: ")]
    assert f"127.0.0.1:{port}" in line
    write_yaml(tmp_path / "learner.yaml", changed(minimal(), {**values, "data.train": "nowhere.jsonl"}))
    code, told = checked(path, capsys)
    assert (code, any(line.startswith("wrong: data.train: ") for line in told)) == (2, True)


def test_check_says_what_is_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = checked(files(tmp_path, ["fine"], launch={"learner.via": ["srun"]}), capsys)
    assert (code, told[-1], "learner.via" in told[0]) == (0, READY, True)


def test_check_is_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.app(["--config", str(files(tmp_path, ["fine"])), "--check", "--to", "slurm", "--out", str(tmp_path)])
    assert (ended.value.code, "--to" in capsys.readouterr().err) == (2, True)


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_r17_servers_then_learner_each_on_its_devices(tmp_path: Path) -> None:
    """Servers have a URL prefix, a token that `/ready/` does not need, and a log each."""
    server = {"url_prefix": "/a/b", "tensor_parallel_size": 2}
    path = files(tmp_path, ["fine", "fine"], "exits-7", server=server, launch={"learner.devices": [3]})
    for i, devices in enumerate(("[0, 2]", "[1, 4]")):
        name = f"server_{i}.yaml"
        path.write_text(path.read_text().replace(name, f"{name}\n  devices: {devices}", 1))
    run = finish(start(path), tmp_path)
    assert (run.code, run.err) == (7, "")
    assert [(name, devices) for name, _, devices in run.said] == [
        ("server", "0,2"),
        ("server", "1,4"),
        ("learner", "3"),
    ]
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["server_0.log", "server_1.log"]
    assert run.out.index("ready after") < run.out.index("learner: ") < run.out.index("learner pid")


def test_r46_each_start_goes_through_its_command(tmp_path: Path) -> None:
    """A server's second one does too. `ready` is asked at the address that the group has."""
    note = tmp_path / "note.sh"
    note.write_text(f'echo "$1" >> {tmp_path}/notes; shift; exec "$@"\n')
    path = files(tmp_path, ["leaves-1-times"], "waits-for-2-1")
    values = yaml.safe_load(path.read_text())
    values["servers"][0]["via"] = ["bash", str(note), "server"]
    values["learner"]["via"] = ["bash", str(note), "learner"]
    write_yaml(path, values)
    run = finish(start(path), tmp_path)
    assert run.code == 0, run.err
    assert (tmp_path / "notes").read_text().split() == ["server", "learner", "server"]


@pytest.mark.slow
def test_without_devices_the_environment_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    run = finish(start(files(tmp_path, ["fine"])), tmp_path)
    assert (run.code, [devices for _, _, devices in run.said]) == (0, ["6", "6"])


def test_readiness_has_a_deadline(tmp_path: Path) -> None:
    run = finish(start(files(tmp_path, ["fine", "never-expires"], launch={"ready_timeout_s": 3600.0})), tmp_path)
    assert (run.code, run.names()) == (1, ["server", "server"])
    assert "not ready in time" in run.err
    assert "server_1.log" in run.err
    assert "raise ready_timeout_s" in run.err


@pytest.mark.parametrize("paused_in", ["look", "sleep"])
def test_a_launcher_that_was_paused_looks_again_before_it_gives_up(
    monkeypatch: pytest.MonkeyPatch, paused_in: str
) -> None:
    """The server went on meanwhile, and may be ready."""
    now, paused_s, answers = [0.0], [0.0], iter(["HTTP 503", "", *["HTTP 503"] * 99])

    def look(*args: object) -> str:
        paused_s[0] += 100 * (paused_in == "look")
        return next(answers)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        paused_s[0] += 100 * (paused_in == "sleep")

    monkeypatch.setattr(launch, "look", look)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now[0] + paused_s[0]))
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(waits, "awake_s", lambda: now[0])
    with subprocess.Popen(["sleep", "60"]) as popen:
        try:
            server = launch.Process("server", popen)
            assert launch.wait_ready(server, "http://127.0.0.1:1", 10.0) >= 100
            with pytest.raises(DeadlineError):
                launch.wait_ready(server, "http://127.0.0.1:1", 10.0)
        finally:
            popen.kill()


@pytest.mark.parametrize("servers", [slow(["dies"]), ["never", "dies"]])
def test_an_early_death_is_told_with_its_last_words(tmp_path: Path, servers: list[str]) -> None:
    """It is reported at once, also while another server is waited for."""
    run = finish(start(files(tmp_path, servers, launch={"ready_timeout_s": 600.0})), tmp_path)
    assert (run.code, "learner" in run.names()) == (1, False)
    assert "exit code 1" in run.err
    assert "out of memory, said the fake" in run.err


@pytest.mark.slow
def test_a_server_that_ends_while_the_learner_runs_is_started_again(tmp_path: Path) -> None:
    """R40: as often as it may be; then it is given up, and the run ends when no server is left."""
    run = finish(start(files(tmp_path, ["leaves"], "waits"), "servers[0].max_restarts=2"), tmp_path)
    assert (run.code, run.names().count("server")) == (1, 3)
    assert "exit code 5" in run.err
    said = [line for line in run.out.splitlines() if "server 0 ended" in line]
    assert ["Restart 1 of 2" in said[0], "Restart 2 of 2" in said[1], "Given up" in said[2]] == [True] * 3


def test_the_run_goes_on_beside_a_restarted_server_and_one_that_is_given_up(tmp_path: Path) -> None:
    overrides = ("servers[1].max_restarts=0",)
    run = finish(start(files(tmp_path, ["leaves-1-times", "leaves", "fine"], "waits-for-4-2"), *overrides), tmp_path)
    assert (run.code, run.err) == (0, "")
    assert run.names().count("server") == 4
    assert "server 0 ready again" in run.out
    assert "Given up after 0 restart(s)" in run.out


def test_only_the_process_that_was_started_is_believed_to_be_ready(tmp_path: Path) -> None:
    """An older server on the port answers 200 too."""
    run = finish(start(files(tmp_path, ["other-expires"], launch={"ready_timeout_s": 3600.0})), tmp_path)
    assert (run.code, run.names()) == (1, ["server"])
    assert "another server (id old)" in run.err


def read_until_the_learner_runs(launcher: subprocess.Popen[str]) -> str:
    """Return what the launcher said so far."""
    assert launcher.stdout is not None
    seen = ""
    while "learner pid" not in seen:
        line = launcher.stdout.readline()
        assert line
        seen += line
    return seen


def test_a_killed_launcher_takes_its_children_with_it(tmp_path: Path) -> None:
    """SIGKILL, also for a server that ignores SIGTERM. What a server starts has its own guard (`end_with_server`)."""
    launcher = start(files(tmp_path, ["fine", "fine"], "waits"))
    seen = read_until_the_learner_runs(launcher)
    launcher.kill()
    text = seen + "".join(log.read_text() for log in (tmp_path / "logs").glob("*"))
    started = [int(pid) for _, pid, _ in SAID.findall(text)]
    assert len(started) == 3
    assert wait_gone(started, 30) == []


def test_keys_can_be_set_on_the_command_line(tmp_path: Path) -> None:
    run = finish(start(files(tmp_path, ["fine"]), "learner.nproc=0", "ready_timeout=3"), tmp_path)
    assert (run.code, run.said) == (2, [])
    assert {line.split(":")[0] for line in run.err.splitlines()} == {"learner.nproc", "ready_timeout"}


@pytest.mark.parametrize("signum", [signal.SIGTERM, slow(signal.SIGINT), slow(signal.SIGHUP)])
def test_a_signal_stops_everything(tmp_path: Path, signum: signal.Signals, without_nohup: None) -> None:
    """This includes a server that ignores SIGTERM, and the processes that it started."""
    launcher = start(files(tmp_path, ["stubborn", "fine"], "waits"))
    seen = read_until_the_learner_runs(launcher)
    os.kill(launcher.pid, signum)
    run = finish(launcher, tmp_path)
    assert run.code == 128 + signum
    assert f"stopped by {signum.name}" in run.err
    assert sorted(run.names()) == ["child", "server", "server"]
    ((_, learner, _),) = [(name, int(pid), devices) for name, pid, devices in SAID.findall(seen)]
    assert wait_gone([learner], 30.0) == []
    assert "did not stop within 1 s: killed" in run.err


HERE = Path(__file__).parents[3] / "deploy" / "qwen3vl_4b"
SHIPPED = sorted(path for path in HERE.glob("launch*.yaml") if path.name != "launch-cluster.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_launch_file_is_right(path: Path, workdir: Path) -> None:
    """Paths in it are as seen from the repository's root; each learner's servers are those that it starts."""
    (workdir / "deploy").symlink_to(path.parents[1])
    launch = load_launch_config(str(path))
    learner = load_config(launch.learner.config, world_size=launch.learner.nproc)
    started = {load_server_config(server.config).base_url for server in launch.servers}
    asked = learner.custom.extra.rollout_matching.vllm.server.servers
    assert {entry.base_url for entry in asked} == started
