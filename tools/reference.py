"""The site's reference pages that are made from code: metrics, endpoints, commands, requirement ids.

In: the declared metrics, the server's OpenAPI document, the programs' commands, the configuration's keys. Out:
`pages()`, file name to text. `tools.docs` writes them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer

from deploy import launch
from deploy.launch import LaunchConfig
from learner import __main__ as learner_command
from learner.config.schema import RunConfig
from rollout_server import __main__ as server_command
from rollout_server.app import JSON, create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import Engine
from rollout_server.gate import Gate, WaitingGate
from rollout_server.metrics import Metrics
from rollout_server.service import RolloutService
from rollout_server.updates import SyncTotals
from shared.config.model import dotted, walk_keys
from shared.wire import NDJSON
from tools import metrics
from tools.requirements import REQUIREMENTS

MADE = "<!-- Made by `make docs`, so do not edit it. A test compares the two. -->\n\n"


def pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    folder = Path("docs/reference")
    return {
        str(folder / "metrics.md"): MADE + metrics_page(),
        str(folder / "endpoints.md"): MADE + endpoints_page(),
        str(folder / "commands.md"): MADE + commands_page(),
        str(folder / "requirements.md"): MADE + requirements_page(),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)


# ---- metrics -------------------------------------------------------------------------------------------------------

METRICS_INTRO = """\
# Every metric

A run writes one JSON object per line into `metrics.jsonl` in its directory. The numbers of `step`, `sync`, `eval` and
`server` go to the [trackers](../trackers.md) too, by default to TensorBoard. A server has Prometheus metrics at
`/metrics/`.

```bash
tensorboard --logdir runs/mine/tensorboard
```

## Events

Every line has `event`, `time` (Unix seconds), and `global_step` if it belongs to a step.

"""


def metrics_page() -> str:
    parts = [METRICS_INTRO + table(("event", "what it says"), [(f"`{e}`", text) for e, text in metrics.EVENTS.items()])]
    for title, where, group in metrics.GROUPS:
        rows = [(f"`{m.name}`", m.unit, m.meaning) for m in group]
        parts.append(f"## {title}\n\n{where}\n\n{table(('metric', 'unit', 'meaning'), rows)}")
    drops = table(("reason", "the object"), [(f"`{reason}`", text) for reason, text in metrics.DROPS.items()])
    parts.append(f"## Dropped objects\n\nIf several reasons hold, the first one counts.\n\n{drops}")
    rows = [(f"`{name}`", kind, text) for name, kind, text in server_metrics()]
    parts.append(f"## A rollout server\n\nAt `/metrics/`.\n\n{table(('metric', 'type', 'meaning'), rows)}")
    return "\n".join(parts)


def server_metrics() -> Iterator[tuple[str, str, str]]:
    """Yield each server metric: its name as it is scraped, its type and its help text."""
    gate = WaitingGate(Gate(""), queue_timeout_s=1.0, drain_timeout_s=1.0)
    text = Metrics(gate, SyncTotals()).text().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    for name, meaning in re.findall(r"^# HELP (\S+) (.+)$", text, re.M):
        if not name.endswith("_created"):
            yield name, kinds[name], meaning


# ---- endpoints -----------------------------------------------------------------------------------------------------

ENDPOINTS_INTRO = """\
# Every endpoint

A rollout server answers at `/x/` and `/x`, below its `url_prefix`. Bodies are JSON (`Content-Type: application/json`).
With a token, every endpoint but `/health/` and `/ready/` wants it:

```bash
curl -H "Authorization: Bearer $ROLLOUT_SERVER_TOKEN" http://127.0.0.1:8000/status/
```

