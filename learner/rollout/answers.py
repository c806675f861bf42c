"""What a rollout server's HTTP answer means: a typed reply, or an error of the project's tree that names the server.

Pure. Called by `client.py`.
"""

from __future__ import annotations

from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from shared.errors import (
    ProjectError,
    RolloutError,
    ServerBusyError,
    ServerError,
    ServerMismatchError,
    UnauthorizedError,
)
from shared.wire import ErrorBody

T = TypeVar("T")


def read_reply(response: httpx.Response, adapter: TypeAdapter[T], base_url: str) -> T:
    """The body as its wire model. Raises RolloutError with the server and the first wrong field."""
    try:
        return adapter.validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        raise RolloutError(
            f"{base_url}: malformed answer at {response.url.path}",
            found=f"{field}: {first['input']!r:.200}",
            wanted=first["msg"],
            remedy="run the same version of this project on both sides, and look at the server's log",
        ) from error


def error_of(response: httpx.Response, base_url: str) -> ProjectError:
    """The server's own error, with its URL put in front; by HTTP status where the body is not an `ErrorBody`."""
    try:
        error = ErrorBody.model_validate_json(response.content).to_exception()
    except ValidationError:
        return _error_by_status(response, base_url)
    return type(error)(f"{base_url}: {error.what}", found=error.found, wanted=error.wanted, remedy=error.remedy)


def retry_after_s(response: httpx.Response) -> float:
    """Seconds that the server asks to wait (`Retry-After`); one second where it does not say it in seconds."""
    try:
        return max(0.01, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _error_by_status(response: httpx.Response, base_url: str) -> ProjectError:
    status = response.status_code
    cls: type[ProjectError] = ServerError if status >= 500 else ServerMismatchError
    remedy = "check that base_url is the prefix of a rollout server (make serve) of the same version"
    if status == 401:
        cls, remedy = UnauthorizedError, "set ROLLOUT_SERVER_TOKEN to the server's token"
    elif status == 503:
        cls, remedy = ServerBusyError, "look at the server's log"
    return cls(
        f"{base_url}: {response.request.method} {response.url.path} failed",
        found=f"HTTP {status}: {response.text[:200]!r}",
        wanted="a 2xx answer",
        remedy=remedy,
    )
