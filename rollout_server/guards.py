"""Checks of the caller and of a body's size: plain ASGI layers around the routes, which buffer nothing."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
from urllib.parse import urlsplit

from fastapi import Response
from pydantic import BaseModel
from starlette.requests import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.config import ServerConfig
from shared.addresses import is_loopback
from shared.errors import ProjectError, RequestError, ServerBusyError, UnauthorizedError
from shared.tokens import TOKEN_VARIABLE
from shared.wire import ErrorBody

BODY_S = 60.0  # longest time for sending one body, and longest pause in reading an answer
MOST_BYTES = 2 << 30  # max bytes in the bodies of all running calls
MOST_VALUES = 1_000_000  # max commas, brackets and braces in one body, also in strings; counted before parsing
_RETRY_AFTER_S = 1.0


def error_response(error: ProjectError, form: BaseModel | None = None) -> Response:
    headers = {"Retry-After": str(math.ceil(_RETRY_AFTER_S))} if error.http_status == 503 else {}
    body = (form or ErrorBody.of(error)).model_dump_json()
    return Response(body, error.http_status, headers, media_type="application/json")


def refused(http_status: int, what: str, found: str, wanted: str, remedy: str) -> RequestError:
    return RequestError(what, found=found, wanted=wanted, remedy=remedy).as_status(http_status)


def defect(path: str, error: Exception) -> ProjectError:
    return ProjectError(
        f"{path} failed inside the server",
        found=f"{type(error).__name__}: {error}",
        wanted="an answer, or an error that says what is wrong with the call",
        remedy="see the server's log; this is a defect: report it",
    )


class Guard:
    """Lets a request through if it brings the token or asks for an open path (one that needs no token), and does not
    come from a web page.

    A web page can make a browser on this machine send requests here. The browser adds the page's `Origin`, and sends
    JSON only if the server allows it (CORS). If the page's domain was made to point here (DNS rebinding), `Host` is
    that domain. `Host` is checked only if no token is set, because a web page does not know the token.
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
                return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _refused_token(self, scope: Scope, headers: Headers) -> ProjectError | None:
        found = headers.get("authorization", "").encode()
        if self._wanted is None or scope["path"].rstrip("/") in self._open_paths:
            return None
        # compare_digest takes as long for every wrong token, so its time says nothing about the right one.
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
            return refused(403, "the request is for another name", found, wanted, "use the address in base_url")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            found, wanted = f"Origin: {origin:.80}", "a client that is no web page"
            return refused(403, "web pages may not call this server", found, wanted, "remove the Origin header")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and media_type != "application/json":
            found = f"Content-Type: {media_type or 'none'}"
            return refused(415, "the body is not said to be JSON", found, "application/json", "set the header")
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


class BodyLimit:
    """Refuses a body that is too large, arrives too slowly, or makes the bodies of all running calls too large
    together. A call is also refused if too many calls run, unless it is a probe.

    A body is refused as soon as its announced or its counted length exceeds a limit. A body counts until its call has
    ended, because its bytes stay in memory until then.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, open_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._config = config
        self._open_paths = open_paths
        self._num_calls = self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") in self._open_paths:
            return await self._app(scope, receive, send)
        # Probes have passed above, so a busy server still answers them.
        if self._num_calls >= self._config.max_connections:
            return await error_response(self._too_many_calls())(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._config.max_body_bytes:
            return await error_response(self._too_large(f"{announced} bytes"))(scope, receive, send)
        num_bytes = num_values = 0
        complete = False
        # The whole body has one deadline. With a deadline per message, a caller could send byte by byte for ever.
        deadline = asyncio.get_running_loop().time() + BODY_S

        async def limited() -> Message:
            nonlocal num_bytes, num_values, complete
            # After the whole body, only a message that the client hung up can follow, and waiting for it has no
            # deadline.
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(num_bytes) from None
            body = message.get("body", b"")
            num_new = len(body)
            num_bytes += num_new
            # Values are counted before parsing: 4 MB of small values held the event loop for seconds.
            num_values += body.count(b",") + body.count(b"[") + body.count(b"{")
            self._num_held_bytes += num_new
            complete = not message.get("more_body", False)
            if num_bytes > self._config.max_body_bytes:
                raise self._too_large(f"more than {self._config.max_body_bytes} bytes")
            if num_values > MOST_VALUES:
                raise self._too_many_values()
            if self._num_held_bytes > MOST_BYTES:
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
        return refused(413, "the request's body is too large", found, wanted, remedy)

    def _too_many_values(self) -> RequestError:
        found, wanted = f"more than {MOST_VALUES} values", "fewer commas, brackets and braces"
        remedy = "send fewer requests per call"
        return refused(413, "the request's body has too many values", found, wanted, remedy)

    def _too_slow(self, num_bytes: int) -> RequestError:
        found = f"{num_bytes} bytes, and no end after {BODY_S:g} s"
        remedy = "check the network"
        return refused(408, "the request's body did not arrive in time", found, "the whole body", remedy)

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
            wanted=f"at most {MOST_BYTES} bytes",
            remedy="try again later",
        )
