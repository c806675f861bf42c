"""The learner's command line: commands, the forms without one, overrides, exit codes, missing packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from learner import __main__ as command
from learner.__main__ import COMMANDS, main
from learner.config.load import load_config, write_resolved
from learner.rollout.control import ServerControl, ServerRequest
from learner.rollout.membership import Member, Membership
from shared.config.parse import load_yaml, write_yaml
from shared.packages import INSTALL, missing_package
from tests.unit.learner.config.examples import stage2
from tests.unit.learner.data.annotations import jsonl

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers", "vllm", "numpy", "jinja2"}


@pytest.fixture
def config(tmp_path: Path) -> str:
    write_yaml(tmp_path / "run.yaml", stage2())
    return str(tmp_path / "run.yaml")


def test_every_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], *([name] for name in COMMANDS)):
        assert main([*arguments, "--help"]) == 0
        shown = capsys.readouterr().out
        assert [name for name in (*COMMANDS, "rollout-server", "rollout-launch") if name not in shown] == []


def test_all_commands_are_listed() -> None:
    app = command.app
    names = {found.name or found.callback.__name__ for found in app.registered_commands}
    assert names | {group.name for group in app.registered_groups} == set(COMMANDS)


def test_a_mistyped_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "'train'" in capsys.readouterr().err


def test_an_argument_that_is_not_utf_8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file of a run can hold it."""
    folder = os.fsdecode(bytes(tmp_path) + b"/l\xe9t")
    Path(folder).mkdir()
    assert main(["init", folder]) == 2
    told = capsys.readouterr().err
    assert ("UTF-8" in told, r"l\udce9t" in told, "rename" in told) == (True, True, True)


