"""HTTP around the routes: errors as JSON, the bearer token, the limit on bodies. Plain ASGI: nothing is buffered.

Called by `app.py`.
"""

from __future__ import annotations

import hmac
import math

from starlette.requests import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.errors import ProjectError, RequestError, UnauthorizedError
from shared.wire import ErrorBody

RETRY_AFTER_S = 1.0


class BodyTooLargeError(RequestError):
    http_status = 413


def error_response(error: ProjectError) -> Response:
    """The error as `ErrorBody`; its nearest name in the shared tree, so that the other side can rebuild it."""
    body = ErrorBody.of(error)
    if not type(error).__module__.startswith("shared."):
        body = body.model_copy(update={"error": type(error).__mro__[1].__name__})
    headers = {"Retry-After": str(math.ceil(RETRY_AFTER_S))} if error.http_status == 503 else {}
    return Response(body.model_dump_json(), error.http_status, headers, media_type="application/json")


class Guard:
    """Lets a request through that brings the token, or asks for an open path."""

    def __init__(self, app: ASGIApp, token: str | None, open_paths: tuple[str, ...]) -> None:
        self._app = app
        self._wanted = None if token is None else f"Bearer {token}".encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._wanted is not None and scope["path"].rstrip("/") not in self._open_paths:
            found = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(found, self._wanted):
                error = UnauthorizedError(
                    "the bearer token is missing or wrong",
                    found="another Authorization header" if found else "no Authorization header",
                    wanted="Authorization: Bearer <token>",
                    remedy="set ROLLOUT_SERVER_TOKEN to the server's token",
                )
                return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body as soon as its length, said or counted, passes the limit."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        said = Headers(scope=scope).get("content-length", "0")
        if said.isdigit() and int(said) > self._max_body_bytes:
            return await error_response(self._too_large(f"{said} bytes"))(scope, receive, send)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large(f"more than {self._max_body_bytes} bytes")
            return message

        return await self._app(scope, counted, send)

    def _too_large(self, found: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            "the request's body is too large",
            found=found,
            wanted=f"at most {self._max_body_bytes} bytes",
            remedy="send fewer requests per call, or raise the server's max_body_bytes",
        )
