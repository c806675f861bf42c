"""The site's reference pages that are made from code: metrics, endpoints, commands, requirement ids.

In: the declared metrics, the server's routes and messages, the programs' commands, the configuration's keys. Out:
`pages()`, file name to text. `deploy.docs` writes them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy import launch
from deploy.launch import LaunchConfig
from deploy.requirements import REQUIREMENTS
from learner import __main__ as learner_command
from learner.config.schema import RunConfig
from learner.journal import metrics
from rollout_server import __main__ as server_command
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import Engine
from rollout_server.gate import Gate, WaitingGate
from rollout_server.metrics import Metrics
from rollout_server.openai_api import ChatCall, CompletionCall, OpenAIError
from rollout_server.service import RolloutService
from rollout_server.updates import SyncTotals
from shared import wire
from shared.config.model import dotted, walk_keys

MADE = "<!-- Made by `make docs`, so do not edit it. A test compares the two. -->\n\n"


def pages() -> dict[str, str]:
    """The text of every page by its file name."""
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
    """Name as it is scraped, type and help text."""
    gate = WaitingGate(Gate(""), queue_timeout_s=1.0, drain_timeout_s=1.0)
    text = Metrics(gate, SyncTotals()).text().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    for name, meaning in re.findall(r"^# HELP (\S+) (.+)$", text, re.M):
        if not name.endswith("_created"):
            yield name, kinds[name], meaning


# ---- endpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What a route does, takes and answers. `example` and `answer` are real messages."""

    meaning: str
    body: type[BaseModel] | None = None
    reply: str
    example: BaseModel | None = None
    answer: BaseModel | None = None


_PROMPT = wire.RolloutInferRequest(
    messages=[wire.Message(role="user", content="<image>Detect every digit.")], images=["/data/images/1.png"], uuid="1"
)
_RESPONSE = wire.ChatCompletionResponse(
    id="1",
    created=1700000000,
    model="Qwen/Qwen3-VL-4B-Instruct",
    choices=[wire.Choice(message=wire.ChatMessage(content="[]"), finish_reason="stop", token_ids=[1294])],
    usage=wire.Usage(prompt_tokens=3, completion_tokens=1, total_tokens=4),
)
_OUTPUT = wire.RolloutOutput(
    response=_RESPONSE,
    response_token_ids=[1294],
    prompt_token_ids=[151644, 872, 198],
    rollout_infos=wire.RolloutInfos(ver=0, seed=7, server_id="4c1f0f0c2a3b", uuid="1"),
)

