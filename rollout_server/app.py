"""HTTP around the service: routes, errors as JSON, the bearer token, the limit on bodies (R06).

Every endpoint answers at `/x/` and `/x`, below the configured prefix. An error is an `ErrorBody` with the error's HTTP
status. If the caller hangs up, its call is cancelled. The layers around the routes are plain ASGI and buffer nothing.

`/infer/` answers a JSON list in request order. With `Accept: application/x-ndjson` it answers one line per request, as
each ends (`AnswerLine`). The status is sent with the first line, so what fails before it is an ordinary error. What
fails later is the last line.

`/v1/` is OpenAI's API (`openai_api.py`), for other clients. `/openapi.json` and `/docs` describe all of it, but not
themselves (`openapi.py`).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.config import ServerConfig
from rollout_server.openai_api import ChatCall, CompletionCall, OpenAICall, OpenAIError, OpenAIErrorDetail
from rollout_server.openapi import JSON, Route, document, page
from rollout_server.service import RolloutService, check_number
from shared.addresses import is_loopback
from shared.errors import ProjectError, RequestError, ServerBusyError, UnauthorizedError
from shared.wire import (
    NDJSON,
    TOKEN_VARIABLE,
    AnswerLine,
    CloseCommunicatorCall,
    ErrorBody,
    ExpectScoresCall,
    InferCall,
    InitCommunicatorCall,
    RolloutOutput,
    ScoreCall,
    ScoreReply,
    ServerStatus,
    UpdateWeightsCall,
    UpdateWeightsReply,
    WorldSizeReply,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

_OPEN = ("/health", "/ready")  # probes hold no token; these two say alive or ready, and which start of the server it is
_RETRY_AFTER_S = 1.0
EVENTS = "text/event-stream"
_STATUS: dict[str, Any] = {JSON: dict[str, str]}
_MAX_FIELDS = 256  # of one JSON object; no right body has so many
_MAX_OBJECTS = 150_000  # of one body, lists included; an update of 60,000 tensors has 120,000


def create_app(service: RolloutService, token: str | None) -> FastAPI:
    """`token`: the bearer token that every call but the probes must bring; None: no token."""
    app = FastAPI(title="rollout server", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.config = service.config
    prefix = service.config.url_prefix
    router = APIRouter(prefix=prefix)
    routes = _routes(service) + (_openai_routes(service) if service.config.openai_api else [])
    for route in (*routes, *_documentation(routes, service.config, token is not None)):
        for spelling in (route.path + "/", route.path):
            router.add_api_route(spelling, _with_errors(route.handler), methods=[route.method], response_model=None)
    app.include_router(router)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)
    open_paths = tuple(prefix + path for path in _OPEN)
    app.add_middleware(BodyLimit, config=service.config, open_paths=open_paths)
    hosts = (service.config.host.lower(), service.config.group_host.lower())
    app.add_middleware(Guard, token=token, open_paths=open_paths, hosts=hosts)
    return app


def _routes(service: RolloutService) -> list[Route]:
    """The learner's calls."""

    async def health(request: Request) -> Response:
        service.check_alive()
        return JSONResponse({"status": "ok", "server_id": service.server_id})

    async def ready(request: Request) -> Response:
        service.check_ready()
        return JSONResponse({"status": "ready", "server_id": service.server_id})

    async def status(request: Request) -> Response:
        return _json(service.status())

    async def world_size(request: Request) -> Response:
        return _json(WorldSizeReply(world_size=service.config.world_size))

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def infer(request: Request) -> Response:
        call = await _body(request, InferCall)
        if NDJSON in request.headers.get("accept", ""):
            lines = _answer_lines(service.answers(call))
            return AnswerStream(await _while_connected(request, _first(lines)), lines)
        rollouts = await _while_connected(request, service.infer(call))
        return Response(b"[" + b",".join(rollouts) + b"]", media_type="application/json")

    async def score(request: Request) -> Response:
        return _json(await _while_connected(request, service.score(await _body(request, ScoreCall))))

    async def reset_prefix_cache(request: Request) -> Response:
        await service.reset_prefix_cache()
        return JSONResponse({"status": "reset"})

    async def init_communicator(request: Request) -> Response:
        await _while_connected(request, service.updates.open_group(await _body(request, InitCommunicatorCall)))
        return JSONResponse({"status": "joined"})

    async def update_weights(request: Request) -> Response:
        call = await _body(request, UpdateWeightsCall)
        return _json(await _while_connected(request, service.updates.update(call)))

    async def expect_scores(request: Request) -> Response:
        await service.updates.expect(await _body(request, ExpectScoresCall))
        return JSONResponse({"status": "noted"})

    async def close_communicator(request: Request) -> Response:
        await service.updates.close_group(await _body(request, CloseCommunicatorCall))
        return JSONResponse({"status": "closed"})

    def get(path: str, handler: Handler, says: str, **replies: Any) -> Route:
        return Route(method="GET", path=path, handler=handler, says=says, replies=replies or _STATUS)

    def post(path: str, handler: Handler, says: str, call: type[BaseModel] | None, replies: Any = None) -> Route:
        return Route(method="POST", path=path, handler=handler, says=says, call=call, replies=replies or _STATUS)

    outputs = {JSON: list[RolloutOutput], NDJSON: AnswerLine}
    return [
        get("/health", health, "Is the engine alive?"),
        get("/ready", ready, "Would a rollout be answered now?"),
        get("/status", status, "The model, its weights' version, the gate.", **{JSON: ServerStatus}),
        get("/get_world_size", world_size, "Number of devices that receive weights.", **{JSON: WorldSizeReply}),
        get("/metrics", metrics, "Counters in Prometheus' text format.", **{"text/plain": None}),
        post("/infer", infer, "Roll out: answers to requests.", InferCall, outputs),
        post("/score", score, "Log-probabilities of given answers.", ScoreCall, {JSON: ScoreReply}),
        post("/reset_prefix_cache", reset_prefix_cache, "Forget cached prefixes and images.", None),
        post("/init_communicator", init_communicator, "Join a learner's group.", InitCommunicatorCall),
        post("/update_weights", update_weights, "Take new weights.", UpdateWeightsCall, {JSON: UpdateWeightsReply}),
        post("/expect_scores", expect_scores, "What the canary must score.", ExpectScoresCall),
        post("/close_communicator", close_communicator, "Leave the group.", CloseCommunicatorCall),
    ]


