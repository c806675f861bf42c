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
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rollout_server.bodies import hung_up, read_body
from rollout_server.config import ServerConfig
from rollout_server.guards import BodyLimit, Guard, error_response, refused
from rollout_server.openai_api import ChatCall, CompletionCall, OpenAICall, OpenAIError, OpenAIErrorDetail
from rollout_server.openapi import JSON, Route, document, page
from rollout_server.service import RolloutService
from shared.errors import ProjectError, RequestError
from shared.wire import (
    NDJSON,
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
Handler = Callable[[Request], Awaitable[Response]]

_OPEN = ("/health", "/ready")  # probes hold no token; these two say alive or ready, and which start of the server it is
EVENTS = "text/event-stream"
_STATUS: dict[str, Any] = {JSON: dict[str, str]}


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
        call = await read_body(request, InferCall)
        if NDJSON in request.headers.get("accept", ""):
            lines = _answer_lines(service.answers(call))
            return AnswerStream(await _while_connected(request, _first(lines)), lines)
        rollouts = await _while_connected(request, service.infer(call))
        return Response(b"[" + b",".join(rollouts) + b"]", media_type="application/json")

    async def score(request: Request) -> Response:
        return _json(await _while_connected(request, service.score(await read_body(request, ScoreCall))))

    async def reset_prefix_cache(request: Request) -> Response:
        await service.reset_prefix_cache()
        return JSONResponse({"status": "reset"})

    async def init_communicator(request: Request) -> Response:
        await _while_connected(request, service.updates.open_group(await read_body(request, InitCommunicatorCall)))
        return JSONResponse({"status": "joined"})

    async def update_weights(request: Request) -> Response:
        call = await read_body(request, UpdateWeightsCall)
        return _json(await _while_connected(request, service.updates.update(call)))

    async def expect_scores(request: Request) -> Response:
        await service.updates.expect(await read_body(request, ExpectScoresCall))
        return JSONResponse({"status": "noted"})

    async def close_communicator(request: Request) -> Response:
        await service.updates.close_group(await read_body(request, CloseCommunicatorCall))
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
            call = await read_body(request, model, "correct these fields; the server's /docs lists those that it takes")
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
    return error_response(error, OpenAIError(error=detail))


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
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "another method")
        remedy = f"use {methods}; {request.app.state.config.url_prefix}/docs shows every call"
        return error_response(refused(405, what, found, f"{methods} {request.url.path}", remedy))
    wanted = "an endpoint of the rollout server, below its url_prefix"
    return error_response(refused(error.status_code, what, found, wanted, "check base_url"))


async def _on_defect(request: Request, error: Exception) -> Response:
    return error_response(_defect(request.url.path, error))


def _defect(path: str, error: Exception) -> ProjectError:
    return ProjectError(
        f"{path} failed inside the server",
        found=f"{type(error).__name__}: {error}",
        wanted="an answer, or an error that says what is wrong with the call",
        remedy="see the server's log; this is a defect: report it",
    )


def _with_errors(handler: Handler, form: Callable[[ProjectError], Response] | None = None) -> Handler:
    async def route(request: Request) -> Response:
        try:
            return await handler(request)
        except ProjectError as error:
            return (form or error_response)(error)

    return route


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
            raise hung_up()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


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
