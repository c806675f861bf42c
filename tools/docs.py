"""CONFIG.md, the JSON Schemas and the site's reference pages, from the code: `python -m tools.docs` (`make docs`).

In: `RunConfig`, `ServerConfig`, the learner's rules, and what `tools.reference` reads. Out: `documents()`, file name
to text. `main` writes them into the working directory. A test compares the committed files with `documents()`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.launch import LaunchConfig
from deploy.places import WRITERS, Place
from deploy.places.plan import read_plan
from learner.config.load import RETIRED
from learner.config.schema import RULES, RunConfig
from rollout_server.config import ServerConfig
from shared.config.model import describe_field, dotted, item_of, section_of, walk_keys

INTRO = """\
# Configuration

Made by `make docs` from the schema, so do not edit it. A test compares the two.

One YAML file describes a run. `rollout-learner check --config FILE [--world-size W] [--probe]` finds
every mistake without a GPU, a model or a server, and says what the data is, how long the run is and what memory it
takes. `--json` prints the resolved plan.
`rollout-server --config FILE --check` does the same for a server, `rollout-launch --config FILE --check` for a launch
and this machine. They exit with 2 if a file is wrong. In a clone, `python -m learner`, `python -m rollout_server` and
`python -m deploy.launch` are the same programs.

- **Composition.** `base: other.yaml` (or a list) at the top names other files, relative to this one. Later files win,
  and the file itself wins over its bases. Mappings merge key by key; everything else is replaced.
- **Environment.** `${NAME}` inside a string is that variable's text, and stays a string; `$${` is a literal `${`.
  The variable's value is written into the run directory, so do not use it for secrets.
- **Command line.** `rollout-learner train --config FILE training.learning_rate=1e-5 data.shuffle=false` sets keys over
  the file: the whole path (`a.b`, `list[0].c`), then a value in YAML. It is checked like the file, and is part of the
  resolved `config.yaml` in the run directory. `rollout-server` takes its keys in the same way.
- **Paths** are relative to the working directory (those of `base:` to the file).
- **Types** are strict: `true` and `false` are the only booleans, `3.0` is not an integer, `1e-4` is a number. A key
  may occur once, and unknown keys are refused.
- **Repeating a run.** The resolved configuration is `config.yaml` in the run directory; it is a configuration itself.
- **Editors** complete and check keys by JSON Schemas: `rollout-learner schema > config.schema.json`,
  `rollout-server --schema > server.schema.json`, `rollout-launch --schema > launch.schema.json`, and
  `# yaml-language-server: $schema=config.schema.json` as a file's first line.
"""

# Shipped files of the places: folder, place and launch file.
EXAMPLES = {
    "deploy/slurm": (Place.SLURM, "deploy/qwen3vl_4b/launch-cluster.yaml"),
    "deploy/kubernetes": (Place.KUBERNETES, "deploy/qwen3vl_4b/launch-cluster.yaml"),
    "deploy/skypilot": (Place.SKYPILOT, "deploy/qwen3vl_4b/launch-cluster.yaml"),
    "deploy/compose": (Place.COMPOSE, "deploy/qwen3vl_4b/launch.yaml"),
    "deploy/compose/cpu": (Place.COMPOSE, "deploy/demo/launch.yaml"),
}

TABLE_HEAD = "| key | type | default | unit | meaning |\n| --- | --- | --- | --- | --- |\n"
REQUIREMENT = re.compile(r" ?\([RD]\d\d?(?:,? [RD]\d\d?)*\)")


def main() -> None:
    """Write CONFIG.md, the JSON Schemas and the reference pages into the working directory."""
    for name, text in documents().items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")


def examples() -> dict[str, str]:
    """Return the shipped files by their path. The image names in these files are placeholders, which every place
    refuses."""
    found: dict[str, str] = {}
    for folder, (place, path) in EXAMPLES.items():
        out = Path(folder)
        found |= {str(out / name): text for name, text in WRITERS[place].files(read_plan(path), out).items()}
    return found


def documents() -> dict[str, str]:
    """Return the text of every generated file by its name."""
    from tools.reference import pages  # imports the server's engine, and with it torch

    return {
        "CONFIG.md": config_markdown(),
        "learner/config/config.schema.json": json_schema(RunConfig, "Learner configuration"),
        "rollout_server/server.schema.json": json_schema(ServerConfig, "Rollout server configuration"),
        "deploy/launch.schema.json": json_schema(LaunchConfig, "Launcher configuration"),
        **pages(),
        **examples(),
    }


def config_markdown() -> str:
    learner = "".join(_section(RunConfig, "", "Learner: the top level"))
    server = "".join(_section(ServerConfig, "", "Rollout server"))
    launcher = "".join(_section(LaunchConfig, "", "Launcher"))
    learner += _rules()
    parts = [INTRO, "## Learner\n", learner, _retired(), "## Rollout server\n", server, "## Launcher\n", launcher]
    return "\n".join(parts)


def json_schema(model: type[BaseModel], title: str) -> str:
    """Return the JSON Schema of a file: the model's schema, and the key `base`, which is gone once files are merged.

    A file with bases may leave out their sections, so only a file without bases must have every section. Required keys
    inside a section are left to `--check`. Items of lists do not merge, so they keep their required keys.
    """
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    paths = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["title"] = title
    schema["properties"]["base"] = {"description": "files that this one builds on; later ones win", **paths}
    schema["anyOf"] = [{"required": ["base"]}, {"required": schema.pop("required")}]
    whole = {items.__name__ for _, field in walk_keys(model) if (items := section_of(item_of(field.annotation)))}
    for name in schema.get("$defs", {}).keys() - whole:
        schema["$defs"][name].pop("required", None)
    return json.dumps(schema, indent=2) + "\n"


def _section(model: type[BaseModel], path: str, title: str) -> Iterator[str]:
    """Yield a heading and a table of the section's own keys, then its subsections."""
    rows = [_row(f"{path}{name}", field) for name, field in model.model_fields.items()]
    yield f"### {title}\n\n{_first_line(model)}\n\n{TABLE_HEAD}{''.join(rows)}\n"
    for name, field in model.model_fields.items():
        here, items = f"{path}{name}", item_of(field.annotation)
        if section := section_of(field.annotation):
            yield from _section(section, f"{here}.", f"`{here}`")
        elif items is not None and (section := section_of(items)):
            yield from _section(section, f"{here}[].", f"`{here}[]`")


def _row(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    cells = (f"`{name}`", describe_field(field), _default(field), str(extra.get("unit", "")), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    return "its keys' defaults" if isinstance(value, BaseModel) else f"`{json.dumps(value, default=str)}`"


def _first_line(item: object) -> str:
    return (inspect.getdoc(item) or "").replace("\n", " ")


def _rules() -> str:
    lines = [f"- {REQUIREMENT.sub('', _first_line(rule))}" for rule in RULES]
    lines.append("- `effective_batch_size` is a multiple of `per_device_train_batch_size` x ranks, and an explicit")
    lines.append("  `gradient_accumulation_steps` equals what follows from it.")
    lines.append("- A colocated engine's `tensor_parallel_size` divides the number of ranks.")
    return "### Rules between keys\n\n" + "\n".join(lines) + "\n"


def _retired() -> str:
    rows = "".join(f"| `{dotted(tuple(path.split('.')))}` | {remedy} |\n" for path, (_, remedy) in RETIRED.items())
    return f"### Retired keys\n\nRefused, whatever their value.\n\n| key | what to do |\n| --- | --- |\n{rows}"


if __name__ == "__main__":
    typer.run(main)