def _openai_routes(service: RolloutService) -> list[Route]:
    """Other clients' calls. Errors are in OpenAI's form."""

    async def models(request: Request) -> Response:
        service.check_alive()
        return Response(await service.engine.models(), media_type=JSON)

    def completions(model: type[OpenAICall]) -> Handler:
        async def complete(request: Request) -> Response:
            call = await _body(request, model)
            if call.stream:
                events = _openai_events(service.completion_events(call))
                return AnswerStream(await _while_connected(request, _first(events)), events, EVENTS)
            return Response(await _while_connected(request, service.complete(call)), media_type=JSON)

        return complete

    replies: dict[str, Any] = {JSON: dict[str, Any], EVENTS: None}

    def route(method: str, path: str, handler: Handler, says: str, call: type[BaseModel] | None = None) -> Route:
        handler = _with_errors(handler, _openai_error)
        own = replies if call else {JSON: dict[str, Any]}
        return Route(method=method, path=path, handler=handler, says=says, call=call, replies=own, error=OpenAIError)

    return [
        route("GET", "/v1/models", models, "The served model, in OpenAI's form."),
        route("POST", "/v1/chat/completions", completions(ChatCall), "OpenAI's chat completions.", ChatCall),
        route("POST", "/v1/completions", completions(CompletionCall), "OpenAI's completions.", CompletionCall),
    ]


def _openai_error(error: ProjectError) -> Response:
    detail = OpenAIErrorDetail(message=str(error), type=type(error).__name__, code=error.http_status)
    return _error_response(error, OpenAIError(error=detail))


