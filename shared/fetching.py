"""Images fetched from URLs of allowed hosts (D13).

Redirects to other hosts are refused too. A fetch ends at `max_bytes`, and within `timeout_s`, not counting pauses of
this process. Fetched bytes are kept in a bounded cache; call `forget` if they are no image. All functions block, and
may be called from any thread.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import ssl
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from shared.image_rules import ImageRules, check_bytes, media_error
from shared.waits import time_limit

if TYPE_CHECKING:
    import httpx

_MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_URL_CHARS = ":/?#[]@!$&'()*+,;=%~"  # characters of a URL that stay unquoted.
# Compressed bytes would not be read as an image, so compression is refused.
_HEADERS = {"User-Agent": "rollout-matching", "Accept-Encoding": "identity"}


class Fetcher:
    """Fetches the images that `rules` allow, and keeps up to `rules.cache_bytes` of them."""

    def __init__(self, rules: ImageRules) -> None:
        self.rules = rules
        self._cache = _Cache(rules.cache_bytes)

    def read(self, source: str) -> bytes:
        """Return the encoded image. Raises MediaError."""
        return self._cache.get(source) or self._cache.keep(source, self._fetch(source))

    def forget(self, source: str) -> None:
        """Drop a URL from the cache, because its bytes were no image or only a part of one."""
        self._cache.drop(source)

    def check(self, source: str) -> None:
        """Raises MediaError if the URL may not be fetched. Fetches nothing."""
        self._checked_url(source, source)

    def _fetch(self, source: str) -> bytes:
        import httpx  # imported here, because most images are files

        try:
            # In a notebook the calling thread has an event loop that runs, so the fetch needs another thread.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(lambda: asyncio.run(self._follow(source))).result()
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            late = isinstance(error, TimeoutError)
            found = "no complete answer in time" if late else _in_words(error)
            wanted = f"an answer within {self.rules.timeout_s:g} s"
            raise media_error(source, found, wanted, "check the URL, and the network") from error

    async def _follow(self, source: str) -> bytes:
        """Return the bytes at a URL, after redirects. (Name look-ups have the resolver's own limits.)"""
        import httpx

        url = source
        # Single reads have no limit, because a server that sends byte by byte would never exceed it. Proxies of the
        # environment are not used, because they would see every image.
        async with (
            time_limit(self.rules.timeout_s),
            httpx.AsyncClient(trust_env=False, timeout=None, headers=_HEADERS, verify=_certificates()) as client,
        ):
            for _ in range(_MAX_REDIRECTS + 1):
                async with client.stream("GET", _target(self._checked_url(url, source))) as response:
                    if response.status_code == 200:
                        return await self._body(response, source)
                    if response.status_code not in _REDIRECTS:
                        raise media_error(source, f"HTTP {response.status_code}", "HTTP 200", "check the URL")
                    url = urljoin(url, response.headers.get("Location", ""))
        raise media_error(source, f"more than {_MAX_REDIRECTS} redirects", "the image itself", "use the final URL")

    async def _body(self, response: httpx.Response, source: str) -> bytes:
        import httpx

        data = bytearray()
        try:
            async for part in response.aiter_raw():
                data += part
                # The bytes are counted while they are read, because the announced length may be wrong or missing.
                check_bytes(len(data), source, self.rules)
        except httpx.RemoteProtocolError as error:
            wanted = response.headers.get("Content-Length", "more")
            raise ConnectionError(f"the connection ended after {len(data)} of {wanted} bytes") from error
        return bytes(data)

    def _checked_url(self, url: str, source: str) -> SplitResult:
        """Return the parts of an allowed URL. Raises MediaError for any other URL. The fetch uses these parts, because
        parsing the URL again could give another host."""
        try:
            parts = urlsplit(url)
            scheme, host, _ = parts.scheme.lower(), parts.hostname, parts.port
        except ValueError as error:
            raise media_error(source, "no URL", "http(s)://host/path", "correct the URL") from error
        if scheme not in {"http", "https"} or host not in self.rules.hosts:
            allowed = ", ".join(self.rules.hosts) or "none"
            found = f"host {host!r} over {scheme or 'nothing'}"
            remedy = f"add the host to {self.rules.keys}allowed_image_hosts, or use files"
            raise media_error(source, found, f"http(s) to one of: {allowed}", remedy)
        return parts


def _target(parts: SplitResult) -> httpx.URL:
    """Return the URL to ask for, made of the parts that were checked: parsing it again could give another host."""
    import httpx

    path = parts._replace(scheme="", netloc="", fragment="", path=parts.path or "/").geturl()
    target = quote(path, safe=_URL_CHARS).encode()
    return httpx.URL(scheme=parts.scheme, host=parts.hostname, port=parts.port, raw_path=target)


def _in_words(error: BaseException | None) -> str:
    """Describe an error by its cause in the operating system. Texts of httpx are left out: they may quote a URL with a
    token in it."""
    found, cause = "", error
    while cause is not None:
        if isinstance(cause, OSError):
            # asyncio's own text of a refused connection does not have this word.
            refused = isinstance(cause, ConnectionRefusedError)
            found = f"{type(cause).__name__}: {os.strerror(errno.ECONNREFUSED) if refused else cause}"
        cause = cause.__cause__ or cause.__context__
    return found or type(error).__name__


class _Cache:
    """Fetched bytes by URL, at most `size` bytes in all; the least recently used URL is dropped first."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, url: str) -> bytes | None:
        with self._lock:
            if url in self._kept:
                self._kept.move_to_end(url)
            return self._kept.get(url)

    def drop(self, url: str) -> None:
        with self._lock:
            self._used -= len(self._kept.pop(url, b""))

    def keep(self, url: str, data: bytes) -> bytes:
        with self._lock:
            self._used += len(data) - len(self._kept.pop(url, b""))
            self._kept[url] = data
            while self._used > self._size:
                self._used -= len(self._kept.popitem(last=False)[1])
        return data


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