ENDPOINTS = {
    "/health": Endpoint(
        meaning="Is the server alive? Needs no token.", reply='`{"status": "ok", "server_id": "..."}`; 503 if not'
    ),
    "/ready": Endpoint(
        meaning="Does it answer rollouts now? Not while weights change, and not after a failed sync. Needs no token.",
        reply='`{"status": "ready", "server_id": "..."}`; 503 with the reason if not',
    ),
    "/status": Endpoint(meaning="What it serves, and what it is doing.", reply="[`ServerStatus`](#serverstatus)"),
    "/get_world_size": Endpoint(
        meaning="Its number of GPUs: tensor-parallel times data-parallel size.",
        reply="[`WorldSizeReply`](#worldsizereply)",
        answer=wire.WorldSizeReply(world_size=1),
    ),
    "/metrics": Endpoint(meaning="[Prometheus metrics](metrics.md#a-rollout-server).", reply="text"),
    "/infer": Endpoint(
        meaning="Rollouts: one answer per request, in order. A request is seeded with its own `seed`, or, "
        "if it has none, by the call's and its place ([`RequestConfig`](#requestconfig)). A request whose `uuid` "
        "was answered before gets the same answer again. With `Accept: application/x-ndjson`, one "
        "[`AnswerLine`](#answerline) per request, as each ends.",
        body=wire.InferCall,
        reply="a list of [`RolloutOutput`](#rolloutoutput)",
        example=wire.InferCall(
            infer_requests=[_PROMPT], request_config=wire.RequestConfig(max_tokens=512, temperature=0.7, seed=7)
        ),
        answer=_OUTPUT,
    ),
    "/score": Endpoint(
        meaning="Log-probabilities of given answers, by the weights that are served.",
        body=wire.ScoreCall,
        reply="[`ScoreReply`](#scorereply)",
        example=wire.ScoreCall(items=[wire.ScoreItem(request=_PROMPT, response_token_ids=[1294])]),
        answer=wire.ScoreReply(ver=0, logprobs=[[-0.25]], prompt_token_ids=[[151644, 872, 198]]),
    ),
    "/reset_prefix_cache": Endpoint(meaning="Empty the caches of prefixes and images.", reply='`{"status": "reset"}`'),
    "/init_communicator": Endpoint(
        meaning="Join the group of a learner for weight syncs. A new learner replaces the old one.",
        body=wire.InitCommunicatorCall,
        reply='`{"status": "joined"}`, when all members have joined',
    ),
    "/update_weights": Endpoint(
        meaning="Receive one update. The call stays open until the new weights are checked and served, or have failed.",
        body=wire.UpdateWeightsCall,
        reply="[`UpdateWeightsReply`](#updateweightsreply)",
    ),
    "/expect_scores": Endpoint(
        meaning="The learner's own log-probabilities of the canary of an update. The server compares, and decides.",
        body=wire.ExpectScoresCall,
        reply='`{"status": "noted"}`',
    ),
    "/close_communicator": Endpoint(
        meaning="Leave the learner's group.", body=wire.CloseCommunicatorCall, reply='`{"status": "closed"}`'
    ),
    "/v1/models": Endpoint(meaning="The served model, in OpenAI's form.", reply="as OpenAI's"),
    "/v1/chat/completions": Endpoint(
        meaning="OpenAI's chat completions, by vLLM's own OpenAI layer. With `stream`, server-sent events.",
        body=ChatCall,
        reply="as OpenAI's; an error is an [`OpenAIError`](#openaierror)",
        example=ChatCall(messages=[wire.Message(role="user", content="Name three digits.")], max_tokens=8),
    ),
    "/v1/completions": Endpoint(
        meaning="OpenAI's completions. The prompt is text or token ids.",
        body=CompletionCall,
        reply="as OpenAI's; an error is an [`OpenAIError`](#openaierror)",
        example=CompletionCall(prompt="seven, eight,", max_tokens=8),
    ),
    "/openapi.json": Endpoint(meaning="The description of this API (OpenAPI 3.1).", reply="JSON"),
    "/docs": Endpoint(meaning="The same as a page, which loads nothing from elsewhere.", reply="HTML"),
}

ENDPOINTS_INTRO = """\
# Every endpoint

A rollout server answers at `/x/` and `/x`, below its `url_prefix`. Bodies are JSON (`Content-Type: application/json`).
With a token, every endpoint but `/health/` and `/ready/` wants it:

```bash
curl -H "Authorization: Bearer $ROLLOUT_SERVER_TOKEN" http://127.0.0.1:8000/status/
```

An error is an [`ErrorBody`](#errorbody) with an HTTP status. 503 comes with `Retry-After`: try again.
[Every error](../troubleshooting/errors.md) has its cause and its way out. Unknown fields are refused.

A running server describes itself at `/openapi.json`, and at `/docs` as a page. What other programs may ask, `/v1/`
included, is in [Clients](../clients.md).
"""

_REPLIES: tuple[type[BaseModel], ...] = (
    wire.RolloutOutput,
    wire.AnswerLine,
    wire.ScoreReply,
    wire.UpdateWeightsReply,
    wire.WorldSizeReply,
    wire.ServerStatus,
    wire.ErrorBody,
    OpenAIError,
)


def routes() -> dict[str, str]:
    """Method by path, as the server serves them."""
    engine = cast(Engine, SimpleNamespace(weights=""))  # nothing is asked of it
    app = create_app(RolloutService(engine, ServerConfig(model="any")), token=None)
    return {
        route.path: next(iter((route.methods or set()) - {"HEAD"}))
        for route in app.routes
        if isinstance(route, APIRoute) and not route.path.endswith("/")
    }