def test_a_terminal_without_unicode_takes_all_that_is_printed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    (tmp_path / "räc").mkdir()
    jsonl(tmp_path / "räc", *[{"desc": "🦝", "bbox_2d": [0, 0, 20, 50]}] * 8, name="train.jsonl")
    argv = [sys.executable, "-m", "learner", "init", "räc"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"r\xe4c: jsonl" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["report", "--help"], ["servers", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; from learner.__main__ import main; main({arguments}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert HEAVY & set(done.stderr.split()) == set()


@pytest.mark.parametrize("form", [["check", "--json"], ["train", "--check"], ["--check"]])
def test_a_value_of_the_command_line_is_checked_as_the_files(
    form: list[str], config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from learner.doctor import check

    monkeypatch.setattr(check, "_samples", lambda config, plan, drawing: {})
    assert main([*form, "--config", config, "training.effective_batch_size=24"]) == 0
    assert json.loads(capsys.readouterr().out)["effective_batch_size"] == 24
    assert main([*form, "--config", config, "training.learning_rat=1e-5"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("training.learning_rat: ")
    assert "(command line)" in shown
    assert "did you mean training.learning_rate?" in shown


def test_a_value_of_the_command_line_is_in_the_resolved_file(config: str, tmp_path: Path) -> None:
    found = load_config(config, world_size=1, overrides=["training.learning_rate=3e-6"])
    resolved = load_yaml(write_resolved(found, tmp_path / "run"))
    assert resolved["training"]["learning_rate"] == 3e-6
    assert load_config(config, world_size=1).training.learning_rate != 3e-6


def test_training_gets_the_values_of_the_command_line(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from learner.wiring import build

    got = []
    monkeypatch.setattr(build, "train", lambda config, *, environment: got.append(config.training.learning_rate) or 7)
    assert main(["--config", config, "training.learning_rate=3e-6"]) == 7
    assert got == [3e-6]


@pytest.mark.parametrize("package", INSTALL)
def test_a_missing_package_is_named_with_its_install_line(
    package: str, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> int:
        raise ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")

    monkeypatch.setattr(command, "_train", fail)
    assert main(["--config", config]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert f"the package {package} cannot be imported" in shown
    assert "pip install" in shown


@pytest.mark.parametrize("error", [EOFError("a pipe"), BrokenPipeError(32, "a pipe"), ImportError("no such name")])
def test_a_bug_keeps_its_traceback(
    error: Exception, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(command, "_train", fail)
    assert main(["--config", config]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`rollout-learner check ... | head -1`"""
    reading, writing = os.pipe()
    code = (
        "import sys; from learner import __main__ as command\n"
        "command._check = lambda *_, **__: print('plan') or 0\n"
        "sys.exit(command.main(['check', '--config', 'run.yaml']))"
    )
    argv = [sys.executable, "-c", code]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    os.close(reading)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.slow
def test_a_processor_without_torchvision_names_the_package(tmp_path: Path) -> None:
    """transformers' own message begins with an empty line."""
    code = (
        "import importlib.util as util, sys\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torchvision' else found(name, *rest)\n"
        "from learner.data.prompt import PromptEncoder\n"
        "from shared.errors import ConfigError\n"
        "try: PromptEncoder.load('deploy/demo/checkpoint')\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "torchvision cannot be imported" in done.stdout, done.stderr
    assert INSTALL["torchvision"] in done.stdout


def test_a_torchvision_that_does_not_fit_torch_is_named() -> None:
    """transformers hides the cause: "Could not import module"."""
    hidden = ModuleNotFoundError("Could not import module 'AutoProcessor'.")
    hidden.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    error = missing_package(hidden)
    assert error is not None
    assert "torchvision::nms" in error.found
    assert error.remedy == INSTALL["torchvision"]
    assert missing_package(ImportError("cannot import name 'x' from 'y'")) is None


def test_a_torchaudio_that_does_not_fit_torch_is_named() -> None:
    """torch says so in an OSError, as it is also raised for a folder that is missing."""
    error = missing_package(OSError("Could not load this library: /lib/torchaudio/lib/_torchaudio.abi3.so"))
    assert error is not None
    assert "pip uninstall -y torchaudio" in error.remedy
    assert missing_package(OSError("/data/torchaudio/vllm/ does not appear to have a file named config.json")) is None


def test_install_lines_have_the_ranges_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        "vllm": [*extras["cuda"], *extras["cpu"]],
        "torchvision": [line for line in project["dependencies"] if line.startswith("torchvision")],
        "sklearn": extras["bench"],
    }
    assert set(wanted) == set(INSTALL)
    for package, requirements in wanted.items():
        assert requirements
        assert [line for line in requirements if f"'{line}'" not in INSTALL[package]] == []


# ---- servers of a run that goes on (R40) ---------------------------------------------------------------------------


def test_servers_are_asked_for_in_the_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--run", str(tmp_path)]
    assert main(["servers", "list", *place]) == 2
    assert "--run" in capsys.readouterr().err
    control = ServerControl(tmp_path)
    members = (Member(base_url="http://a:1", group_port=3), Member(base_url="http://b:1", group_port=3))
    control.show(Membership(members=members).leave_out("http://b:1", "killed", now_s=1e9))
    assert main(["servers", "list", *place]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[:2]] == [["http://a:1", "serving"], ["http://b:1", "out"]]
    assert "killed" in shown[1]
    assert main(["servers", "add", "http://c:1/", "--group-port", "7", *place]) == 0
    assert main(["servers", "remove", "http://a:1", *place]) == 0
    assert control.take() == [
        ServerRequest(action="add", base_url="http://c:1", group_port=7),
        ServerRequest(action="remove", base_url="http://a:1"),
    ]
    assert control.take() == []


def test_a_server_that_cannot_be_named_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["c:1"], ["http://u:p@c:1"], ["http://c:1", "--group-port", "0"]):
        assert main(["servers", "add", *arguments, "--run", str(tmp_path)]) == 2
        assert "p@c" not in capsys.readouterr().err


def test_a_damaged_request_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "servers" / "requests"
    folder.mkdir(parents=True)
    for i, text in enumerate(("{", "[]", '{"action": "eat", "base_url": "x"}', '{"action": "add", "x": 1}')):
        (folder / f"{i}.json").write_text(text)
    assert ServerControl(tmp_path).take() == []
    assert list(folder.iterdir()) == []
