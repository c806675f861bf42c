"""Reads a rollout server's reply: a wire model, the server's own error, or the answers of one `/infer/` call.

In: the bytes or the stream of a reply. Out: models of `shared/wire.py`, or a `ProjectError` that names the server.
Invariants: each request of an `/infer/` call is answered once: in a list at the end of the call, or in a line of its
own as soon as the request ends. The server's own error text reaches the caller. Without an error text, the HTTP status
decides which error is raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
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
from shared.tokens import TOKEN_VARIABLE
from shared.validation import first_wrong
from shared.waits import awake_s
from shared.wire import NDJSON, AnswerLine, ErrorBody, RolloutOutput

T = TypeVar("T")
RETRY_AFTER_S = 1.0  # seconds before a call is repeated, if the busy server sent no Retry-After.
# Without infer_timeout_s, these constants set the deadline of an /infer/ call (D16), see `Pace.deadline_s`.
MAX_INFER_S = 600.0
# The deadline is at least this long, because a weight update or a compilation may delay one call by minutes.
MIN_INFER_S = 120.0
PACE_CALLS = 32  # number of last calls whose tokens per second are kept.
# The deadline is this factor times the time that a call needs at the lowest speed of the last PACE_CALLS calls.
PACE_MARGIN = 4.0

_LINE, _LIST = TypeAdapter(AnswerLine), TypeAdapter(list[RolloutOutput])


def read_reply(content: bytes, adapter: TypeAdapter[T], base_url: str, path: str) -> T:
    """Return the JSON body `content` as the adapter's wire model. Raises RolloutError if the body does not fit the
    model; the error names the server and the first wrong field."""
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        raise RolloutError(
            f"{base_url}: malformed answer at {path}",
            **first_wrong(error, "the body")._asdict(),
            remedy="run the same version of this project on both sides, and look at the server's log",
        ) from error


def error_of(response: httpx.Response, base_url: str) -> ProjectError:
    """Return the error in the body of a failed call, with the server's URL in front. If the body is no `ErrorBody`, the
    HTTP status decides which error is returned."""
    try:
        return ErrorBody.model_validate_json(response.content).to_exception().named(base_url)
    except ValidationError:
        return _error_by_status(response, base_url)


def retry_after_s(response: httpx.Response) -> float:
    """Return the seconds to wait before the next call: the server's `Retry-After`, or RETRY_AFTER_S without one."""
    try:
        # At least a short pause, because a `Retry-After` of 0 would make the caller repeat its call without end at full
        # speed.
        return max(0.01, float(response.headers.get("Retry-After", RETRY_AFTER_S)))
    except ValueError:
        return RETRY_AFTER_S


def _error_by_status(response: httpx.Response, base_url: str) -> ProjectError:
    status = response.status_code
    cls: type[ProjectError] = ServerError if status >= 500 else ServerMismatchError
    remedy = "check that base_url is the prefix of a rollout server (make serve) of the same version"
    if status == 401:
        cls, remedy = UnauthorizedError, f"set {TOKEN_VARIABLE} to the server's token"
    elif status == 503:
        cls, remedy = ServerBusyError, "look at the server's log"
    return cls(
        f"{base_url}: {response.request.method} {response.url.path} failed",
        found=f"HTTP {status}: {response.text[:200]!r}",
        wanted="a 2xx answer",
        remedy=remedy,
    )


class Pace:
    """A server's speed: for each of the last PACE_CALLS calls, tokens per second of its longest answer."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=PACE_CALLS)

    def saw(self, num_tokens: int, seconds: float) -> None:
        """Note one call: its longest answer has `num_tokens` and arrived `seconds` after the call was sent."""
        self._rates.append(max(1, num_tokens) / max(1e-6, seconds))

    def deadline_s(self, max_new_tokens: int | None) -> float:
        """Return the deadline of an `/infer/` call in seconds: PACE_MARGIN times the time that `max_new_tokens` tokens
        take at the lowest speed of the last calls, but at least MIN_INFER_S and at most MAX_INFER_S. Before the first
        answer, or without `max_new_tokens`, it is MAX_INFER_S."""
        if not self._rates or max_new_tokens is None:
            return MAX_INFER_S
        return min(MAX_INFER_S, max(MIN_INFER_S, PACE_MARGIN * max_new_tokens / min(self._rates)))


class Answers:
    """The answers of one `/infer/` call with `number` requests. Calls `on_answer(index of the request, output)` when an
    answer arrives, and notes the longest answer for `Pace`."""

    def __init__(self, base_url: str, number: int, on_answer: Callable[[int, RolloutOutput], None]) -> None:
        self.number, self.sent_at = number, 0.0
        self.longest, self.longest_s = 0, 0.0  # tokens of the longest answer, and seconds until it arrived
        self._base_url, self._on_answer = base_url, on_answer
        self._missing = set(range(number))

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    async def read(self, response: httpx.Response) -> None:
        """Read the response of a successful call: one JSON body, or one line per answer."""
        if NDJSON in response.headers.get("content-type", ""):
            async for line in _lines(response):
                self._take_line(line)
            return
        await response.aread()
        outputs = read_reply(response.content, _LIST, self._base_url, "/infer/")
        if len(outputs) != self.number:
            raise self._incomplete(len(outputs))
        for i, output in enumerate(outputs):
            self._take(i, output)

    def check_complete(self) -> None:
        """Raises RolloutError if a request has no answer yet."""
        if self._missing:
            raise self._incomplete(self.number - len(self._missing))

    def _take_line(self, content: bytes) -> None:
        line = read_reply(content, _LINE, self._base_url, "/infer/")
        if line.error is not None:
            raise line.error.to_exception().named(self._base_url)
        if line.output is None or line.index not in self._missing:
            raise RolloutError(
                f"{self._base_url}: malformed answer at /infer/",
                found=f"a line for request {line.index}, {'with' if line.output else 'without'} an output",
                wanted=f"one line for each of the {self.number} requests",
                remedy="run the same version of this project on both sides, and look at the server's log",
            )
        self._take(line.index, line.output)

    def _take(self, i: int, output: RolloutOutput) -> None:
        self._missing.remove(i)
        if len(output.response_token_ids) >= self.longest:
            self.longest, self.longest_s = len(output.response_token_ids), awake_s() - self.sent_at
        self._on_answer(i, output)

    def _incomplete(self, found: int) -> RolloutError:
        return RolloutError(
            f"{self._base_url}: malformed answer at /infer/",
            found=f"{found} answers",
            wanted=f"one per request ({self.number})",
            remedy="run the same version of this project on both sides, and look at the server's log",
        )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of the body, which end with "\\n". httpx's own `aiter_lines` also splits at other characters,
    which JSON strings may contain."""
    rest = b""
    async for content in response.aiter_bytes():
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
