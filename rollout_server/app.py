"""HTTP around the service: routes, errors as JSON, the bearer token, the limit on bodies (R06).

Every endpoint answers at `/x/` and `/x`, below the configured prefix. An error is an `ErrorBody` with the error's HTTP
status. If the caller hangs up, its call is cancelled (`streams.py`). The layers around the routes are plain ASGI and
buffer nothing.

`/infer/` answers a JSON list in request order. With `Accept: application/x-ndjson` it sends one `AnswerLine` per
request, as soon as the request ends.

`/v1/` is OpenAI's API (`openai_api.py`), for other clients. FastAPI describes all routes at `/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.openapi.constants import REF_TEMPLATE
from fastapi.params import Depends
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from starlette.exceptions import HTTPException
from starlette.routing import Route

from rollout_server.bodies import read_body
from rollout_server.guards import BodyLimit, Guard, defect, error_response, refused
from rollout_server.openai_api import ChatCall, CompletionCall, OpenAICall, OpenAIError, OpenAIErrorDetail
from rollout_server.service import RolloutService
from rollout_server.streams import AnswerStream, answer_line, error_line, to_the_end, while_connected
from shared.errors import ProjectError
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

JSON, EVENTS = "application/json", "text/event-stream"
_AS_OPENAI = "as OpenAI's; an error is an `OpenAIError`"
_OPEN = ("/health", "/ready")  # paths that need no token: their answers have only the state and the server's id

# Examples for the OpenAPI document.
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
    """Build the application. `token`: the bearer token that every call except probes must have; None: no token."""
    config = service.config
    app = FastAPI(
        title="rollout server",
        version="1",
        description="Every path also answers without its last slash.",
        openapi_url=f"{config.url_prefix}/openapi.json",
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.config = config
    # `guarded` only adds the token to the OpenAPI document. `Guard` checks the token.
    guarded = [] if token is None else [Security(HTTPBearer(scheme_name="token"))]
    probes = _router(config.url_prefix, _Route, ErrorBody, [])
    _add_probes(probes, service)
    own = _router(config.url_prefix, _Route, ErrorBody, guarded)
    _add_state_routes(own, service)
    _add_rollout_routes(own, service)
    _add_sync_routes(own, service)
    openai = _router(config.url_prefix, _OpenAIRoute, OpenAIError, guarded)
    if config.openai_api:
        _add_openai_routes(openai, service)
    for route in (*probes.routes, *own.routes, *openai.routes):
        assert isinstance(route, _Route), "the functions above add no others"
        other = route.path.removesuffix("/") if route.path.endswith("/") else f"{route.path}/"
        app.router.routes += [route, Route(other, route.get_route_handler(), methods=[*route.methods])]
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)
    open_paths = tuple(config.url_prefix + path for path in _OPEN)
    # The layer that is added last runs first: the token is checked before any byte of a body is read.
    app.add_middleware(BodyLimit, config=config, open_paths=open_paths)
    hosts = (config.host.lower(), config.group_host.lower())
    app.add_middleware(Guard, token=token, open_paths=open_paths, hosts=hosts)
    written = app.openapi
    app.openapi = lambda: _with_whole_bounds(written())  # type: ignore[method-assign]
    return app


_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def _with_whole_bounds(schema: Any) -> Any:
    """Return the OpenAPI document with whole-number bounds as integers. FastAPI makes them floats, and writes 2**63 as
    9.223372036854776e+18."""
    if isinstance(schema, list):
        return [_with_whole_bounds(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: int(value)
        if name in _BOUNDS and isinstance(value, float) and value.is_integer()
        else _with_whole_bounds(value)
        for name, value in schema.items()
    }


def _router(prefix: str, route_class: type[_Route], error: type[BaseModel], dependencies: list[Depends]) -> APIRouter:
    failure = {"model": error, "description": "refused or failed"}
    return APIRouter(prefix=prefix, route_class=route_class, dependencies=dependencies, responses={"default": failure})


def _openai_error(error: ProjectError) -> Response:
    detail = OpenAIErrorDetail(message=str(error), type=type(error).__name__, code=error.http_status)
    return error_response(error, OpenAIError(error=detail))


class _Route(APIRoute):
    """A route whose body, the handler's argument `call`, is read by `read_body` within the server's limits. FastAPI
    documents the body, and does not read it. The first paragraph of the handler's docstring is the route's summary."""

    on_error: Callable[[ProjectError], Response] = staticmethod(error_response)

    def __init__(self, path: str, endpoint: Callable[..., Any], **about: Any) -> None:
        about["summary"], *more = (" ".join(part.split()) for part in (endpoint.__doc__ or "").split("\n\n", 1))
        about |= {"description": more[0] if more else " ", "operation_id": endpoint.__name__}
        super().__init__(path, endpoint, **about)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        call = get_type_hints(self.endpoint).get("call")

        async def handle(request: Request) -> Response:
            try:
                bodies = [await read_body(request, call)] if call else []
                answer: Response = await self.endpoint(request, *bodies)
                return answer
            except ProjectError as error:
                return self.on_error(error)

        return handle


class _OpenAIRoute(_Route):
    on_error = staticmethod(_openai_error)


def _takes(example: BaseModel) -> dict[str, object]:
    """Return the OpenAPI fields that add an example of the request body."""
    content = {JSON: {"example": example.model_dump(mode="json", exclude_unset=True)}}
    return {"requestBody": {"content": content}}


def _answers(example: object, others: Mapping[str, object] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI fields that add an example of the 200 response. `others`: the response's other media types."""
    return {200: {"content": {JSON: {"example": to_jsonable_python(example)}, **(others or {})}}}


