"""HTTP answers with a maximum length, because another program may listen at a server's address.

`ask` is for programs that check a server from time to time. `bounded` is for httpx's asynchronous client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import httpx

from shared.waits import awake_s

MAX_STATUS_BYTES = 1 << 20  # max bytes of an answer of `/ready/` or `/status/`
PLAIN = {"Accept-Encoding": "identity"}  # ask for no compression: unpacking could use any amount of memory


def ask(
    client: httpx.Client,
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = MAX_STATUS_BYTES,
) -> tuple[int, bytes]:
    """Return status and body of a GET, within `timeout_s` in all. Raises httpx.HTTPError and httpx.InvalidURL, and
    ValueError if the answer is compressed, too long, or late."""
    deadline = awake_s() + timeout_s
    content = bytearray()
    with client.stream("GET", url, headers={**PLAIN, **(headers or {})}, timeout=timeout_s) as answer:
        if is_packed(answer):
            raise ValueError("a packed answer")
        # Raw bytes are read, because httpx would unpack compressed bytes before their number could be checked.
        for part in answer.iter_raw():
            content += part
            if len(content) > most_bytes:
                raise ValueError(f"an answer of more than {most_bytes} bytes")
            # httpx limits each read only, so a server that sends byte by byte would never be late.
            if awake_s() > deadline:
                raise ValueError(f"no whole answer within {timeout_s:g} s")
        return answer.status_code, bytes(content)


def is_packed(answer: httpx.Response) -> bool:
    return answer.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")


def bounded(answer: httpx.Response, most_bytes: int, too_long: Callable[[], Exception]) -> None:
    """Make the answer's reader raise the error `too_long()` after `most_bytes` bytes."""
    assert isinstance(answer.stream, httpx.AsyncByteStream)
    answer.stream = _Bounded(answer.stream, most_bytes, too_long)


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, most_bytes: int, too_long: Callable[[], Exception]) -> None:
        self._stream, self._left, self._too_long = stream, most_bytes, too_long

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise self._too_long()
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
