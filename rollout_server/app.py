"""HTTP around the service: routes, errors as JSON, the bearer token, the limit on bodies (R06).

Every endpoint answers at `/x/` and `/x`, below the configured prefix. An error is an `ErrorBody` with the error's HTTP
status. If the caller hangs up, its call is cancelled. The layers around the routes are plain ASGI and buffer nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.service import RolloutService
from shared.addresses import is_loopback
from shared.errors import ProjectError, RequestError, UnauthorizedError
from shared.wire import (
    TOKEN_VARIABLE,
    CloseCommunicatorCall,
    ErrorBody,
    ExpectScoresCall,
    InferCall,
    InitCommunicatorCall,
    ScoreCall,
    UpdateWeightsCall,
    WorldSizeReply,
)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

_OPEN = ("/health", "/ready")  # probes hold no token; these two say nothing but alive or ready
_RETRY_AFTER_S = 1.0


def create_app(service: RolloutService, token: str | None) -> FastAPI:
    """`token`: the bearer token that every call but the probes must bring; None: no token."""
    app = FastAPI(title="rollout server", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    prefix = service.config.url_prefix
    router = APIRouter(prefix=prefix)
    for method, path, handler in _routes(service):
        for spelling in (path + "/", path):
            router.add_api_route(spelling, _with_errors(handler), methods=[method], response_model=None)
    app.include_router(router)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)
    app.add_middleware(BodyLimit, max_body_bytes=service.config.max_body_bytes)
    hosts = (service.config.host.lower(), service.config.group_host.lower())
    app.add_middleware(Guard, token=token, open_paths=tuple(prefix + path for path in _OPEN), hosts=hosts)
    return app


def _routes(service: RolloutService) -> list[tuple[str, str, Handler]]:
    async def health(request: Request) -> Response:
        service.check_alive()
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        service.check_ready()
        return JSONResponse({"status": "ready"})

    async def status(request: Request) -> Response:
        return _json(service.status())

    async def world_size(request: Request) -> Response:
        return _json(WorldSizeReply(world_size=service.config.world_size))

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def infer(request: Request) -> Response:
        call = await _body(request, InferCall)
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

    return [
        ("GET", "/health", health),
        ("GET", "/ready", ready),
        ("GET", "/status", status),
        ("GET", "/get_world_size", world_size),
        ("GET", "/metrics", metrics),
        ("POST", "/infer", infer),
        ("POST", "/score", score),
        ("POST", "/reset_prefix_cache", reset_prefix_cache),
        ("POST", "/init_communicator", init_communicator),
        ("POST", "/update_weights", update_weights),
        ("POST", "/expect_scores", expect_scores),
        ("POST", "/close_communicator", close_communicator),
    ]


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what, found = f"{request.method} {request.url.path} is not served", f"HTTP {error.status_code}: {error.detail}"
    wanted = "an endpoint of the rollout server, below its url_prefix"
    return _error_response(_refused(error.status_code, what, found, wanted, "check base_url"))


async def _on_defect(request: Request, error: Exception) -> Response:
    return _error_response(
        ProjectError(
            f"{request.url.path} failed inside the server",
            found=f"{type(error).__name__}: {error}",
            remedy="see the server's log; this is a defect",
        )
    )


def _with_errors(handler: Handler) -> Handler:
    async def route(request: Request) -> Response:
        try:
            return await handler(request)
        except ProjectError as error:
            return _error_response(error)

    return route


async def _body(request: Request, model: type[Body]) -> Body:
    """Raises RequestError, which names the wrong fields."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, detail['loc'])) or 'the body'}: {detail['msg']}"
            for detail in error.errors(include_url=False)[:5]
        ]
        raise RequestError(
            f"{request.url.path}: malformed body",
            found="; ".join(wrong),
            wanted=f"a {model.__name__}",
            remedy="run the same version of this project on both sides",
        ) from error


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
            raise RequestError("the client hung up", found="a closed connection", wanted="a client that waits")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _error_response(error: ProjectError) -> Response:
    headers = {"Retry-After": str(math.ceil(_RETRY_AFTER_S))} if error.http_status == 503 else {}
    body = ErrorBody.of(error).model_dump_json()
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
    error = RequestError(what, found=found, wanted=wanted, remedy=remedy)
    error.http_status = http_status
    return error


class BodyLimit:
    """Refuses a body as soon as its length, announced or counted, passes the limit."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            return await _error_response(self._too_large(f"{announced} bytes"))(scope, receive, send)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large(f"more than {self._max_body_bytes} bytes")
            return message

        return await self._app(scope, counted, send)

    def _too_large(self, found: str) -> RequestError:
        wanted = f"at most {self._max_body_bytes} bytes"
        remedy = "send fewer requests per call, or raise the server's max_body_bytes"
        return _refused(413, "the request's body is too large", found, wanted, remedy)
