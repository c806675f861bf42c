"""Each check's verdicts, on made-up situations: nothing here looks at a real server or depends on this machine."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from learner.__main__ import main
from learner.config.load import config_of
from learner.config.plan import resolve
from learner.doctor import finding as finding_module
from learner.doctor import machine, server_checks
from learner.doctor.check import run_checks
from learner.doctor.finding import Finding, SeenServer, Situation, fail, ok, skipped, warn
from learner.doctor.server_checks import reason_not_to_join
from learner.sync.canary import CanaryItem
from shared.addresses import free_port
from shared.errors import DeadlineError, MediaError, ServerUnreachableError, UnauthorizedError
from shared.wire import ScoreReply, ServerStatus
from tests.unit.learner.config.examples import ROLLOUT, SERVER, changed, minimal
from tests.unit.learner.config.model_sizes import MODELS
from tests.unit.learner.doctor.test_data_report import write as write_run
from tests.unit.learner.sync.fakes import PROMPT_IDS, canary_items

URL = "http://127.0.0.1:8000"
VLLM = f"{ROLLOUT}.vllm"
Usage = namedtuple("Usage", "total used free")


def situation(changes: dict[str, Any] | None = None, **fields: Any) -> Situation:
    local = {f"{SERVER}.servers": [{"base_url": URL, "group_port": 9000}]}
    config = config_of(changed(minimal(), local | (changes or {})))
    return Situation(config=config, plan=resolve(config, 1), **{"environment": {}, **fields})


def status(**fields: Any) -> ServerStatus:
    idle = {"gate": "serving", "ver": 3, "world_size": 1, "in_flight": 0, "waiting": 0, "versions": {}}
    sizes = {"vocab_size": 9, "max_model_len": 9}
    return ServerStatus(**{"server_id": "x", "model": "m", **sizes, **idle, **fields})


def seen(**fields: Any) -> SeenServer:
    return SeenServer(base_url=URL, group_port=9000, **{"status": status(), **fields})


def with_reply(prompt_ids: tuple[int, ...] = PROMPT_IDS, **fields: Any) -> Situation:
    reply = ScoreReply(ver=3, logprobs=[[0.0]], prompt_token_ids=[list(prompt_ids)])
    probe: CanaryItem = canary_items(1)[0]
    return situation(servers=[seen(**{"reply": reply, **fields})], probe=probe)


# ---- the machine ---------------------------------------------------------------------------------------------------


def test_python_is_in_range() -> None:
    assert machine.python_version(situation()).verdict == "ok"


def test_libraries_out_of_range_are_named() -> None:
    wanted = [
        Requirement(text) for text in ("torch>=2.11,<2.14", "typing_extensions>=4", 'vllm>=0.26; extra == "cuda"')
    ]
    fine = {"torch": "2.13.0+cpu", "typing-extensions": "4.1"}
    assert machine.compare_libraries(wanted, fine).verdict == "ok"
    old = machine.compare_libraries(wanted, {"torch": "2.10.1", "vllm": "0.20.0"})
    assert old.verdict == "fail"
    for words in ("torch 2.10.1", "typing_extensions is not installed", "vllm 0.20.0"):
        assert words in old.text


@pytest.mark.parametrize(("limit", "verdict"), [(256, "warn"), (4096, "ok"), (machine.resource.RLIM_INFINITY, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, verdict: str) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (limit, limit))
    assert machine.open_files(situation()).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(64 << 20, "warn"), (2 << 30, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, verdict: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
    assert machine.shared_memory(situation(), tmp_path).verdict == verdict
    assert machine.shared_memory(situation(), tmp_path / "none").verdict == "skipped"


def test_disk_space_is_reckoned_from_the_models_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights and two moments each, for the checkpoints kept and the one being written."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    keys = {"model.path": str(tmp_path), "training.output_dir": str(tmp_path / "a/b"), "training.save_total_limit": 2}
    for free, verdict in ((14_999, "fail"), (15_000, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(0, 0, free))
        assert machine.disk_space(situation(keys)).verdict == verdict
    assert machine.disk_space(situation({"training.output_dir": str(tmp_path)})).verdict == "skipped"


# ---- data, devices, ports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "visible", "verdict"), [(2, None, "ok"), (1, None, "warn"), (0, None, "warn"), (1, "0,1", "ok")]
)
def test_devices_that_this_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, visible: str | None, verdict: str
) -> None:
    """With one GPU, or none, the quickstart's launch file was said to be ready. Under CUDA_VISIBLE_DEVICES the numbers
    are others."""
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: num_gpus)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    finding = machine.devices(situation(devices=[0, 1], environment=environment))
    assert finding.verdict == verdict
    assert (str(num_gpus) in finding.text and "colocate" in finding.remedy) == (verdict == "warn")
    assert machine.devices(situation(devices=[])).verdict == "ok"
    assert machine.devices(situation()).verdict == "skipped"


def test_ports_in_use() -> None:
    """A running server has its own port, unless a launch is to start it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        group = {f"{SERVER}.servers": [{"base_url": f"http://127.0.0.1:{free_port()}", "group_port": port}]}
        assert machine.ports(situation(group)).verdict == "warn"
        assert machine.ports(situation(group, devices=[])).verdict == "warn"
        own = {f"{SERVER}.servers": [{"base_url": f"http://127.0.0.1:{port}", "group_port": free_port()}]}
        assert machine.ports(situation(own)).verdict == "ok"
        finding = machine.ports(situation(own, devices=[]))
        assert (finding.verdict, str(port) in finding.text) == ("fail", True)
    far = situation({f"{SERVER}.servers": [{"base_url": "http://far:1", "group_port": 5}]})
    assert machine.ports(far).verdict == "skipped"


