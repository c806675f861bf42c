"""Every command, configuration and program in the documentation is one that works: parsed by the real command lines,
loaded by the real loaders, executed."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from deploy import launch
from deploy.launch_file import LaunchConfig, load_launch_config
from deploy.places.plan import read_plan
from learner import __main__ as learner_command
from learner.config.load import load_config
from learner.config.schema import RunConfig
from learner.config.sections.loss import preset_advice
from rollout_server import __main__ as server_command
from rollout_server import openai_api
from rollout_server.app import JSON
from rollout_server.config import ServerConfig, load_server_config
from shared import wire
from shared.config.model import dotted, walk_keys
from shared.config.parse import load_yaml, write_yaml
from tests.unit.docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks, commands
from tests.unit.learner.config.examples import minimal, stage2
from tools.reference import api

ALL = list(blocks())
command_of, described = cache(typer.main.get_command), cache(api)  # commands and endpoints, each made once
UNCHECKED = 6  # blocks that say why they cannot be checked: raise it only with a good reason


def of(language: str) -> list[Any]:
    return [pytest.param(b, id=b.where) for b in ALL if b.language == language and not b.unchecked]


def test_every_block_says_what_it_is() -> None:
    assert [b.where for b in ALL if b.language not in LANGUAGES] == []
    assert [b.where for b in ALL if b.unchecked and len(b.unchecked.split()) < 3] == [], "a reason has words"
    assert sum(bool(b.unchecked) for b in ALL) <= UNCHECKED
    assert Counter(b.language for b in ALL)["bash"] > 20, "the reader of blocks finds none"


# ---- configurations ------------------------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a working directory from which the repository's files have the names that the documentation uses."""
    for name in ("deploy", "tools", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for variable in ("ROLLOUT_SERVER_TOKEN", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.mark.parametrize("block", of("yaml"))
def test_configurations_load(block: Block, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line says which program's file it is. What a part leaves out is filled in."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "t")
    for other in (b for b in ALL if b.page == block.page and b.language == "yaml" and not b.unchecked):
        write(other, workplace)
    write(block, workplace)
    config = check_file(block.title, workplace)
    if "trainer_variant" in block.text and isinstance(config, RunConfig):
        require_a_preset(config)


SHIPPED = [
    path
    for path in sorted(ROOT.glob("deploy/**/*.yaml"))
    if re.search(r"^ *trainer_variant:|^custom: *\{trainer_variant", path.read_text(), re.M)
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_runs_have_the_preset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are a learner's file, or hold one as text."""
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    if "\n---" not in text and "${" not in text and "custom" in yaml.safe_load(text):
        require_a_preset(load_config(path, world_size=1, env={}))
    elif re.search("trainer_variant: (rollout_matching_sft|stage2_ab_training)", text):
        assert re.search("preset: recommended", text)


def require_a_preset(config: RunConfig) -> None:
    """`check` has no advice on what users copy."""
    assert "take loss.preset: recommended" not in (preset_advice(config) or "")


def write(block: Block, folder: Path) -> None:
    assert block.title, f"{block.where}: the first line says which file it is, such as `# run.yaml`"
    path = folder / Path(block.title).name
    path.write_text(block.text)
    kind, values = kind_of(block.title), load_yaml(str(path))
    if kind == "run" and not {"model", "data", "training", "custom"} <= values.keys():
        uses_stage2 = "stage2_ab" in values or "stage2_ab_training" in block.text
        filler = stage2() if uses_stage2 else minimal()
        if "rollouts" in values:  # short names of what the filler says by long ones
            del filler["custom"]["extra"]
        write_yaml(folder / "whole.yaml", filler)
    elif kind == "server" and "model" not in values:
        write_yaml(folder / "whole.yaml", {"model": "some/model"})
    else:
        return
    if "base" not in values:
        path.write_text(f"base: whole.yaml\n{block.text}")


def kind_of(name: str) -> str:
    """`server-2.yaml` is a server's."""
    kind = re.split(r"[-.]", Path(name).name)[0]
    return {"learner": "run", "sft": "run"}.get(kind, kind)


def check_file(name: str, folder: Path) -> object:
    path = str(folder / Path(name).name)
    loaders: dict[str, Callable[[str], object]] = {
        "run": lambda path: load_config(path, world_size=1, env={}),
        "server": lambda path: load_server_config(path, has_token=True),
        "launch": load_launch,
    }
    assert kind_of(name) in loaders, f"{name}: run.yaml, server.yaml or launch.yaml"
    return loaders[kind_of(name)](path)


def load_launch(path: str) -> object:
    """Load a launch file, which, if it says what a cluster wants to know, is for one."""
    return (read_plan if "cluster" in load_yaml(path) else load_launch_config)(path)


def test_a_wrong_configuration_is_found(workplace: Path) -> None:
    block = Block(
        page=ROOT / "README.md", line=1, language="yaml", unchecked="", text="# run.yaml\nloss: {prefix: last_match}\n"
    )
    write(block, workplace)
    with pytest.raises(Exception, match=r"loss\.prefix"):
        check_file(block.title, workplace)


# ---- commands ------------------------------------------------------------------------------------------------------

# Programs of others: their arguments are their own business, files of this repository among them must exist.
OTHERS = {
    *("cd", "chown", "curl", "docker", "echo", "export", "git", "hf", "kill", "kubectl", "make", "mkdir", "openssl"),
    *("pip", "pytest", "python", "sbatch", "sky", "sudo", "tail", "tensorboard"),
}


@pytest.mark.parametrize("block", of("bash"))
def test_commands_parse(block: Block) -> None:
    for command in commands(block.text):
        check_command(command)


def check_command(words: Sequence[str]) -> None:
    """Raises AssertionError, or the error of the program's own parser."""
    program, arguments = Path(words[0]).name, list(words[1:])
    for word in words:
        path = word.rpartition("=")[2]
        if re.match(r"(deploy|bench|docs|tests)/", path) and not re.search(r"[A-Z]{3}", path):
            assert (ROOT / path).exists(), f"no such file: {path}"
    if program == "python":
        program, arguments = module_of(arguments)
    if program in PARSERS:
        PARSERS[program](arguments)
    elif program.startswith("bench."):
        check_options(program, arguments)
    else:
        assert program in OTHERS, f"unknown program: {program}"


def module_of(arguments: list[str]) -> tuple[str, list[str]]:
    """Return what `python` runs, a module or a script of a clone, and its arguments."""
    if arguments[0] != "-m":
        script = ROOT / arguments[0].removeprefix("CLONE/")
        assert script.is_file(), f"no such script: {script}"
        return "python", arguments[1:]
    return arguments[1], arguments[2:]


def app_of(module: Any) -> typer.Typer:
    """Return the command line of a module: its app, or the one that `typer.run(main)` makes."""
    if isinstance(getattr(module, "app", None), typer.Typer):
        return module.app
    app = typer.Typer()
    app.command()(module.main)
    return app


def check_options(module: str, arguments: Sequence[str]) -> None:
    """Check a benchmark's options, which are read from its source, because importing it takes many seconds."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    commands = {f.name: f for f in functions if f.name == "main" or f.decorator_list}
    main = commands[arguments[0] if arguments and arguments[0] in commands else "main"]
    arguments_of = {argument.arg.replace("_", "-"): argument for argument in (*main.args.args, *main.args.kwonlyargs)}
    flags = [name for name, one in arguments_of.items() if one.annotation and "bool" in ast.unparse(one.annotation)]
    known = {f"--{name}" for name in arguments_of} | {f"--no-{name}" for name in flags}
    known |= {
        node.value for node in ast.walk(main.args) if isinstance(node, ast.Constant) and str(node.value)[:2] == "--"
    }
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known, module


def parse(app: typer.Typer, name: str, arguments: Sequence[str]) -> None:
    """Parse a command line with the program's own parser; nothing is invoked."""
    command: Any = command_of(app)
    rest = list(arguments)
    if hasattr(command, "commands") and rest and rest[0].startswith("-"):
        if rest[0].split("=")[0] in learner_command.GROUP_OPTIONS:
            return
        rest.insert(0, "train")
    while hasattr(command, "commands"):
        assert rest, f"{name}: no command"
        assert rest[0] in command.commands, f"{name}: no command {rest[0]}"
        command = command.commands[rest.pop(0)]
    if "--help" not in rest:
        context = command.make_context(name, rest)
        check_overrides(context.params.get("overrides") or (), name)


def check_overrides(overrides: Sequence[str], name: str) -> None:
    models: dict[str, type[BaseModel]] = {"server": ServerConfig, "launch": LaunchConfig}
    model = next((model for word, model in models.items() if word in name), RunConfig)
    keys = {dotted(path) for path, _ in walk_keys(model)}
    for override in overrides:
        key = re.sub(r"\[\d+\]", "[0]", override.partition("=")[0])
        assert "=" in override, override
        assert key in keys, f"no such key: {override}"


def parse_make(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        known = rf"\$\({name}\)|\$\(or \$\({name}\)" if is_variable else rf"^{re.escape(name)}:"
        assert re.search(known, makefile, re.M), f"make {word}: no such target or variable"


def parse_torchrun(arguments: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(list(arguments))
    program = "python" if parsed.module else parsed.training_script
    assert parsed.module or parsed.no_python
    words = ["-m", parsed.training_script] if parsed.module else []
    check_command([program, *words, *parsed.training_script_args])


def parse_pip(arguments: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] in ("install", "uninstall", "wheel")
    for word in arguments[1:]:
        named = re.fullmatch(r"(?:CLONE|\.)\[([\w,]+)\]", word)
        assert named is None or set(named[1].split(",")) <= set(extras), f"no such extra: {word}"


def parse_curl(arguments: Sequence[str]) -> None:
    (url,) = (word for word in arguments if word.startswith("http"))
    path = re.sub(r"^https?://[^/]+", "", url).rstrip("/")
    if path == "/openapi.json":  # it describes the others
        return
    paths = {spelled.rstrip("/"): methods for spelled, methods in described()["paths"].items()}
    assert path in paths, f"no such endpoint: {url}"
    if "-d" in arguments:
        name = paths[path]["post"]["requestBody"]["content"][JSON]["schema"]["$ref"].rpartition("/")[2]
        body = getattr(wire, name, None) or getattr(openai_api, name)
        body.model_validate_json(arguments[arguments.index("-d") + 1])


PARSERS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(("rollout-learner", "learner"), lambda a: parse(learner_command.app, "rollout-learner", a)),
    **dict.fromkeys(("rollout-server", "rollout_server"), lambda a: parse(server_command.app, "rollout-server", a)),
    **dict.fromkeys(("rollout-launch", "deploy.launch"), lambda a: parse(launch.app, "rollout-launch", a)),
    **{
        f"deploy.{name}": lambda a, name=name: parse(app_of(import_module(f"deploy.{name}")), name, a)
        for name in ("docs", "torchrun", "wait_ready", "demo.run")
    },
    "make": parse_make,
    "torchrun": parse_torchrun,
    "pip": parse_pip,
    "curl": parse_curl,
}


@pytest.mark.parametrize(
    "command",
    [
        "rollout-learner chek --config run.yaml",
        "rollout-learner train",
        "rollout-learner train --config run.yaml training.learning_rat=1",
        "rollout-server --confg server.yaml",
        "make serv CONFIG=server.yaml",
        "make serve CONFG=server.yaml",
        "python -m bench.run --parts stages",
        "make launch CONFIG=deploy/no_such/launch.yaml && true",
        "torchrun --nprocs 2 -m learner --config run.yaml",
        "pip install 'CLONE[gpu]'",
        "curl http://127.0.0.1:8000/no_such/",
        "curl http://127.0.0.1:8000/infer/ -d '{\"requests\": []}'",
        "rm -rf /",
    ],
)
def test_a_wrong_command_is_found(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((Exception, SystemExit)):
        [check_command(words) for words in commands(command)]


# ---- the rest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("page", sorted({b.page for b in ALL if b.language == "python"}), ids=lambda page: page.name)
def test_python_runs(page: Path, workplace: Path) -> None:
    """The blocks of a page one after the other, as one program."""
    names: dict[str, Any] = {}
    for block in (b for b in ALL if b.page == page and b.language == "python" and not b.unchecked):
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files. mkdocs checks the site's own links, with their anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [t for t in targets if t and not re.match(r"https?:|mailto:", t) and not (page.parent / t).exists()]
    assert missing == []
