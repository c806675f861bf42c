"""Images fetched from URLs of allowed hosts (D13).

Redirects to other hosts are refused too. A fetch ends at `max_bytes`, and within `timeout_s`, not counting pauses of
this process. Fetched bytes are kept in a bounded cache; call `forget` if they are no image. All functions block, and
may be called from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from shared.image_rules import ImageRules, check_bytes, media_error
from shared.waits import SLICE_S, Deadline

_MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_URL_CHARS = ":/?#[]@!$&'()*+,;=%~"  # these characters must not be quoted again
_HEADERS = {"User-Agent": "rollout-matching"}
_FETCH_CHUNK_BYTES = 1 << 16


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
        with contextlib.closing(_Line(self.rules.timeout_s)) as line:
            try:
                return self._follow(source, line)
            except (OSError, HTTPException, ValueError) as error:
                found = "no complete answer in time" if line.hung_up else _in_words(error)
                wanted = f"an answer within {self.rules.timeout_s:g} s"
                raise media_error(source, found, wanted, "check the URL, and the network") from error

    def _follow(self, source: str, line: _Line) -> bytes:
        url = source
        for _ in range(_MAX_REDIRECTS + 1):
            with _answer(self._checked_url(url, source), line) as response:
                if response.status == 200:
                    return self._body(response, source, line)
                if response.status not in _REDIRECTS:
                    raise media_error(source, f"HTTP {response.status}", "HTTP 200", "check the URL")
                url = urljoin(url, response.headers.get("Location", ""))
        raise media_error(source, f"more than {_MAX_REDIRECTS} redirects", "the image itself", "use the final URL")

    def _body(self, response: HTTPResponse, source: str, line: _Line) -> bytes:
        data = bytearray()
        while part := response.read(_FETCH_CHUNK_BYTES):
            data += part
            # The bytes are counted while they are read, because the announced length may be wrong or missing.
            check_bytes(len(data), source, self.rules)
        if line.hung_up:
            raise TimeoutError(f"{len(data)} bytes so far")
        # http.client raises nothing when a body ends too soon.
        if response.length:
            raise ConnectionError(f"the connection ended after {len(data)} of {len(data) + response.length} bytes")
        return bytes(data)

    def _checked_url(self, url: str, source: str) -> SplitResult:
        """Return the parts of an allowed URL. Raises MediaError for any other. The fetch uses these parts, because
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


def _in_words(error: Exception) -> str:
    """Describe an error without the texts of `http.client`, which may quote a URL with a token in it."""
    return f"{type(error).__name__}: {error}" if isinstance(error, OSError) else type(error).__name__


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


class _Line:
    """The connections of one fetch, one after the other, with one deadline. At the deadline the connection is shut
    down, so that a server that sends byte by byte cannot extend it. Pauses of this process do not count. (Name look-ups
    have the resolver's own limits.)"""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = Deadline(timeout_s)
        self.hung_up = False
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def connect(self, address: tuple[str, int]) -> socket.socket:
        """Return a connection that the caller closes. Raises OSError."""
        if self.hung_up:
            raise TimeoutError("redirects took the time")
        link = socket.create_connection(address, timeout=max(SLICE_S, self._deadline.left_s()))
        # Single reads have no limit, because the watching thread shuts the connection down at the deadline.
        link.settimeout(None)
        with self._lock:
            self._release()
            # The socket is duplicated, because TLS takes the descriptor away from the socket that it wraps.
            self._link = link.dup()
        # If the deadline has passed while connecting, the watching thread did not see this connection.
        if self.hung_up:
            link.close()
            raise TimeoutError("connecting took the time")
        return link

    def close(self) -> None:
        self._closed.set()
        self._watching.join()
        self._release()

    def _release(self) -> None:
        if self._link is not None:
            self._link.close()

    def _watch(self) -> None:
        while not self._closed.wait(SLICE_S):
            if self._deadline.is_over():
                with self._lock:
                    self.hung_up = True
                    if self._link is not None:
                        with contextlib.suppress(OSError):  # the connection has already ended
                            self._link.shutdown(socket.SHUT_RDWR)
                return


@contextlib.contextmanager
def _answer(url: SplitResult, line: _Line) -> Iterator[HTTPResponse]:
    """Yield the answer to a GET. Proxies are not used, because they would see every image."""
    secure, host = url.scheme == "https", url.hostname or ""
    with contextlib.closing(line.connect((host, url.port or (443 if secure else 80)))) as link:
        connection = HTTPConnection(host, url.port)
        connection.sock = _certificates().wrap_socket(link, server_hostname=host) if secure else link
        with contextlib.closing(connection):
            # The target is made of the parts that were checked, because parsing the URL again could give another host.
            target = url._replace(scheme="", netloc="", fragment="", path=url.path or "/").geturl()
            connection.request("GET", quote(target, safe=_URL_CHARS), headers=_HEADERS)
            yield connection.getresponse()


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