def test_a_real_local_broadcast() -> None:
    assert machine.local_broadcast(situation()).verdict == "ok"


# ---- servers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ServerUnreachableError("gone"), "warn"),
        (DeadlineError("silent"), "fail"),
        (UnauthorizedError("token"), "fail"),
        (None, "ok"),
    ],
)
def test_reachable(error: Any, verdict: str) -> None:
    server = seen() if error is None else seen(status=None, error=error)
    assert server_checks.reachable(situation(servers=[server])).verdict == verdict


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "ok"),
        ({"gate": "poisoned"}, "warn"),
        ({"gate": "updating"}, "warn"),
        ({"in_flight": 1}, "warn"),
        ({"protocol": 99}, "fail"),
    ],
)
def test_ready(fields: dict[str, Any], verdict: str) -> None:
    assert server_checks.ready(situation(servers=[seen(status=status(**fields))])).verdict == verdict


def test_another_model(tiny_text: Path) -> None:
    here = {"model.path": str(tiny_text)}
    same = seen(status=status(architecture={"model_type": "qwen3", "hidden_size": "64"}))
    other = seen(status=status(architecture={"model_type": "qwen3", "hidden_size": "128"}))
    assert server_checks.same_model(situation(here, servers=[same])).verdict == "ok"
    found = server_checks.same_model(situation(here, servers=[same, other]))
    assert (found.verdict, "hidden_size 128, not 64" in found.text) == ("fail", True)


@pytest.mark.parametrize(("max_lora_rank", "verdict"), [(16, "ok"), (8, "warn"), (0, "warn")])
def test_adapters(max_lora_rank: int, verdict: str) -> None:
    """R08: of the run's own rank (16); a warning, as the run would sync all weights instead."""
    lora = {"model.lora": {}, f"{VLLM}.enable_lora": True, f"{VLLM}.sync.mode": "auto"}
    server = seen(status=status(max_lora_rank=max_lora_rank))
    assert server_checks.adapters(situation(lora, servers=[server])).verdict == verdict
    assert server_checks.adapters(situation(servers=[server])).verdict == "skipped"
    if verdict == "warn":
        strict = lora | {f"{VLLM}.sync.fallback_to_full": False}
        assert server_checks.adapters(situation(strict, servers=[server])).verdict == "fail"


def test_one_side_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_checks.torch.version, "cuda", None)
    monkeypatch.setattr(server_checks.torch.cuda, "is_available", lambda: False)
    gpu = seen(status=status(versions={"cuda": "13.0", "nccl": "2.28.3"}))
    assert server_checks.same_libraries(situation(servers=[seen()])).verdict == "ok"
    assert server_checks.same_libraries(situation(servers=[gpu])).verdict == "fail"


def test_prompts_and_images() -> None:
    """R03: and an image that the server may not read is told with the server's own words."""
    assert server_checks.prompt(with_reply()).verdict == "ok"
    assert server_checks.prompt(with_reply((1, 2, 3))).verdict == "fail"
    refused = MediaError("image 'a.png' can't be used", found="no such file", wanted="below /data", remedy="check")
    no_image = with_reply(reply=None, reply_error=refused)
    assert server_checks.prompt(no_image).verdict == "skipped"
    assert server_checks.image(with_images(no_image, "a.png")) == fail(
        f"{URL}: {refused.what}: no such file", "check (wanted below /data)"
    )
    assert server_checks.image(with_images(with_reply(), "a.png")).verdict == "ok"
    assert server_checks.image(with_images(with_reply())).verdict == "skipped"


def with_images(situation: Situation, *images: str) -> Situation:
    assert situation.probe is not None
    sample = replace(situation.probe.sample, images=images)
    return replace(situation, probe=replace(situation.probe, sample=sample))


@pytest.mark.parametrize(
    "check", [server_checks.ready, server_checks.same_libraries, server_checks.image, server_checks.prompt]
)
def test_without_a_server_nothing_is_claimed(check: Any) -> None:
    down = situation(servers=[seen(status=None, error=ServerUnreachableError("gone"))])
    assert check(down).verdict == "skipped"


