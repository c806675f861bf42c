"""CONFIG.md, the JSON Schemas and the generated pages are what the code says."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from deploy import launch
from learner import __main__ as learner_command
from learner.config.load import RETIRED, load_config
from learner.config.schema import RunConfig
from rollout_server import __main__ as server_command
from rollout_server.config import ServerConfig
from shared.config.json_schema import json_schema
from shared.config.model import describe_field, walk_keys
from shared.config.yaml import parse_text
from tests.unit.learner.config.examples import REMOVE, ROLLOUT, SERVER, changed, everything, minimal, stage2
from tools import docs

ROOT = Path(__file__).parents[3]
documents = functools.cache(docs.documents)  # seconds each time


def test_the_committed_files_are_the_generated_ones() -> None:
    """All in one test: a parameter for each would make every worker write them, seconds each."""
    committed = {name: (ROOT / name).read_text(encoding="utf-8") for name in documents()}
    stale = [name for name, text in documents().items() if committed[name] != text]
    assert stale == [], "run `make docs`"


def test_every_key_is_listed_with_its_meaning() -> None:
    rows = [line for line in documents()["CONFIG.md"].splitlines() if line.startswith("| `")]
    learner = {
        "".join("[]" if part == 0 else f".{part}" for part in path)[1:]: field for path, field in walk_keys(RunConfig)
    }
    for key, field in learner.items():
        row = next(row for row in rows if row.startswith(f"| `{key}` |"))
        assert field.description
        assert describe_field(field) in row
        assert field.description.replace("|", "\\|") in row
    for key, field in ServerConfig.model_fields.items():
        assert field.description
        assert any(row.startswith(f"| `{key}` |") and f"| {field.description} |" in row for row in rows)
    for key in RETIRED:
        assert any(row.startswith(f"| `{key}` |") for row in rows)


# ---- the schemas, as an editor uses them ---------------------------------------------------------------------------


def complaints(program: str, data: dict[str, Any]) -> list[str]:
    """Return what the schema that the program prints has against `data`."""
    schema = Draft202012Validator(json.loads(json_schema(program)))
    return [f"{error.json_path}: {error.message}" for error in schema.iter_errors(data)]


@pytest.mark.parametrize("data", [minimal(), stage2(), everything()])
def test_an_editor_accepts_what_is_right(data: dict[str, Any]) -> None:
    assert not complaints("learner", data)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"training.sed": 1}, "$.training"),
        ({f"{ROLLOUT}.decoding.top_p": 1.5}, f"$.{ROLLOUT}.decoding.top_p"),
        ({f"{ROLLOUT}.decoding.top_p": "0.5"}, f"$.{ROLLOUT}.decoding.top_p"),
        ({"model.dtype": "fp32"}, "$.model.dtype"),
        ({"stage2_ab.schedule.b_ratio": -1}, "$.stage2_ab"),
        ({f"{SERVER}.servers": [{"base_url": "http://a:1"}]}, f"$.{SERVER}.servers"),
        ({"model": REMOVE}, "$"),
    ],
)
def test_an_editor_marks_what_is_wrong(changes: dict[str, Any], place: str) -> None:
    found = complaints("learner", changed(stage2(), changes))
    assert len(found) == 1
    assert found[0].startswith(f"{place}: ")


def test_an_editor_accepts_a_file_that_adds_to_its_base() -> None:
    """Here `model.path` and all else that is required comes from the base; mistakes are marked all the same."""
    assert not complaints("learner", {"base": "other.yaml", "model": {"dtype": "bfloat16"}})
    assert not complaints("server", {"base": ["a.yaml", "b.yaml"], "port": 9000})
    assert complaints("learner", {"base": "other.yaml", "model": {"type": "bfloat16"}})
    assert complaints("server", {"base": 3, "model": "m"})
    assert complaints("server", {"port": 9000})


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/qwen3vl_4b").glob("launch*.yaml")), ids=lambda path: path.name)
def test_an_editor_accepts_the_shipped_launches(path: Path) -> None:
    assert not complaints("launcher", parse_text(path.read_bytes(), path.name).value)
    assert complaints("launcher", {"servers": []})


@pytest.mark.parametrize(
    ("app", "arguments", "program"),
    [
        (learner_command.app, ["schema"], "learner"),
        (server_command.app, ["--schema"], "server"),
        (launch.app, ["--schema"], "launcher"),
    ],
)
def test_every_program_prints_its_schema(app: typer.Typer, arguments: list[str], program: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, json_schema(program))


# ---- the files under deploy/ ---------------------------------------------------------------------------------------

SHIPPED = [
    path for path in sorted((ROOT / "deploy").rglob("*.yaml")) if "\ncustom:" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configurations_are_valid(path: Path) -> None:
    """The learner's files under deploy/, as one rank reads them and as an editor sees them. Those for a cluster get the
    servers' addresses when the job starts."""
    load_config(path, world_size=1, env={f"ADDRESS_{i}": f"10.0.0.{i}" for i in range(4)})
    assert not complaints("learner", parse_text(path.read_bytes(), path.name).value)
