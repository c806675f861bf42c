"""CONFIG.md and the JSON Schemas are what the models say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.docs import documents
from learner.config.legacy import RETIRED
from learner.config.load import load_config
from learner.config.schema import RunConfig
from rollout_server.config import ServerConfig
from shared.config_model import describe_field, walk_keys

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["CONFIG.md", "config.schema.json", "server.schema.json"])
def test_the_committed_file_is_the_generated_one(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == documents()[name], "run `make docs`"


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


def test_requirement_ids_stand_beside_their_keys() -> None:
    text = documents()["CONFIG.md"]
    for key, requirement in (("decode_batch_size", "R21"), ("b_ratio", "R26"), ("servers", "R05"), ("m_steps", "R18")):
        assert any(f"{key}` |" in line and requirement in line for line in text.splitlines())


def test_the_schema_for_editors_knows_sections_and_bases() -> None:
    schema = json.loads(documents()["config.schema.json"])
    assert schema["additionalProperties"] is False
    assert {"base", "model", "training", "stage2_ab"} <= set(schema["properties"])
    assert schema["$defs"]["DecodingConfig"]["properties"]["top_p"]["maximum"] == 1.0


SHIPPED = [
    path for path in sorted((ROOT / "deploy").rglob("*.yaml")) if "\ncustom:" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    """The learner's files under deploy/, as one rank reads them."""
    load_config(path, world_size=1, env={})