def test_the_learners_own_model_is_looked_at_without_a_server_too(tiny_text: Path, tmp_path: Path) -> None:
    down = seen(status=None, error=ServerUnreachableError("gone"))
    assert server_checks.same_model(situation({"model.path": str(tiny_text)}, servers=[down])).verdict == "skipped"
    nowhere = server_checks.same_model(situation({"model.path": str(tmp_path / "none")}, servers=[down]))
    assert (nowhere.verdict, str(tmp_path / "none") in nowhere.text) == ("fail", True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"gate": "updating"}, "is updating"),
        ({"gate": "poisoned"}, "is poisoned"),
        ({"waiting": 2, "in_flight": 1}, "has 3 requests"),
        ({"incarnation": "0123456789abcdef"}, "joined by learner 01234567"),
    ],
)
def test_no_group_is_taken_from_anyone(fields: dict[str, Any], words: str) -> None:
    """A trial of the communicator replaces the group that is there: what keeps it from being tried is told."""
    why = reason_not_to_join(status(**fields))
    assert words in why
    assert bool(why) == bool(words)


@pytest.mark.parametrize(("gib", "verdict"), [(80, "ok"), (4, "warn")])
def test_the_estimate_is_compared_with_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, verdict: str
) -> None:
    here = situation({"model.path": str(tmp_path)})
    assert machine.gpu_memory(here).verdict == "skipped", "no config.json"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **MODELS["2B"]}))
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert machine.gpu_memory(here).verdict == "skipped", "no GPU"
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(machine.torch.cuda, "get_device_properties", lambda device: properties)
    finding = machine.gpu_memory(here)
    assert (finding.verdict, f"{gib}.0 GiB" in finding.text) == (verdict, True)
    assert ("global_max_length" in finding.remedy) == (verdict == "warn")


# ---- the command ---------------------------------------------------------------------------------------------------


def test_people_read_one_line_a_check() -> None:
    """The lines come in the order of the checks, by group."""
    told: list[str] = []
    checks = {"one": lambda s: ok("[brackets]"), "two": lambda s: fail("f\ng", "r")}
    findings = run_checks({"machine": checks, "servers": {"three": lambda s: skipped("s")}}, situation(), told.append)
    assert told[0] == "machine:"
    assert told[1] == "  one: [brackets]"
    assert (told[2].startswith("  wrong: two: "), told[2].endswith("; r")) == (True, True)
    assert told[4] == "  not checked: three: s"
    assert findings["servers"]["three"] == skipped("s")


def with_machine(path: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["check", "--machine", "--config", path, *options])
    return code, capsys.readouterr().out


@pytest.fixture
def two_checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """Return what the checks of the machine will find."""
    found = {"disk": ok("space")}
    checks = {name: lambda s, name=name: found[name] for name in found}
    monkeypatch.setattr(machine, "CHECKS", checks)
    for name in ("CHECKS", "WITHOUT_SERVERS"):
        monkeypatch.setattr(server_checks, name, {"reachable": server_checks.reachable})
    return found


def test_with_machine_check_says_the_same_and_then_looks_further(
    tmp_path: Path, two_checks: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, custom__extra__rollout_matching__rollout_backend="hf")
    assert main(["check", "--config", path]) == 0
    *checked, _ = capsys.readouterr().out.splitlines()
    code, told = with_machine(path, capsys)
    assert code == 0
    assert told.splitlines()[: len(checked)] == checked
    assert told.splitlines()[-1] == "ready"
    two_checks["disk"] = warn("little space", "free some")
    code, told = with_machine(path, capsys)
    assert (code, "! disk: little space; free some" in told, "ready, with 1" in told) == (0, True, True)
    two_checks["disk"] = fail("no space", "free some")
    code, told = with_machine(path, capsys)
    assert (code, "wrong: disk: no space; free some" in told, "not ready" in told) == (1, True, True)
    code, told = with_machine(path, capsys, "--json")
    report = json.loads(told)
    assert (code, report["ready"], report["mistakes"], report["samples"]) == (1, False, [], {"train": 6, "val": 1})
    assert report["machine"]["disk"]["remedy"] == "free some"


def test_what_check_finds_wrong_does_not_hide_the_machine(
    tmp_path: Path, two_checks: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, custom__extra__rollout_matching__rollout_backend="hf")
    code, told = with_machine(path, capsys, "data.train=nowhere.jsonl")
    assert (code, "wrong: data.train: found" in told, "  disk: space" in told) == (2, True, True)
    assert "not ready: 1 thing" in told


def test_machine_and_probe_ask_the_servers_alike(
    tmp_path: Path, two_checks: dict[str, Finding], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is not there is a warning with --machine, which may run before it is started."""
    # Without a network the hub is asked for the model again and again, for most of a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = write_run(tmp_path)
    found = [seen(status=status(world_size=2))]
    monkeypatch.setattr(finding_module, "look", lambda *_, **__: found)
    assert main(["check", "--probe", "--config", path]) == 0
    assert "servers: 1 ready with 2 workers" in capsys.readouterr().out
    code, told = with_machine(path, capsys)
    assert (code, "servers: 1 ready with 2 workers" in told) == (0, True)
    found[0] = seen(status=None, error=ServerUnreachableError("gone"))
    assert main(["check", "--probe", "--config", path]) == 2
    capsys.readouterr()
    code, told = with_machine(path, capsys)
    assert (code, "! reachable: " in told) == (0, True)
