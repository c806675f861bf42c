"""The server's configuration (R16): every mistake at once, with its key, and no way to serve the world by accident."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_server.config import load_server_config
from shared.config_errors import ConfigErrors


def write(folder: Path, text: str) -> Path:
    path = folder / "server.yaml"
    path.write_text(text)
    return path


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


def run(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rollout_server", "--config", str(path), "--check"]
    clean = {key: value for key, value in os.environ.items() if key != "ROLLOUT_SERVER_TOKEN"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**clean, **env})


def test_a_public_address_needs_a_token(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nhost: 10.0.0.1\n")
    refused = run(path)
    assert (refused.returncode, "ROLLOUT_SERVER_TOKEN" in refused.stderr) == (2, True)
    assert "Traceback" not in refused.stderr
    assert run(path, ROLLOUT_SERVER_TOKEN="secret").returncode == 0


def test_check_prints_mistakes_and_ends_with_2(tmp_path: Path) -> None:
    failed = run(write(tmp_path, "port: x\n"))
    assert failed.returncode == 2
    assert "model: " in failed.stderr
    assert "port: found the string 'x'" in failed.stderr
