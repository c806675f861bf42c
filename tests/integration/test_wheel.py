"""The wheel: built without network, installed elsewhere, and run in a folder that has packages of our names.

Dependencies come from the environment of the tests; what the wheel holds comes from the wheel only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from shared.config.parse import write_yaml
from tests.unit.docs.blocks import blocks
from tests.unit.learner.config.examples import minimal

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "rollout_server", "learner", "deploy")
PROGRAMS = ("rollout-server", "rollout-learner", "rollout-launch")
MAX_BYTES = 2 << 20


@dataclass(frozen=True)
class Installed:
    """The installed wheel, and a working directory with folders that must not be imported."""

    wheel: Path
    target: Path
    work: Path

    def run(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.target), "OMP_NUM_THREADS": "1", **variables}
        environment["PATH"] = f"{self.target / 'bin'}:{environment['PATH']}"
        return subprocess.run(argv, cwd=self.work, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source, target, work = folder / "source", folder / "target", folder / "work"
    for name in PACKAGES:  # a copy, so that no older build is mixed in
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip(source, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ".")
    (wheel,) = folder.glob("*.whl")
    pip(folder, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    for name in (*PACKAGES, "bench"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise RuntimeError('the working directory was imported')\n")
    return Installed(wheel, target, work)


def pip(folder: Path, *arguments: str) -> None:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_programs_and_is_small(installed: Installed) -> None:
    assert installed.wheel.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(path).decode())
    tracked = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if package != "deploy" or file.parent in (ROOT / "deploy", ROOT / "deploy/places")
    }
    assert {name for name in names if name.endswith(".py")} == tracked
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    templates = {f"learner/report/templates/{file.name}" for file in (ROOT / "learner/report/templates").iterdir()}
    assert templates <= names
    assert {"cpu", "cuda", "datasets"} <= set(metadata.get_all("Provides-Extra", []))


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_names_the_other_programs(installed: Installed, program: str) -> None:
    done = installed.run(program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in PROGRAMS if name not in done.stdout] == []


def test_a_mistyped_command_names_the_nearest(installed: Installed) -> None:
    done = installed.run("rollout-learner", "chekc")
    assert done.returncode == 2
    assert "'check'" in done.stderr


def test_a_shell_can_complete_commands(installed: Installed) -> None:
    variables = {"COMP_WORDS": "rollout-learner ex", "COMP_CWORD": "1"}
    done = installed.run("rollout-learner", _ROLLOUT_LEARNER_COMPLETE="complete_bash", **variables)
    assert done.stdout.split() == ["export"]


def test_a_learner_configuration_is_checked(installed: Installed) -> None:
    (installed.work / "train.jsonl").write_text("")
    values = minimal()
    write_yaml(installed.work / "run.yaml", values)
    done = installed.run("rollout-learner", "check", "--config", "run.yaml", "training.learning_rat=1")
    assert done.returncode == 2
    assert "training.learning_rat: found an unknown key (command line)" in done.stderr
    # The annotations are read too: by modules that are loaded late.
    done = installed.run("rollout-learner", "check", "--config", "run.yaml", "data.train=train.jsonl")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data.train" in done.stderr


def test_a_server_configuration_is_checked(installed: Installed) -> None:
    (installed.work / "server.yaml").write_text("model: m\nport: 8000\n")
    done = installed.run("rollout-server", "--config", "server.yaml", "--check", "port=8123")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["port"] == 8123


@pytest.mark.parametrize(
    ("argv", "title"),
    [
        (("rollout-learner", "schema"), "Learner configuration"),
        (("rollout-server", "--schema"), "Rollout server configuration"),
        (("rollout-launch", "--schema"), "Launcher configuration"),
    ],
)
def test_every_program_prints_the_schema_of_its_file(installed: Installed, argv: tuple[str, ...], title: str) -> None:
    done = installed.run(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["title"] == title


PAGES = sorted({block.page for block in blocks() if block.language == "python" and not block.unchecked})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_the_documentation_runs_without_a_clone(installed: Installed, page: Path) -> None:
    """The blocks of a page one after the other, as one program."""
    code = [b.text for b in blocks() if b.page == page and b.language == "python" and not b.unchecked]
    code = [text.replace("deploy/demo/checkpoint", str(ROOT / "deploy/demo/checkpoint")) for text in code]
    done = installed.run(sys.executable, "-P", "-c", "\n".join(code))
    assert done.returncode == 0, done.stderr


def test_the_report_finds_its_templates(installed: Installed) -> None:
    done = installed.run("rollout-learner", "report", "no_such_run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_images_are_decoded_by_the_installed_server(installed: Installed) -> None:
    """They are decoded in processes of their own, which `-m` alone would start from the working directory."""
    code = (
        "import base64, io\n"
        "from PIL import Image\n"
        "from rollout_server.config import ServerConfig\n"
        "from rollout_server.decoding import Decoders\n"
        "data = io.BytesIO()\n"
        "Image.new('RGB', (4, 4)).save(data, 'PNG')\n"
        "decoders = Decoders(ServerConfig(model='m'))\n"
        "(image,) = decoders.load([base64.b64encode(data.getvalue()).decode()], decoders.share())\n"
        "decoders.close()\n"
        "assert image.size == (4, 4)\n"
    )
    done = installed.run(sys.executable, "-P", "-c", code)
    assert done.returncode == 0, done.stderr


def test_torchrun_starts_the_program(installed: Installed) -> None:
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    learner = ["--no-python", "rollout-learner", "train", "--config", "no_such.yaml"]
    done = installed.run(*torchrun, *learner)
    assert "no_such.yaml: found no readable file" in done.stderr
    assert "working directory was imported" not in done.stderr


def test_the_launcher_starts_installed_modules(installed: Installed) -> None:
    """Its children run modules with `-m`, which alone would look into the working directory first."""
    code = (
        "import subprocess, sys\n"
        "from deploy.launch import supervised, learner_argv, server_argv\n"
        "with supervised() as processes:\n"
        "    for argv in (learner_argv('no_such.yaml', 1), server_argv('no_such.yaml')):\n"
        "        assert processes.start('child', argv).popen.wait(60) == 2\n"
    )
    done = installed.run(sys.executable, "-P", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no_such.yaml: found no readable file") == 2