An error is an [`ErrorBody`](#errorbody) with an HTTP status. 503 comes with `Retry-After`: try again.
[Every error](../troubleshooting/errors.md) has its cause and its way out. Unknown fields are refused.

A running server describes itself at `/openapi.json`; this page is made from it. What
`/metrics/` counts is in [Every metric](metrics.md#a-rollout-server). What other programs may ask, `/v1/` included, is
in [Clients](../clients.md). Where a program sends a field, null stands for one that was left out.
"""


def api() -> dict[str, Any]:
    """Return the document that a server answers at `/openapi.json`."""
    engine = cast(Engine, SimpleNamespace(weights=""))  # none of its methods is called
    return create_app(RolloutService(engine, ServerConfig(model="any")), token=None).openapi()


def endpoints_page() -> str:
    described = api()
    lines = described["paths"]["/infer/"]["post"]["responses"]["200"]["content"][NDJSON]["schema"]
    models = {**described["components"]["schemas"], lines["title"]: lines}
    operations = [
        (path, method.upper(), operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    rows = [
        (f"[`{path}`](#{re.sub(r'[^a-z0-9_-]', '', path)})", method, operation["summary"])
        for path, method, operation in operations
    ]
    parts = [ENDPOINTS_INTRO, table(("endpoint", "method", ""), rows)]
    parts += [_endpoint(path, method, operation) for path, method, operation in operations]
    parts += ["## Messages\n", *(_message(name, schema) for name, schema in models.items())]
    return "\n".join(parts)


def _endpoint(path: str, method: str, operation: Mapping[str, Any]) -> str:
    says = f"{operation['summary']} {operation.get('description', '')}".strip()
    body = operation.get("requestBody", {"content": {}})["content"].get(JSON)
    success = operation["responses"]["200"]
    answer = success["content"].get(JSON, {})
    takes = f"Body: {_type(body['schema'])}. " if body else ""
    text = f"## `{path.strip('/')}`\n\n`{method} {path}`. {_linked(says)}\n\n{takes}Answer: {_answer(success)}.\n"
    if body and "example" in body:
        address = f"http://127.0.0.1:8000{path} -H 'Content-Type: application/json'"
        text += f"\n```bash\ncurl {address} -d '{_lines(body['example'])}'\n```\n"
    elif method == "GET":
        text += f"\n```bash\ncurl http://127.0.0.1:8000{path}\n```\n"
    if (example := answer.get("example")) is not None and not _is_short(example):
        text += f"\n```json\n{f'[{_lines(example[0])}]' if isinstance(example, list) else _lines(example)}\n```\n"
    return text


def _answer(success: Mapping[str, Any]) -> str:
    """Return the media types of a successful answer, and its description."""
    forms = []
    for kind, body in success["content"].items():
        if _is_short(body.get("example")):
            forms.append(f"`{json.dumps(body['example'])}`")
        elif kind == NDJSON:
            forms.append(f"{_link(body['schema']['title'])} per line (`{kind}`)")
        elif "$ref" in body.get("schema", {}).get("items", body.get("schema", {})):
            forms.append(_type(body["schema"]))
        else:
            forms.append(f"`{kind}`")
    means = success["description"]
    return " or ".join(forms) + ("" if means == "Successful Response" else f": {_linked(means)}")


def _is_short(example: Any) -> bool:
    return isinstance(example, dict) and "status" in example


def _linked(text: str) -> str:
    """Return `text` with each name of a message as a link."""
    return re.sub(r"`([A-Z]\w+)`", lambda found: _link(found[1]), text)


def _link(name: str) -> str:
    return f"[`{name}`](#{name.lower()})"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"a list of {_type(schema.get('items', {}))}" if schema.get("maxItems") != 0 else "an empty list"
    signs = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {schema[name]:.0f}" if schema[name] % 1 == 0 else f"{sign} {schema[name]}"
        for name, sign in signs.items()
        if name in schema
    ]
    return " ".join([str(schema.get("type", "anything")), *bounds])


def _lines(fields: Mapping[str, Any]) -> str:
    """Return JSON with one line per field of the outermost object."""
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    return f"{{\n  {lines}\n}}"


def _message(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"`{field}`",
            _type(about),
            f"`{json.dumps(about['default'])}`" if "default" in about else "**required**" if field in required else "",
            about.get("description", ""),
        )
        for field, about in schema["properties"].items()
    ]
    says = f"{schema['description']}\n\n" if "description" in schema else ""
    return f"### `{name}`\n\n{says}{table(('field', 'type', 'default', ''), rows)}"


# ---- commands ------------------------------------------------------------------------------------------------------

COMMANDS_INTRO = """\
# Commands

Three programs. In a clone, `.venv/bin/` has them after `make setup`, and `python -m learner`,
`python -m rollout_server` and `python -m deploy.launch` are the same. `--help` starts nothing. Exit codes: 0 done,
1 failed while running, 2 the input is wrong, 130 interrupted.

`make help` lists the targets of a clone. Each does its own set-up.
"""


def commands_page() -> str:
    learner, server, launcher = map(typer.main.get_command, (learner_command.app, server_command.app, launch.app))
    parts = [COMMANDS_INTRO, "## `rollout-learner`\n"]
    parts += [_command(name, command, level=3) for name, command in _leaves("rollout-learner", learner)]
    parts += [_command("rollout-server", server), _command("rollout-launch", launcher), _make_targets()]
    return "\n".join(parts)


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of its subgroups, each with its full name."""
    for inner, part in getattr(command, "commands", {}).items():
        yield from _leaves(f"{name} {inner}", part)
    if not hasattr(command, "commands"):
        yield name, command


def _command(name: str, command: Any, level: int = 2) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [(f"`{record[0]}`", " ".join(record[1].split())) for record in records if record and record[0] != "--help"]
    help_text = "\n\n".join(part.replace("\n", " ") for part in inspect.cleandoc(command.help or "").split("\n\n"))
    return f"{'#' * level} `{name}`\n\n{help_text}\n\n{table(('option', ''), rows)}"


def _make_targets() -> str:
    makefile = Path(__file__).parents[1] / "Makefile"
    rows = [
        (f"`make {target}`", text)
        for target, text in re.findall(r"^([a-z-]+):.*?## (.*)$", makefile.read_text(encoding="utf-8"), re.M)
    ]
    return f"## Targets of `make`\n\n{table(('target', ''), rows)}"


# ---- requirement ids -----------------------------------------------------------------------------------------------

REQUIREMENTS_INTRO = """\
# Requirement ids

For those who read the code: comments, tests and commits name what they hold by these ids. `R`: a requirement. `D`: a
decision where two disagreed. You need none of them to use the programs.
"""


def requirements_page() -> str:
    keys = keys_by_requirement()
    if unknown := keys.keys() - REQUIREMENTS.keys():
        raise KeyError(f"keys name requirements that REQUIREMENTS lacks: {sorted(unknown)}")
    rows = [
        (f"<span id='{name.lower()}'>{name}</span>", text, ", ".join(f"`{key}`" for key in keys.get(name, ())))
        for name, text in REQUIREMENTS.items()
    ]
    return f"{REQUIREMENTS_INTRO}\n{table(('id', 'what it asks for', 'keys'), rows)}"


def keys_by_requirement() -> dict[str, list[str]]:
    """Return the keys that a requirement is about, by the last part of their path."""
    found: dict[str, list[str]] = {}
    for model in (RunConfig, ServerConfig, LaunchConfig):
        for path, field in walk_keys(model):
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            for name in str(extra.get("requirement", "")).split():
                key = dotted(path).rpartition(".")[2]
                if key not in found.setdefault(name, []):
                    found[name].append(key)
    return found