def _add_probes(router: APIRouter, service: RolloutService) -> None:
    alive, able = ({"status": word, "server_id": "4c1f0f0c2a3b"} for word in ("ok", "ready"))

    @router.get(
        "/health/", response_model=dict[str, str], responses=_answers(alive), response_description="alive; 503 if not"
    )
    async def health(request: Request) -> Response:
        """Is the server alive? Needs no token."""
        service.check_alive()
        return JSONResponse({"status": "ok", "server_id": service.server_id})

    @router.get(
        "/ready/",
        response_model=dict[str, str],
        responses=_answers(able),
        response_description="ready; 503 with the reason if not",
    )
    async def ready(request: Request) -> Response:
        """Does the server answer rollouts now? Needs no token.

        The server is not ready while weights change, or after a failed sync.
        """
        service.check_ready()
        return JSONResponse({"status": "ready", "server_id": service.server_id})


def _add_state_routes(router: APIRouter, service: RolloutService) -> None:
    """Add the routes that report the server's state."""

    @router.get("/status/", response_model=ServerStatus)
    async def status(request: Request) -> Response:
        """Return what the server serves, and what it is doing."""
        return _json(service.status())

    @router.get("/get_world_size/", response_model=WorldSizeReply, responses=_answers(WorldSizeReply(world_size=1)))
    async def get_world_size(request: Request) -> Response:
        """Return the server's number of GPUs: tensor-parallel times data-parallel size."""
        return _json(WorldSizeReply(world_size=service.config.world_size))

    @router.get("/metrics/", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Counters in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_rollout_routes(router: APIRouter, service: RolloutService) -> None:
    """Add the routes that generate and score answers with the served weights."""
    # FastAPI documents only the response model, so the type of a streamed line is added by hand.
    line = AnswerLine.model_json_schema(mode="serialization", ref_template=REF_TEMPLATE)
    # The schema of the JSON answer already has the types in `$defs`.
    del line["$defs"]

    @router.post(
        "/infer/",
        response_model=list[RolloutOutput],
        responses=_answers([_OUTPUT], {NDJSON: {"schema": line}}),
        openapi_extra=_takes(
            InferCall(infer_requests=[_PROMPT], request_config=RequestConfig(max_tokens=512, temperature=0.7, seed=7))
        ),
    )
    async def infer(request: Request, call: InferCall) -> Response:
        """Rollouts: one answer per request, in order.

        A request is seeded with its `seed`. If the request has no `seed`, one is made from the call's seed and the
        request's index in the call (`RequestConfig`). A request whose `uuid` was answered before gets the same answer
        again. With `Accept: application/x-ndjson`, the server sends one `AnswerLine` per request, as soon as the
        request ends.
        """
        if NDJSON in request.headers.get("accept", ""):
            lines = to_the_end("/infer/", service.answers(call), answer_line, error_line)
            return await AnswerStream.begin(request, lines)
        rollouts = await while_connected(request, service.infer(call))
        return Response(b"[" + b",".join(rollouts) + b"]", media_type=JSON)

    @router.post(
        "/score/",
        response_model=ScoreReply,
        responses=_answers(ScoreReply(ver=0, logprobs=[[-0.25]], prompt_token_ids=[[151644, 872, 198]])),
        openapi_extra=_takes(ScoreCall(items=[ScoreItem(request=_PROMPT, response_token_ids=[1294])])),
    )
    async def score(request: Request, call: ScoreCall) -> Response:
        """Log-probabilities of given answers, by the weights that are served."""
        return _json(await while_connected(request, service.score(call)))

    @router.post("/reset_prefix_cache/", response_model=dict[str, str], responses=_answers({"status": "reset"}))
    async def reset_prefix_cache(request: Request) -> Response:
        """Empty the caches of prefixes and images."""
        await service.reset_prefix_cache()
        return JSONResponse({"status": "reset"})


def _add_sync_routes(router: APIRouter, service: RolloutService) -> None:
    """Add the routes for weight syncs: the learner's group and its updates."""

    @router.post(
        "/init_communicator/",
        response_model=dict[str, str],
        responses=_answers({"status": "joined"}),
        response_description="all members have joined",
    )
    async def init_communicator(request: Request, call: InitCommunicatorCall) -> Response:
        """Join the group of a learner for weight syncs.

        A new learner replaces the old one.
        """
        await while_connected(request, service.updates.open_group(call))
        return JSONResponse({"status": "joined"})

    @router.post("/update_weights/", response_model=UpdateWeightsReply)
    async def update_weights(request: Request, call: UpdateWeightsCall) -> Response:
        """Receive one update.

        The call stays open until the new weights are checked and served, or have failed.
        """
        return _json(await while_connected(request, service.updates.replace_weights(call)))

    @router.post("/expect_scores/", response_model=dict[str, str], responses=_answers({"status": "noted"}))
    async def expect_scores(request: Request, call: ExpectScoresCall) -> Response:
        """Take the learner's log-probabilities of an update's canary (fixed answers).

        The server compares them with its own log-probabilities, and serves the update or refuses it.
        """
        await service.updates.expect(call)
        return JSONResponse({"status": "noted"})

    @router.post("/close_communicator/", response_model=dict[str, str], responses=_answers({"status": "closed"}))
    async def close_communicator(request: Request, call: CloseCommunicatorCall) -> Response:
        """Leave the learner's group."""
        await service.updates.close_group(call)
        return JSONResponse({"status": "closed"})


def _add_openai_routes(router: APIRouter, service: RolloutService) -> None:
    """Add OpenAI's routes, for clients other than the learner. Errors have OpenAI's format."""
    events: dict[int | str, dict[str, Any]] = {200: {"content": {EVENTS: {}}}}

    async def complete(request: Request, call: OpenAICall) -> Response:
        if call.stream:
            events = to_the_end("/v1/", service.completion_events(call), bytes, _last_event)
            return await AnswerStream.begin(request, events, EVENTS)
        return Response(await while_connected(request, service.complete(call)), media_type=JSON)

    @router.get("/v1/models", response_model=dict[str, object], response_description=_AS_OPENAI)
    async def v1_models(request: Request) -> Response:
        """The served model, in OpenAI's form."""
        service.check_alive()
        return Response(await service.engine.models(), media_type=JSON)

    @router.post(
        "/v1/chat/completions",
        response_model=dict[str, object],
        response_description=_AS_OPENAI,
        responses=events,
        openapi_extra=_takes(ChatCall(messages=[Message(role="user", content="Name three digits.")], max_tokens=8)),
    )
    async def v1_chat_completions(request: Request, call: ChatCall) -> Response:
        """OpenAI's chat completions, answered by vLLM's own OpenAI layer.

        With `stream`, the answer comes as server-sent events.
        """
        return await complete(request, call)

    @router.post(
        "/v1/completions",
        response_model=dict[str, object],
        response_description=_AS_OPENAI,
        responses=events,
        openapi_extra=_takes(CompletionCall(prompt="seven, eight,", max_tokens=8)),
    )
    async def v1_completions(request: Request, call: CompletionCall) -> Response:
        """OpenAI's completions.

        The prompt is text or token ids.
        """
        return await complete(request, call)


def _last_event(error: ProjectError) -> bytes:
    return b"data: " + bytes(_openai_error(error).body) + b"\n\n"


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what, found = f"{request.method} {request.url.path} is not served", f"HTTP {error.status_code}: {error.detail}"
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "another method")
        remedy = f"use {methods}; {request.app.state.config.url_prefix}/openapi.json lists every call"
        return error_response(refused(405, what, found, f"{methods} {request.url.path}", remedy))
    wanted = "an endpoint of the rollout server, below its url_prefix"
    return error_response(refused(error.status_code, what, found, wanted, "check base_url"))


async def _on_defect(request: Request, error: Exception) -> Response:
    return error_response(defect(request.url.path, error))


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")
