"""The API described by its own models: an OpenAPI document, and a page of it that needs no script.

In: the routes that the app serves. Out: `/openapi.json`, and `/docs` as HTML. The page loads nothing from anywhere (the
usual viewers come from a content delivery network), so it also works on a machine without internet. The site's page of
endpoints (`tools/reference.py`) is made from the same document.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypedDict, cast

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import Response

from shared.wire import ErrorBody

JSON = "application/json"
_PLACE = "#/components/schemas/{model}"


# The type of a success by media type; None: not JSON. Python has no type for what stands in an annotation.
Replies = Mapping[str, Any]

# A type in JSON Schema, as pydantic writes it.
Schema = TypedDict(
    "Schema",
    {
        "$ref": str,
        "anyOf": "list[Schema]",
        "const": object,
        "enum": list[object],
        "type": str,
        "items": "Schema",
        "properties": "dict[str, Schema]",
        "required": list[str],
        "description": str,
        "default": object,
        "maxItems": int,
        "minimum": float,
        "maximum": float,
        "exclusiveMinimum": float,
        "exclusiveMaximum": float,
    },
    total=False,
)


class ApiContent(TypedDict, total=False):
    """A body in one media type."""

    schema: Schema
    example: object


class Body(TypedDict, total=False):
    """The body that a call takes, or answers."""

    description: str
    required: bool
    content: dict[str, ApiContent]


class ApiOperation(TypedDict, total=False):
    summary: str
    operationId: str
    description: str
    security: list[dict[str, list[str]]]
    requestBody: Body
    responses: dict[str, Body]


class Components(TypedDict, total=False):
    schemas: dict[str, Schema]
    securitySchemes: dict[str, dict[str, str]]


class ApiDocument(TypedDict):
    """OpenAPI 3.1, the parts that this server uses."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, dict[str, ApiOperation]]
    components: Components


@dataclass(frozen=True, kw_only=True)
class Route:
    """One endpoint. The first sentence of `says` is its summary. `replies`: the type of a success by media type; None:
    not JSON. `example`: a call that works. `answer`: an example of its JSON answer. `when`: what a success means."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    says: str
    call: type[BaseModel] | None = None
    replies: Replies
    error: type[BaseModel] = ErrorBody
    example: BaseModel | None = None
    answer: object = None
    when: str = "done"


def document(routes: Sequence[Route], *, prefix: str, with_token: bool, open_paths: Sequence[str]) -> ApiDocument:
    """Return the document (OpenAPI 3.1)."""
    schemas, definitions = _schemas(routes)
    paths: dict[str, dict[str, ApiOperation]] = {}
    for route in routes:
        operation = _operation(route, schemas)
        if with_token and route.path not in open_paths:
            operation["security"] = [{"token": []}]
        paths.setdefault(prefix + _spelled(route.path), {})[route.method.lower()] = operation
    components: Components = {"schemas": definitions}
    if with_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    info = {"title": "rollout server", "version": "1", "description": "Every path also answers without its last slash."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, schemas: Mapping[str, Schema]) -> ApiOperation:
    summary, *rest = re.split(r"(?<=[.?]) ", route.says, maxsplit=1)
    operation: ApiOperation = {"summary": summary, "operationId": route.path.strip("/").replace("/", "_")}
    if rest:
        operation["description"] = rest[0]
    if route.call is not None:
        body: ApiContent = {"schema": schemas[_key(route, "call")]}
        if route.example is not None:
            body["example"] = route.example.model_dump(mode="json", exclude_unset=True)
        operation["requestBody"] = {"required": True, "content": {JSON: body}}
    success: dict[str, ApiContent] = {
        kind: {"schema": schemas[_key(route, kind)]} if reply else {} for kind, reply in route.replies.items()
    }
    if route.answer is not None:
        success[JSON]["example"] = to_jsonable_python(route.answer)
    failure: Body = {"description": "refused or failed", "content": {JSON: {"schema": schemas[_key(route, "error")]}}}
    operation["responses"] = {"200": {"description": route.when, "content": success}, "default": failure}
    return operation


def _spelled(path: str) -> str:
    return path if path.startswith("/v1/") else path + "/"


def _key(route: Route, part: str) -> str:
    return f"{route.method} {route.path} {part}"


def _schemas(routes: Sequence[Route]) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """Return the schema of every body by `_key`, and the definitions that they refer to."""
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[object]]] = []
    for route in routes:
        if route.call is not None:
            inputs.append((_key(route, "call"), "validation", TypeAdapter(route.call)))
        bodies = {**route.replies, "error": route.error}
        inputs += [(_key(route, kind), "serialization", TypeAdapter(body)) for kind, body in bodies.items() if body]
    schemas, rest = TypeAdapter.json_schemas(inputs, ref_template=_PLACE)
    return {key: cast(Schema, schema) for (key, _), schema in schemas.items()}, rest.get("$defs", {})


# ---- the page ------------------------------------------------------------------------------------------------------

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h2{border-top:1px solid #ccc;padding-top:1rem}code{background:#f4f4f4}a{color:#0645ad}
td{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}"""


def page(api: ApiDocument) -> str:
    """Return the document as HTML."""
    parts = [part for path, methods in api["paths"].items() for part in _operations(path, methods)]
    models = [part for name, schema in sorted(api["components"]["schemas"].items()) for part in _model(name, schema)]
    title = escape(api["info"]["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(api['info']['description'])} The same for programs: <code>openapi.json</code>.</p>"
        f"{''.join(parts)}<h1>Bodies</h1>{''.join(models)}</html>"
    )


def _operations(path: str, methods: Mapping[str, ApiOperation]) -> Iterator[str]:
    for method, operation in methods.items():
        says = f"{operation['summary']} {operation.get('description', '')}"
        yield f"<h2>{method.upper()} <code>{escape(path)}</code></h2><p>{escape(says)}</p><ul>"
        if "requestBody" in operation:
            yield f"<li>takes {_type(operation['requestBody']['content'][JSON]['schema'])}</li>"
        for status, reply in operation["responses"].items():
            for kind, body in reply["content"].items():
                what = f": {_type(body['schema'])}" if body else ""
                yield f"<li>{'answers' if status == '200' else 'or'} <code>{escape(kind)}</code>{what}</li>"
        yield "</ul>"


def _model(name: str, schema: Schema) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p><table>'
    required = schema.get("required", ())
    for field, about in schema.get("properties", {}).items():
        default = "required" if field in required else f"default {about['default']!r}" if "default" in about else ""
        cells = (f"<code>{escape(field)}</code>", _type(about), escape(default), escape(about.get("description", "")))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table>"


def _type(schema: Schema) -> str:
    return in_words(
        schema, lambda name: f'<a href="#{escape(name)}">{escape(name)}</a>', lambda value: escape(repr(value))
    )


def in_words(schema: Schema, link: Callable[[str], str], shown: Callable[[object], str]) -> str:
    """Return a type in words. `link` writes the name of a model, `shown` a value."""
    inner = functools.partial(in_words, link=link, shown=shown)
    if "$ref" in schema:
        return link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(inner, schema["anyOf"])))
    if "const" in schema or "enum" in schema:
        return " or ".join(shown(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"a list of {inner(schema.get('items', {}))}" if schema.get("maxItems") != 0 else "an empty list"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([str(schema.get("type", "anything")), *bounds])


_BOUNDS: Mapping[Literal["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], str] = {
    "minimum": "≥",
    "maximum": "≤",
    "exclusiveMinimum": ">",
    "exclusiveMaximum": "<",
}
