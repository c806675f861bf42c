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
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rollout_server.bodies import hung_up, read_body
from rollout_server.config import ServerConfig
from rollout_server.guards import BodyLimit, Guard, error_response, refused
from rollout_server.openai_api import ChatCall, CompletionCall, OpenAICall, OpenAIError, OpenAIErrorDetail
from rollout_server.openapi import JSON, ApiDocument, Replies, Route, document, page
from rollout_server.service import RolloutService
from shared.errors import ProjectError, RequestError
from shared.wire import (
    NDJSON,
    AnswerLine,
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    CloseCommunicatorCall,
    ErrorBody,
    ExpectScoresCall,
    InferCall,
    InitCommunicatorCall,
    Message,
    RequestConfig,
    RolloutInferRequest,
    RolloutInfos,
    RolloutOutput,
    ScoreCall,
    ScoreItem,
    ScoreReply,
    ServerStatus,
    UpdateWeightsCall,
    UpdateWeightsReply,
    Usage,
    WorldSizeReply,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_OPEN = ("/health", "/ready")  # probes hold no token; these two say alive or ready, and which start of the server it is
EVENTS = "text/event-stream"
_STATUS: Replies = {JSON: dict[str, str]}

# The examples of the API's description.
_PROMPT = RolloutInferRequest(
    messages=[Message(role="user", content="<image>Detect every digit.")], images=["/data/images/1.png"], uuid="1"
)
_OUTPUT = RolloutOutput(
    response=ChatCompletionResponse(
        id="1",
        created=1700000000,
        model="Qwen/Qwen3-VL-4B-Instruct",
        choices=[Choice(message=ChatMessage(content="[]"), finish_reason="stop", token_ids=[1294])],
        usage=Usage(prompt_tokens=3, completion_tokens=1, total_tokens=4),
    ),
    response_token_ids=[1294],
    prompt_token_ids=[151644, 872, 198],
    rollout_infos=RolloutInfos(ver=0, seed=7, server_id="4c1f0f0c2a3b", uuid="1"),
)


def create_app(service: RolloutService, token: str | None) -> FastAPI:
    """Build the application. `token`: the bearer token that every call but the probes must bring; None: no token."""
    app = FastAPI(title="rollout server", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.config = service.config
    prefix = service.config.url_prefix
    router = APIRouter(prefix=prefix)
    routes = _routes(service) + (_openai_routes(service) if service.config.openai_api else [])
    # FastAPI's own document knows no bodies, because the routes read them themselves.
    api = functools.cache(lambda: document(routes, prefix=prefix, with_token=token is not None, open_paths=_OPEN))
    app.openapi = lambda: dict(api())  # type: ignore[method-assign]
    for route in (*routes, *_documentation(api, service.config)):
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
    return [*_state_routes(service), *_rollout_routes(service), *_sync_routes(service)]


def _get(
    path: str, handler: Handler, says: str, replies: Replies = _STATUS, *, answer: object = None, when: str = "done"
) -> Route:
    return Route(method="GET", path=path, handler=handler, says=says, replies=replies, answer=answer, when=when)


def _post(
    path: str,
    handler: Handler,
    says: str,
    call: type[BaseModel] | None,
    replies: Replies = _STATUS,
    *,
    example: BaseModel | None = None,
    answer: object = None,
    when: str = "done",
) -> Route:
    return Route(
        method="POST",
        path=path,
        handler=handler,
        says=says,
        call=call,
        replies=replies,
        example=example,
        answer=answer,
        when=when,
    )


def _state_routes(service: RolloutService) -> list[Route]:
    """Return the routes of what the server is and does: probes, status and metrics."""

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

    alive, ready_now = ({"status": word, "server_id": "4c1f0f0c2a3b"} for word in ("ok", "ready"))
    return [
        _get("/health", health, "Is the server alive? Needs no token.", answer=alive, when="alive; 503 if not"),
        _get(
            "/ready",
            ready,
            "Does it answer rollouts now? Not while weights change, and not after a failed sync. Needs no token.",
            answer=ready_now,
            when="ready; 503 with the reason if not",
        ),
        _get("/status", status, "What it serves, and what it is doing.", {JSON: ServerStatus}),
        _get(
            "/get_world_size",
            world_size,
            "Its number of GPUs: tensor-parallel times data-parallel size.",
            {JSON: WorldSizeReply},
            answer=WorldSizeReply(world_size=1),
        ),
        _get("/metrics", metrics, "Counters in Prometheus' text format.", {"text/plain": None}),
    ]


def _rollout_routes(service: RolloutService) -> list[Route]:
    """Return the routes of what the served weights answer, and of how they score answers."""

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

    return [
        _post(
            "/infer",
            infer,
            "Rollouts: one answer per request, in order. A request is seeded with its own `seed`, or, if it has none, "
            "by the call's and its place (`RequestConfig`). A request whose `uuid` was answered before gets the same "
            f"answer again. With `Accept: {NDJSON}`, one `AnswerLine` per request, as each ends.",
            InferCall,
            {JSON: list[RolloutOutput], NDJSON: AnswerLine},
            example=InferCall(
                infer_requests=[_PROMPT], request_config=RequestConfig(max_tokens=512, temperature=0.7, seed=7)
            ),
            answer=[_OUTPUT],
        ),
        _post(
            "/score",
            score,
            "Log-probabilities of given answers, by the weights that are served.",
            ScoreCall,
            {JSON: ScoreReply},
            example=ScoreCall(items=[ScoreItem(request=_PROMPT, response_token_ids=[1294])]),
            answer=ScoreReply(ver=0, logprobs=[[-0.25]], prompt_token_ids=[[151644, 872, 198]]),
        ),
        _post(
            "/reset_prefix_cache",
            reset_prefix_cache,
            "Empty the caches of prefixes and images.",
            None,
            answer={"status": "reset"},
        ),
    ]


def _sync_routes(service: RolloutService) -> list[Route]:
    """Return the routes of new weights: a learner's group, and the updates that it sends."""

    async def init_communicator(request: Request) -> Response:
        await _while_connected(request, service.updates.open_group(await read_body(request, InitCommunicatorCall)))
        return JSONResponse({"status": "joined"})

    async def update_weights(request: Request) -> Response:
        call = await read_body(request, UpdateWeightsCall)
        return _json(await _while_connected(request, service.updates.replace_weights(call)))

    async def expect_scores(request: Request) -> Response:
        await service.updates.expect(await read_body(request, ExpectScoresCall))
        return JSONResponse({"status": "noted"})

    async def close_communicator(request: Request) -> Response:
        await service.updates.close_group(await read_body(request, CloseCommunicatorCall))
        return JSONResponse({"status": "closed"})

    return [
        _post(
            "/init_communicator",
            init_communicator,
            "Join the group of a learner for weight syncs. A new learner replaces the old one.",
            InitCommunicatorCall,
            answer={"status": "joined"},
            when="all members have joined",
        ),
        _post(
            "/update_weights",
            update_weights,
            "Receive one update. The call stays open until the new weights are checked and served, or have failed.",
            UpdateWeightsCall,
            {JSON: UpdateWeightsReply},
        ),
        _post(
            "/expect_scores",
            expect_scores,
            "The learner's own log-probabilities of the canary of an update. The server compares, and decides.",
            ExpectScoresCall,
            answer={"status": "noted"},
        ),
        _post(
            "/close_communicator",
            close_communicator,
            "Leave the learner's group.",
            CloseCommunicatorCall,
            answer={"status": "closed"},
        ),
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

    replies: Replies = {JSON: dict[str, object], EVENTS: None}

    def route(method: str, path: str, handler: Handler, says: str, example: OpenAICall | None = None) -> Route:
        return Route(
            method=method,
            path=path,
            handler=_with_errors(handler, _openai_error),
            says=says,
            call=type(example) if example else None,
            replies=replies if example else {JSON: dict[str, object]},
            error=OpenAIError,
            example=example,
            when="as OpenAI's; an error is an `OpenAIError`",
        )

    return [
        route("GET", "/v1/models", models, "The served model, in OpenAI's form."),
        route(
            "POST",
            "/v1/chat/completions",
            completions(ChatCall),
            "OpenAI's chat completions, by vLLM's own OpenAI layer. With `stream`, server-sent events.",
            ChatCall(messages=[Message(role="user", content="Name three digits.")], max_tokens=8),
        ),
        route(
            "POST",
            "/v1/completions",
            completions(CompletionCall),
            "OpenAI's completions. The prompt is text or token ids.",
            CompletionCall(prompt="seven, eight,", max_tokens=8),
        ),
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


def _documentation(api: Callable[[], ApiDocument], config: ServerConfig) -> list[Route]:
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


async def _while_connected(request: Request, call: Coroutine[object, None, T]) -> T:
    """Await `call`, and cancel it if the client hangs up. The body must have been read before."""
    working = asyncio.create_task(call)
    watching = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            # The call gives its place in the gate back before this one ends.
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
    """Yield each answer as a line. Raises what fails before the first one; what fails later is the last line."""
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
    """Return the first line; nothing if the call has no requests."""
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