def endpoints_page() -> str:
    methods = routes()
    if unlike := methods.keys() ^ ENDPOINTS.keys():
        raise KeyError(f"describe in ENDPOINTS what the server serves: {sorted(unlike)}")
    rows = [
        (
            f"[`{path}/`](#{re.sub(r'[^a-z0-9_-]', '', path)})",
            method,
            ENDPOINTS[path].meaning.partition(". ")[0].rstrip("."),
        )
        for path, method in methods.items()
    ]
    parts = [ENDPOINTS_INTRO, table(("endpoint", "method", ""), rows)]
    parts += [_endpoint(path, method) for path, method in methods.items()]
    bodies = [endpoint.body for endpoint in ENDPOINTS.values() if endpoint.body]
    parts += ["## Messages\n", *(_message(model) for model in _with_parts([*bodies, *_REPLIES]))]
    return "\n".join(parts)


def _endpoint(path: str, method: str) -> str:
    endpoint = ENDPOINTS[path]
    body = f"Body: [`{endpoint.body.__name__}`](#{endpoint.body.__name__.lower()}). " if endpoint.body else ""
    text = f"## `{path[1:]}`\n\n`{method} {path}/`. {endpoint.meaning}\n\n{body}Answer: {endpoint.reply}.\n"
    if endpoint.example:
        sent = _lines(endpoint.example.model_dump(mode="json", exclude_unset=True))
        address = f"http://127.0.0.1:8000{path}/ -H 'Content-Type: application/json'"
        text += f"\n```bash\ncurl {address} -d '{sent}'\n```\n"
    elif method == "GET":
        text += f"\n```bash\ncurl http://127.0.0.1:8000{path}/\n```\n"
    if endpoint.answer:
        answer = _lines(endpoint.answer.model_dump(mode="json"))
        text += f"\n```json\n{f'[{answer}]' if 'a list of' in endpoint.reply else answer}\n```\n"
    return text


def _lines(fields: dict[str, Any]) -> str:
    """JSON with one line per field of the outermost object."""
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    return f"{{\n  {lines}\n}}"


def _with_parts(models: Sequence[type[BaseModel]]) -> list[type[BaseModel]]:
    """The models and those of their fields, each once, by module and in the order of its source."""
    found: set[type[BaseModel]] = set()
    todo = list(models)
    while todo:
        model = todo.pop()
        if model not in found:
            found.add(model)
            todo += [part for field in model.model_fields.values() for part in _models_in(field.annotation)]
    return sorted(found, key=lambda model: (model.__module__ != wire.__name__, inspect.getsourcelines(model)[1]))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _message(model: type[BaseModel]) -> str:
    comments = _comments(model)
    rows = []
    for name, field in model.model_fields.items():
        default = "**required**" if field.is_required() else _shown_default(field)
        rows.append((f"`{name}`", _type(field.annotation), default, comments.get(name) or field.description or ""))
    doc = f"{inspect.getdoc(model)}\n\n" if model.__doc__ else ""
    return f"### `{model.__name__}`\n\n{doc}{table(('field', 'type', 'default', ''), rows)}"


def _shown_default(field: FieldInfo) -> str:
    if field.default_factory:
        return "a random one"
    default = field.default.model_dump() if isinstance(field.default, BaseModel) else field.default
    return "its fields' defaults" if isinstance(field.default, BaseModel) else f"`{json.dumps(default)}`"


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The comment of each field: behind it, or above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in map(str.strip, inspect.getsource(model).splitlines()):
        if line.startswith("#"):
            above.append(line.lstrip("# "))
            continue
        if field := re.match(r"(\w+): ", line):
            behind = re.search(r"  # (.*)$", line)
            found[field[1]] = " ".join([*above, *([behind[1]] if behind else [])])
        above = []
    return found


_WORDS = {str: "string", int: "integer", float: "number", bool: "true or false", NoneType: "null", Any: "anything"}


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in args)
    if origin in (Union, UnionType):
        return " or ".join(map(_type, args))
    if origin is list:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[`{annotation.__name__}`](#{annotation.__name__.lower()})"
    return _WORDS[annotation]


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
    """The commands of a group and of the groups in it."""
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
    """The keys that a requirement is about, by the last part of their path."""
    found: dict[str, list[str]] = {}
    for model in (RunConfig, ServerConfig, LaunchConfig):
        for path, field in walk_keys(model):
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            for name in str(extra.get("requirement", "")).split():
                key = dotted(path).rpartition(".")[2]
                if key not in found.setdefault(name, []):
                    found[name].append(key)
    return found