async def _openai_events(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Raises what fails before the first event; what fails later is the last one."""
    began = False
    async with aclosing(events):
        try:
            async for event in events:
                yield event
                began = True
        except Exception as error:
            if not began:
                raise
            yield b"data: " + bytes(_openai_error(_as_project_error("/v1/", error)).body) + b"\n\n"


def _documentation(routes: Sequence[Route], config: ServerConfig, with_token: bool) -> list[Route]:
    @functools.cache
    def api() -> dict[str, Any]:
        return document(routes, prefix=config.url_prefix, with_token=with_token, open_paths=_OPEN)

    async def openapi(request: Request) -> Response:
        return JSONResponse(api())

    async def docs(request: Request) -> Response:
        return HTMLResponse(page(api()))

    served = {"/openapi.json": (openapi, config.serve_openapi), "/docs": (docs, config.serve_docs)}
    return [
        Route(method="GET", path=path, handler=handler, says="", replies={})
        for path, (handler, wanted) in served.items()
        if wanted
    ]


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what, found = f"{request.method} {request.url.path} is not served", f"HTTP {error.status_code}: {error.detail}"
    wanted = "an endpoint of the rollout server, below its url_prefix"
    return _error_response(_refused(error.status_code, what, found, wanted, "check base_url"))


async def _on_defect(request: Request, error: Exception) -> Response:
    return _error_response(_defect(request.url.path, error))


def _defect(path: str, error: Exception) -> ProjectError:
    return ProjectError(
        f"{path} failed inside the server",
        found=f"{type(error).__name__}: {error}",
        remedy="see the server's log; this is a defect",
    )


def _with_errors(handler: Handler, form: Callable[[ProjectError], Response] | None = None) -> Handler:
    async def route(request: Request) -> Response:
        try:
            return await handler(request)
        except ProjectError as error:
            return (form or _error_response)(error)

    return route


async def _body(request: Request, model: type[Body]) -> Body:
    """Raises RequestError, which names the wrong fields."""
    try:
        content = b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect:
        raise _gone() from None
    try:
        value = from_json(content)
        _check_number(value, request.app.state.config)
        _check_size(value)
        return model.model_validate(value)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, detail['loc'])) or 'the body'}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_input=False)[:5]
        ]
        found = "; ".join(wrong)
    except ValueError as error:
        found = f"the body: {error}"
    raise RequestError(
        f"{request.url.path}: malformed body",
        found=found,
        wanted=f"a {model.__name__}",
        remedy="run the same version of this project on both sides",
    )


def _check_number(value: Any, config: ServerConfig) -> None:
    """Raises RequestError (413). To understand too many requests takes much longer than to count them."""
    for field in ("infer_requests", "items"):
        items = value.get(field) if isinstance(value, dict) else None
        if isinstance(items, list):
            check_number(field, len(items), config)


def _check_size(value: Any) -> None:
    """Raises ValueError if there is too much in it: an object or an unknown field costs far more than its bytes."""
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


async def _while_connected(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """`call`, cancelled if the client hangs up. The body must have been read before."""
    working = asyncio.create_task(call)
    watching = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        if working.cancelled():
            raise _gone()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


def _gone() -> RequestError:
    return RequestError("the client hung up", found="a closed connection", wanted="a client that waits")


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_lines(answers: AsyncGenerator[tuple[int, bytes]]) -> AsyncGenerator[bytes]:
    """Each answer as a line. Raises what fails before the first one; what fails later is the last line."""
    began = False
    async with aclosing(answers):
        try:
            async for i, output in answers:
                yield b'{"index":%d,"output":%s}\n' % (i, output)
                began = True
        except Exception as error:
            if not began:
                raise
            body = ErrorBody.of(_as_project_error("/infer/", error))
            yield AnswerLine(error=body).model_dump_json(exclude_none=True).encode() + b"\n"


def _as_project_error(path: str, error: Exception) -> ProjectError:
    if isinstance(error, ProjectError):
        return error
    log.error("%s failed", path, exc_info=error)
    return _defect(path, error)


async def _first(lines: AsyncGenerator[bytes]) -> bytes:
    """The first line; nothing if the call has no requests."""
    return await anext(lines, b"")


class AnswerStream(StreamingResponse):
    """`first`, then the rest of `lines`. If the caller hangs up, the lines that are left are given up at once."""

    def __init__(self, first: bytes, lines: AsyncGenerator[bytes], media_type: str = NDJSON) -> None:
        super().__init__(lines, media_type=media_type)
        self._first, self._lines = first, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines):
            with suppress(RequestError):  # the client hung up: nobody is left to answer
                await _while_connected(Request(scope, receive), self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _error_response(error: ProjectError, form: BaseModel | None = None) -> Response:
    headers = {"Retry-After": str(math.ceil(_RETRY_AFTER_S))} if error.http_status == 503 else {}
    body = (form or ErrorBody.of(error)).model_dump_json()
    return Response(body, error.http_status, headers, media_type="application/json")


class Guard:
    """Lets a request through if it brings the token or asks for an open path, and no web page can have made it.

    A page in a browser of this machine can send requests here, but not in the form of this API. The browser names the
    page's `Origin`, and sends no JSON without asking first. If the page's own name was made to point here (DNS
    rebinding), `Host` says that name; with a token that is harmless, and the server may have any name.
    """

    def __init__(self, app: ASGIApp, token: str | None, open_paths: tuple[str, ...], hosts: tuple[str, ...]) -> None:
        self._app = app
        self._wanted = None if token is None else f"Bearer {token}".encode()
        self._open_paths = open_paths
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            error = self._refused_token(scope, headers) or self._refused_page(scope, headers)
            if error is not None:
                return await _error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _refused_token(self, scope: Scope, headers: Headers) -> ProjectError | None:
        found = headers.get("authorization", "").encode()
        if self._wanted is None or scope["path"].rstrip("/") in self._open_paths:
            return None
        if hmac.compare_digest(found, self._wanted):
            return None
        return UnauthorizedError(
            "the bearer token is missing or wrong",
            found="another Authorization header" if found else "no Authorization header",
            wanted="Authorization: Bearer <token>",
            remedy=f"set {TOKEN_VARIABLE} to the server's token",
        )

    def _refused_page(self, scope: Scope, headers: Headers) -> ProjectError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._wanted is None and host and not self._is_own(host):
            found, wanted = f"Host: {host:.80}", "an IP address, localhost, or the server's host"
            return _refused(403, "the request is for another name", found, wanted, "use the address in base_url")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            found, wanted = f"Origin: {origin:.80}", "a client that is no web page"
            return _refused(403, "web pages may not call this server", found, wanted, "remove the Origin header")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and media_type != "application/json":
            found = f"Content-Type: {media_type or 'none'}"
            return _refused(415, "the body is not said to be JSON", found, "application/json", "set the header")
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if is_loopback(name) or name in self._hosts:
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _refused(http_status: int, what: str, found: str, wanted: str, remedy: str) -> RequestError:
    return RequestError(what, found=found, wanted=wanted, remedy=remedy).as_status(http_status)


class BodyLimit:
    """Refuses a body that is too large, too slow, or too much together with those of other calls under way; and a call
    if there are too many, unless it is a probe.

    It refuses as soon as the length, announced or counted, passes a limit. A body counts until its call has ended,
    because what was read of it stays in memory until then.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, open_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._config = config
        self._open_paths = open_paths
        self._num_calls = self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") in self._open_paths:
            return await self._app(scope, receive, send)
        if self._num_calls >= self._config.max_connections:
            return await _error_response(self._too_many_calls())(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._config.max_body_bytes:
            return await _error_response(self._too_large(f"{announced} bytes"))(scope, receive, send)
        num_bytes = num_values = 0
        complete = False
        deadline = asyncio.get_running_loop().time() + self._config.body_timeout_s

        async def limited() -> Message:
            nonlocal num_bytes, num_values, complete
            if complete:  # what comes now is the client's going
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(num_bytes) from None
            body = message.get("body", b"")
            num_new = len(body)
            num_bytes += num_new
            num_values += body.count(b",") + body.count(b"[") + body.count(b"{")
            self._num_held_bytes += num_new
            complete = not message.get("more_body", False)
            if num_bytes > self._config.max_body_bytes:
                raise self._too_large(f"more than {self._config.max_body_bytes} bytes")
            if num_values > self._config.max_body_values:
                raise self._too_many_values()
            if self._num_held_bytes > self._config.max_bodies_bytes:
                raise self._too_many()
            return message

        self._num_calls += 1
        try:
            return await self._app(scope, limited, send)
        finally:
            self._num_calls -= 1
            self._num_held_bytes -= num_bytes

    def _too_large(self, found: str) -> RequestError:
        wanted = f"at most {self._config.max_body_bytes} bytes"
        remedy = "send fewer requests per call, or raise the server's max_body_bytes"
        return _refused(413, "the request's body is too large", found, wanted, remedy)

    def _too_many_values(self) -> RequestError:
        found, wanted = f"more than {self._config.max_body_values} values", "fewer commas, brackets and braces"
        remedy = "send fewer requests per call, or raise the server's max_body_values"
        return _refused(413, "the request's body has too many values", found, wanted, remedy)

    def _too_slow(self, num_bytes: int) -> RequestError:
        found = f"{num_bytes} bytes, and no end after {self._config.body_timeout_s:g} s"
        remedy = "check the network, or raise the server's body_timeout_s"
        return _refused(408, "the request's body did not arrive in time", found, "the whole body", remedy)

    def _too_many_calls(self) -> ServerBusyError:
        return ServerBusyError(
            "too many calls are under way",
            found=str(self._num_calls),
            wanted=f"at most {self._config.max_connections}",
            remedy="try again later, or raise the server's max_connections and its limit on open files",
        )

    def _too_many(self) -> ServerBusyError:
        return ServerBusyError(
            "the calls under way hold too much memory",
            found=f"bodies of {self._num_held_bytes} bytes together",
            wanted=f"at most {self._config.max_bodies_bytes} bytes",
            remedy="try again later, or raise the server's max_bodies_bytes",
        )
