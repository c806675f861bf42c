"""Parses request bodies into the pydantic models of `shared/wire.py`.

A body's items are counted before it is parsed into a model, and a body with too many items is refused. Large bodies are
parsed item by item, so that other tasks can run on the event loop in between.
"""

from __future__ import annotations

import asyncio
import functools
import time
from types import UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from rollout_server.config import ServerConfig
from rollout_server.service import check_number
from shared.errors import RequestError
from shared.wire import MAX_PARTS, ContentPart, Message

Body = TypeVar("Body", bound=BaseModel)
_MAX_FIELDS = 256  # max fields of one JSON object; valid bodies have fewer
_PARTS = (Message, ContentPart)
_FEW_OBJECTS = 1000  # max objects that are built without a pause; building them takes about 10 ms
_TURN_S = 0.02
_MAX_ESCAPES = 4_000_000  # max escapes in one body; each blocks the event loop for 30 ns
_MAX_OBJECTS = 150_000  # max objects and lists in one body; an update of 60,000 tensors has 120,000


async def read_body(request: Request, model: type[Body]) -> Body:
    """Return the request's body as a `model`. Raises RequestError, which names the wrong fields."""
    try:
        chunks = [chunk async for chunk in request.stream()]
    except ClientDisconnect:
        raise hung_up() from None
    try:
        turns = _Turns()
        body = b"".join(chunks)
        # 96 MB of escaped text held the event loop for 0.4 to 0.7 s, so escapes are counted before anything is parsed.
        if (num_escapes := body.count(b"\\")) > _MAX_ESCAPES:
            raise ValueError(f"{num_escapes} backslashes, wanted at most {_MAX_ESCAPES}: write the text as UTF-8")
        # `body` is bytes: parsing bytes takes a quarter of the time of parsing a bytearray.
        value = from_json(body)
        await turns.give()
        _check_number(value, request.app.state.config)
        # Tools are checked here, with a message of their own. The message for unknown fields says to compare the
        # versions of server and learner, which does not help a client of OpenAI's API.
        _check_tools(request.url.path, value)
        # Objects are counted before models are built, because 4 MB of wrong items took 3.5 GB and 19 s of CPU.
        if await _num_objects(value, turns) <= _FEW_OBJECTS:
            return _built(model, value, "")
        return await _built_in_turns(model, value, "", turns)
    except _WrongError as error:
        found = str(error)
    except ValueError as error:
        found = f"the body: {error}"
    raise RequestError(
        f"{request.url.path}: malformed body",
        found=found,
        wanted=f"a {model.__name__}",
        remedy="correct these fields, as /openapi.json says; a learner's call: run the same version on both sides",
    )


class _WrongError(Exception):
    """The body has wrong fields; the message names them."""


class _Turns:
    """Lets other tasks run on the event loop, at most once per `_TURN_S` seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def give(self) -> None:
        if time.monotonic() - self._began > _TURN_S:
            await asyncio.sleep(0)
            self._began = time.monotonic()


def _check_number(value: object, config: ServerConfig) -> None:
    """Raises RequestError (413) if the body has too many requests. Counting is much faster than building the
    requests."""
    for field in ("infer_requests", "items", "prompt"):
        items = value.get(field) if isinstance(value, dict) else None
        if isinstance(items, list) and not (field == "prompt" and items and isinstance(items[0], int)):
            check_number(field, len(items), config)


def _check_tools(path: str, value: object) -> None:
    """Raises RequestError if an OpenAI client asks for tool calls."""
    if not isinstance(value, dict):
        return
    asked = [name for name in ("tools", "tool_choice", "functions") if value.get(name) not in (None, [], "none")]
    if asked:
        raise RequestError(
            f"{path}: this server has no tool calls",
            found=", ".join(asked),
            wanted="a request without tools",
            remedy=f"leave {' and '.join(asked)} out",
        )


async def _num_objects(value: object, turns: _Turns) -> int:
    """Return the number of objects and lists in `value`. Raises ValueError if there are too many, or if an object has
    too many fields, because the built objects take far more memory than the body."""
    todo, num_seen = [value], 0
    while todo:
        part = todo.pop()
        num_seen += 1
        if num_seen + len(todo) > _MAX_OBJECTS:
            raise ValueError(f"more than {_MAX_OBJECTS} objects and lists")
        if isinstance(part, dict):
            if len(part) > _MAX_FIELDS:
                raise ValueError(f"an object with {len(part)} fields, wanted at most {_MAX_FIELDS}")
            todo += [inner for inner in part.values() if isinstance(inner, dict | list)]
        elif isinstance(part, list):
            todo += [inner for inner in part if isinstance(inner, dict | list)]
        if num_seen % 1024 == 0:
            await turns.give()
    return num_seen


def _built(model: type[Body], value: object, where: str) -> Body:
    """Return `value` validated as a `model`. Raises _WrongError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:5]
        names = [where + ".".join(map(str, detail["loc"])) for detail in details]
        wrong = [f"{name or 'the body'}: {detail['msg']}" for name, detail in zip(names, details, strict=True)]
        raise _WrongError("; ".join(wrong)) from error


async def _built_in_turns(model: type[Body], value: object, where: str, turns: _Turns) -> Body:
    """Return `value` validated as a `model`. Unlike `_built`, it validates the objects in lists one by one, before the
    object that holds them, and lets other tasks run in between. Raises _WrongError."""
    if isinstance(value, dict):
        built: dict[str, object] = {}
        for name, item in _lists(model).items():
            items = value.get(name)
            if isinstance(items, list):
                if item in _PARTS and len(items) > MAX_PARTS:
                    raise _WrongError(f"{where}{name}: {len(items)} items, wanted at most {MAX_PARTS}")
                built[name] = [
                    await _built_in_turns(item, one, f"{where}{name}.{i}.", turns) for i, one in enumerate(items)
                ]
        value = {**value, **built}
    await turns.give()
    return _built(model, value, where)


@functools.cache
def _lists(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return, for each field that may hold a list of models, the model of the list's items."""
    items = {name: _item_model(field.annotation) for name, field in model.model_fields.items()}
    return {name: item for name, item in items.items() if item is not None}


def _item_model(annotation: object) -> type[BaseModel] | None:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return arguments[0] if isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel) else None
    inner = arguments[:1] if origin is Annotated else arguments if origin in (Union, UnionType) else ()
    return next(filter(None, map(_item_model, inner)), None)


def hung_up() -> RequestError:
    return RequestError("the client hung up", found="a closed connection", wanted="a client that waits")
