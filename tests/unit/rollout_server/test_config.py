"""The server's configuration (R16): every mistake at once, with its key, and no way to serve the world by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bench.forked import LEARNER, finish
from rollout_server.__main__ import _prepare_environment
from rollout_server.config import ServerConfig, load_server_config
from shared.addresses import free_port
from shared.config.model import ConfigErrors, Mistake, dotted
from shared.config.parse import dump_yaml, load_yaml, parse, write_yaml
from shared.packages import INSTALL
from tests.examples import examples
from tests.unit.shared.config.strategies import refused, sections


def write(folder: Path, text: str) -> Path:
    path = folder / "server.yaml"
    path.write_text(text)
    return path


def mistakes_of(path: Path) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigErrors) as error:
        load_server_config(path)
    return error.value.mistakes


def test_defaults(tmp_path: Path) -> None:
    config = load_server_config(write(tmp_path, "model: m\n"))
    assert (config.host, config.port, config.world_size, config.group_host) == ("127.0.0.1", 8000, 1, "127.0.0.1")
    assert not config.is_public


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    text = """
modle: m
port: 70000
url_prefix: no-slash
allowed_image_roots: [nowhere]
communicator_host: 0.0.0.0
engine_args: {seed: 3, worker_extension_cls: x}
"""
    with pytest.raises(ConfigErrors) as error:
        load_server_config(write(tmp_path, text))
    paths = {mistake.path for mistake in error.value.mistakes}
    assert {"model", "modle", "port", "url_prefix"} <= paths
    assert {"allowed_image_roots[0]", "communicator_host", "engine_args.seed"} <= paths


@pytest.mark.parametrize(
    ("host", "public"), [("127.0.0.5", False), ("::1", False), ("localhost", False), ("10.0.0.1", True)]
)
def test_is_public(tmp_path: Path, host: str, public: bool) -> None:
    assert load_server_config(write(tmp_path, f"model: m\nhost: '{host}'\n")).is_public is public


# ---- types, unknown keys, damaged files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found", "wanted", "remedy"),
    [
        ("port: '8000'", "the string '8000'", "an integer in [1, 65535]", "without quotes"),
        ("port: 8000.0", "the number 8000.0", "an integer in [1, 65535]", "write 8000"),
        ("enforce_eager: 'yes'", "the string 'yes'", "true or false", "write true or false"),
        ("enforce_eager: 1", "the integer 1", "true or false", "write true or false"),
        ("gpu_memory_utilization: .nan", "the number nan", "a number in (0, 1]", "a finite number"),
        ("queue_timeout_s: 0", "the integer 0", "a number > 0", "change"),
        ("dtype: fp32", "the string 'fp32'", "float32", "choose"),
        ("model: 7", "the integer 7", "a string", "in quotes"),
        ("host: null", "null", "a string", "change"),
        ("url_prefix: /a/", "the string '/a/'", "a string matching", "change"),
        ("log_dir: 5", "the integer 5", "a path or null", "change"),
        ("allowed_image_roots: [5]", "the integer 5", "a path", "change"),
        ("engine_args: [5]", "a list of 1", "a mapping", "change"),
    ],
)
def test_nothing_is_converted(tmp_path: Path, line: str, found: str, wanted: str, remedy: str) -> None:
    name = line.split(":")[0]
    (mistake,) = mistakes_of(write(tmp_path, line if name == "model" else f"model: m\n{line}\n"))
    assert (mistake.path.split("[")[0], mistake.found) == (name, found)
    assert wanted in mistake.wanted
    assert remedy in mistake.remedy


def test_paths_are_paths_and_survive_a_round(tmp_path: Path) -> None:
    config = load_server_config(write(tmp_path, f"model: m\nlog_dir: a/b\nallowed_image_roots: ['{tmp_path}']\n"))
    assert (config.log_dir, config.allowed_image_roots) == (Path("a/b"), [tmp_path])
    again = tmp_path / "again.yaml"
    write_yaml(again, config.model_dump(mode="json"))
    assert load_server_config(again) == config


@given(data=sections(ServerConfig))
@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_configuration_survives_dump_and_load(tmp_path: Path, data: dict[str, Any]) -> None:
    config = parse(ServerConfig, data)
    write_yaml(tmp_path / "c.yaml", config.model_dump(mode="json"))
    assert parse(ServerConfig, load_yaml(tmp_path / "c.yaml", {})) == config


@pytest.mark.parametrize(("path", "value"), refused(ServerConfig))
def test_types_and_ranges(tmp_path: Path, path: str, value: object) -> None:
    """Every key refuses other types, NaN, and what is just out of its range."""
    write_yaml(tmp_path / "c.yaml", {"model": "m", path: value})
    (mistake,) = mistakes_of(tmp_path / "c.yaml")
    assert mistake.path == path


@given(name=st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_unknown_key_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    assume(name not in ServerConfig.model_fields and name != "base")
    path = tmp_path / "server.yaml"
    write_yaml(path, {"model": "m", name: 1})
    assert [mistake.path for mistake in mistakes_of(path)] == [dotted((name,))]


@given(
    cut=st.integers(0, 4000),
    put=st.sampled_from(["", "\t", ":", "[", "- ", "\x00", "&a ", "*a", "!!x ", '"', "${X}"]),
    drop=st.integers(0, 9),
)
@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_a_configuration_or_mistakes(tmp_path: Path, cut: int, put: str, drop: int) -> None:
    text = dump_yaml(ServerConfig(model="m").model_dump(mode="json"))
    cut %= len(text)
    path = tmp_path / "server.yaml"
    path.write_bytes((text[:cut] + put + text[cut + drop :]).encode())
    told = "fine"
    try:
        load_server_config(path)
    except ConfigErrors as error:
        told = str(error)
    assert told.strip()


@pytest.mark.parametrize(
    ("text", "base_url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("url_prefix: /a/b\nport: 9", "http://127.0.0.1:9/a/b"),
        ("host: '::1'", "http://[::1]:8000"),
        ("host: 0.0.0.0\ncommunicator_host: 10.0.0.1", "http://127.0.0.1:8000"),
    ],
)
def test_r06_the_base_url_of_this_machine(tmp_path: Path, text: str, base_url: str) -> None:
    assert load_server_config(write(tmp_path, f"model: m\n{text}\n")).base_url == base_url


# ---- as a process --------------------------------------------------------------------------------------------------

HEAVY = ("torch", "vllm", "transformers", "numpy", "uvicorn", "fastapi")


def run(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rollout_server", "--config", str(path), "--check"]
    clean = {key: value for key, value in os.environ.items() if key != "ROLLOUT_SERVER_TOKEN"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**clean, **env})


def test_a_public_address_needs_a_token(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nhost: 10.0.0.1\nport: x\n")
    refused = run(path)
    assert (refused.returncode, refused.stdout) == (2, "")
    port, host = refused.stderr.splitlines()
    assert (port.startswith("port: found the string 'x'"), host.startswith("host: ")) == (True, True)
    assert "ROLLOUT_SERVER_TOKEN" in host
    write(tmp_path, "model: m\nhost: 10.0.0.1\n")
    allowed = run(path, ROLLOUT_SERVER_TOKEN="secret")
    assert (allowed.returncode, "secret" in allowed.stdout + allowed.stderr) == (0, False)


def test_a_public_address_for_weight_syncs_needs_a_token_too(tmp_path: Path) -> None:
    """R42."""
    path = write(tmp_path, "model: m\ncommunicator_host: 10.0.0.1\n")
    refused = run(path)
    assert (refused.returncode, refused.stderr.startswith("communicator_host: ")) == (2, True)
    assert run(path, ROLLOUT_SERVER_TOKEN="secret").returncode == 0


def test_check_prints_one_object(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: m\nport: 1\ntensor_parallel_size: 2\n")
    done = run(write(tmp_path, "base: base.yaml\nport: 9000\nurl_prefix: '/${WHERE}'\n"), WHERE="here")
    assert (done.returncode, done.stderr) == (0, "ready\n")
    found = json.loads(done.stdout)
    assert set(found) == {*ServerConfig.model_fields, "base_url", "group_host", "world_size"}
    assert (found["base_url"], found["world_size"], found["model"]) == ("http://127.0.0.1:9000/here", 2, "m")


def test_check_prints_mistakes_and_ends_with_2(tmp_path: Path) -> None:
    failed = run(write(tmp_path, "port: x\nenforce_eager: 'yes'\n"))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert [line.split(":")[0] for line in failed.stderr.splitlines()] == ["model", "enforce_eager", "port"]


def test_check_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--config', sys.argv[1], '--check']\n"
        "try: runpy.run_module('rollout_server', run_name='__main__')\n"
        f"finally: print(sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, str(write(tmp_path, "model: m\n"))]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stderr == "ready\n[]\n"


def test_a_missing_vllm_is_named_with_its_install_line(tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "deploy/demo/checkpoint"
    arguments = ["--config", str(write(tmp_path, f"model: {model}\n")), f"port={free_port()}"]
    program = "tests.unit.rollout_server.without_vllm"
    (done,) = finish(LEARNER, program, arguments, envs=[os.environ], timeout_s=120.0)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert INSTALL["vllm"] in done.stderr


@pytest.mark.parametrize(("engine_args", "gib"), [({}, "3"), ({"kv_cache_memory_bytes": 1 << 26}, None)])
def test_the_size_of_the_kv_cache_in_bytes_is_no_other_one(
    monkeypatch: pytest.MonkeyPatch, engine_args: dict[str, int], gib: str | None
) -> None:
    """vLLM without a GPU takes its variable and forgets the argument."""
    monkeypatch.setattr(os, "environ", {})
    _prepare_environment(ServerConfig(model="m", cpu_kv_cache_gib=3, engine_args=engine_args))
    assert os.environ.get("VLLM_CPU_KVCACHE_SPACE") == gib
