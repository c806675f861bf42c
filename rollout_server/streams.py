"""Sends answers while their caller is connected: if the caller hangs up, its call is cancelled.

In: a call, or an async generator of its answers. Out: the call's result, or a response that sends a line per answer as
soon as it is ready. The HTTP status is sent with the first line. So a failure before the first line is raised, and gets
an HTTP status of its own. A later failure becomes the last line. Nothing is buffered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout_server.bodies import hung_up
from rollout_server.guards import defect
from shared.errors import ProjectError, RequestError
from shared.wire import NDJSON, AnswerLine, ErrorBody

log = logging.getLogger(__name__)

T = TypeVar("T")


async def while_connected(request: Request, call: Coroutine[object, None, T]) -> T:
    """Await `call`, and cancel it if the client hangs up. The body must have been read before."""
    working = asyncio.create_task(call)
    watching = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            # Wait until the cancelled call has left the gate.
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


class AnswerStream(StreamingResponse):
    """Sends `first`, then `lines`. If the caller hangs up, the remaining lines are cancelled at once."""

    def __init__(self, first: bytes, lines: AsyncGenerator[bytes], media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self._first, self._lines = first, lines

    @classmethod
    async def begin(cls, request: Request, lines: AsyncGenerator[bytes], media_type: str = NDJSON) -> AnswerStream:
        """Wait for the first line, and return the response. Raises the error of a call that fails before its first
        line."""
        return cls(await while_connected(request, _first(lines)), lines, media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines):
            # The client hung up, so the error cannot be sent.
            with suppress(RequestError):
                await while_connected(Request(scope, receive), self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first(lines: AsyncGenerator[bytes]) -> bytes:
    """Return the first line, or b"" if the call has no requests."""
    return await anext(lines, b"")


async def to_the_end(
    path: str, answers: AsyncGenerator[T], line: Callable[[T], bytes], last: Callable[[ProjectError], bytes]
) -> AsyncGenerator[bytes]:
    """Yield the `line` of each answer. An error before the first line is raised; a later error becomes the `last`
    line."""
    began = False
    async with aclosing(answers):
        try:
            async for answer in answers:
                yield line(answer)
                began = True
        except Exception as error:
            if not began:
                raise
            if not isinstance(error, ProjectError):
                log.error("%s failed", path, exc_info=error)
            yield last(error if isinstance(error, ProjectError) else defect(path, error))


def answer_line(answer: tuple[int, bytes]) -> bytes:
    """Return the line of an answer of `/infer/`: the request's index and its output."""
    # The output is JSON already, written when its request ended, so nothing is built or parsed again here.
    return b'{"index":%d,"output":%s}\n' % answer


def error_line(error: ProjectError) -> bytes:
    """Return the last line of a failed call of `/infer/`."""
    return AnswerLine(error=ErrorBody.of(error)).model_dump_json(exclude_none=True).encode() + b"\n"
