"""`--help` and `--version` of every program start nothing and write nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.version import DISTRIBUTION, version
from tests.tiers import slow

ROOT = Path(__file__).parents[3]
MODULES = ("deploy.launch", "deploy.torchrun", "deploy.wait_ready", "rollout_server")


@pytest.mark.parametrize("module", [slow("deploy.demo.run"), *MODULES, slow("tools.docs")])
def test_help_starts_nothing(module: str, tmp_path: Path) -> None:
    assert "Usage:" in said(module, "--help", tmp_path)


@pytest.mark.parametrize("module", [slow("deploy.demo.run"), *MODULES, "learner"])
def test_every_program_has_a_version(module: str, tmp_path: Path) -> None:
    assert said(module, "--version", tmp_path).strip() == f"{DISTRIBUTION} {version()}"


def said(module: str, option: str, folder: Path) -> str:
    """Return what a program prints that ends well and leaves nothing in the `folder` where it runs."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, option],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("extra", ["demo", "dev"])
def test_set_up_that_was_done_is_not_done_again(extra: str, tmp_path: Path) -> None:
    """A set-up for tests is enough for the demo, and not the other way around."""
    files = ("pyproject.toml", "deploy/constraints-cpu.txt", "deploy/setup.sh", "deploy/cpu_torchvision.py")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"  # says its version, and cannot make a .venv
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 3.11 || exit 7\n')
    python.chmod(0o755)

    def set_up(wanted: str) -> int:
        argv = ["bash", tmp_path / "deploy" / "setup.sh", "cpu", wanted]
        env = {**os.environ, "PYTHON": str(python)}
        return subprocess.run(argv, env=env, capture_output=True, timeout=20, check=False).returncode

    assert set_up(extra) == 7
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in files)).hexdigest()[:16]
    made = tmp_path / ".venv" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.write_text('#!/bin/sh\necho "$@" >> installed\n')
    made.chmod(0o755)
    (tmp_path / ".venv" / ".ready").write_text(f"cpu {digest} {extra}\n")
    assert set_up("demo") == 0
    assert set_up("dev") == 0
    installed = (tmp_path / "installed").read_text() if (tmp_path / "installed").exists() else ""
    assert ("-e .[dev]" in installed) == (extra == "demo")  # the tools are added to the .venv that is there
    assert (tmp_path / ".venv" / ".ready").read_text() == f"cpu {digest} dev\n"


@pytest.mark.parametrize("word", ["--help", "gpu"])
def test_set_up_takes_two_devices_and_installs_nothing_else(word: str) -> None:
    done = subprocess.run(["bash", ROOT / "deploy" / "setup.sh", word], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cpu|cuda" in done.stderr


def test_set_up_refuses_other_extras() -> None:
    argv = ["bash", ROOT / "deploy" / "setup.sh", "cpu", "everything"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "demo|dev" in done.stderr
