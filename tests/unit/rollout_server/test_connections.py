"""Slow and idle callers against a real uvicorn with few open files (R16): probes answer, everybody has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollout_server import connections, guards, service, serving
from rollout_server.__main__ import _bind
from rollout_server.config import ServerConfig
from shared.addresses import free_port
from shared.errors import ConfigError
from tests.unit.rollout_server.fakes import FakeEngine
from tests.waits import wait_until

OPEN_FILES = 450  # the server's
HEADER_S, BODY_S = 0.5, 1.0
HEAD = b"POST /infer/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"infer_requests":[{"messages":[{"role":"user","content":"a"}]}]}'


class Engine(FakeEngine):
    """Its answers are long."""

    async def generate(self, request, config, seed):  # type: ignore[no-untyped-def]
        if config.max_tokens == 1:
            await asyncio.sleep(60)
        generations = await super().generate(request, config, seed)
        return [replace(one, text="x" * (1024 * config.max_tokens)) for one in generations]


def _serve(config: ServerConfig, log: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    service._versions = dict  # it imports vLLM
    connections.HEADER_S, guards.BODY_S = HEADER_S, BODY_S
    with log.open("w") as console:
        os.dup2(console.fileno(), 2)
        asyncio.run(serving.serve(Engine(), config, None, _bind(config), console))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("server") / "log"
    config = ServerConfig(model="fake", port=free_port(), shutdown_timeout_s=1.0)
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(config, log))
    process.start()
    with httpx.Client(base_url=config.base_url, trust_env=False, timeout=30.0) as http:
        wait_until(lambda: _answers(http))
        yield http
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    assert "Traceback" not in log.read_text()  # callers that go are no defects


def _answers(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get("/health/").status_code == 200
    return False


def connect(server: httpx.Client) -> socket.socket:
    return socket.create_connection((server.base_url.host, server.base_url.port), timeout=30.0)


def assert_closed(link: socket.socket, send: bytes = b"", every_s: float = 0.1) -> None:
    """The server hangs up, though `send` is sent again and again; before the deadlines that it has by default."""
    until = time.monotonic() + connections.HEADER_S
    link.settimeout(every_s)
    while time.monotonic() < until:
        try:
            if send:
                link.sendall(send)
            if not link.recv(1 << 16):
                return
        except TimeoutError:
            continue
        except OSError:
            return
        time.sleep(every_s)
    raise AssertionError("still open")


def is_left(link: socket.socket) -> bool:
    """Return whether the server has closed its end, by the kernel's table: what it had sent may wait there to be
    read."""
    ours, theirs = (f"0100007F:{port:04X}" for port in (link.getsockname()[1], link.getpeername()[1]))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return not any((row[1], row[2]) == (theirs, ours) and row[9] != "0" for row in rows)  # 0: no process has it


def reply_on(link: socket.socket) -> bytes:
    """Read the whole reply, if one has begun: head and body may come apart. Raises TimeoutError if none has."""
    link.settimeout(0.01)
    said = link.recv(1000)
    link.settimeout(30.0)
    while said:
        head, _, body = said.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if length is not None and len(body) >= int(length[1]):
            return said
        new = link.recv(1000)
        if not new:
            return said
        said += new
    return said


@pytest.mark.parametrize("said", [b"", b"GET /health/ HTTP/1.1\r\nHost: 127", HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_600_half_open_connections_leave_the_probes_alive(server: httpx.Client, said: bytes) -> None:
    """There are fewer open files than connections."""
    links: list[socket.socket] = []
    try:
        for _ in range(600):
            links.append(connect(server))
            with contextlib.suppress(OSError):  # it was dropped already
                links[-1].sendall(said)
        for path in ("/health/", "/ready/"):
            probe = httpx.get(f"{server.base_url}{path}", trust_env=False, timeout=30.0)
            assert probe.status_code == 200, path
    finally:
        for link in links:
            link.close()


def test_when_all_places_are_taken_by_calls_further_ones_get_503_and_probes_answer(server: httpx.Client) -> None:
    body = BODY[:-1] + b',"request_config":{"max_tokens":1}}'
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    links = [connect(server) for _ in range(OPEN_FILES)]
    try:
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(head + body)
        replies = []
        for link in links:
            with contextlib.suppress(OSError):
                replies.append(reply_on(link))
        assert replies
        wrong = [reply for reply in replies if reply and not (b" 503 " in reply and b"max_connections" in reply)]
        assert wrong == []
        for path in ("/health/", "/ready/"):
            assert httpx.get(f"{server.base_url}{path}", trust_env=False, timeout=30.0).status_code == 200
    finally:
        for link in links:
            link.close()


def test_headers_have_a_deadline_however_they_trickle(server: httpx.Client) -> None:
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(HEAD)
        assert_closed(silent)
        assert_closed(slow, b"a: b\r\n")


def test_so_have_those_of_a_later_request(server: httpx.Client) -> None:
    with connect(server) as link:
        link.sendall(b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b" 200 " in link.recv(1000)
        assert_closed(link, b"GET /")


def test_a_body_has_a_deadline(server: httpx.Client) -> None:
    with connect(server) as link:
        link.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        link.settimeout(30.0)
        assert b" 408 " in link.recv(1000)
        assert_closed(link, b" ")


@pytest.mark.parametrize("what", ["a header", "headers", "trailers"])
def test_headers_have_a_size(server: httpx.Client, what: str) -> None:
    part = {"a header": b"x" * 4096, "headers": b"a: b\r\n" * 700, "trailers": b"a: b\r\n" * 700}[what]
    with connect(server) as link:
        link.sendall(HEAD)
        if what == "trailers":
            link.sendall(b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        num_bytes = 0
        with contextlib.suppress(OSError):
            while num_bytes < 20 << 20:
                num_bytes += link.send(part)
        assert num_bytes < 10 << 20  # most of it is in the kernel's buffers


def test_a_trailer_is_no_header(server: httpx.Client) -> None:
    """A field that comes after the body would count if all of it came at once: a token, or an Origin, which is
    refused."""
    with connect(server) as link:
        whole = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
        link.sendall(whole + b"Origin: http://elsewhere\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_have_a_number(server: httpx.Client) -> None:
    with connect(server) as link:
        with contextlib.suppress(OSError):
            link.sendall(b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20_000)
        assert_closed(link)


def test_a_caller_that_does_not_read_is_left(server: httpx.Client) -> None:
    body = BODY[:-1] + b',"request_config":{"max_tokens":20000}}'
    with connect(server) as link:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        num_bytes = len(link.recv(1))  # the answer has begun
        wait_until(lambda: is_left(link))
        with contextlib.suppress(OSError):
            while new := len(link.recv(1 << 20)):
                num_bytes += new
        assert num_bytes < 20_000 * 1024


def test_a_refused_body_may_be_sent_to_its_end(server: httpx.Client) -> None:
    """Then the caller reads why."""
    with connect(server) as link:
        link.sendall(b"POST /infer/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3000000\r\n\r\n")
        sending = threading.Thread(target=link.sendall, args=(b" " * 3_000_000,))
        sending.start()
        sending.join(30)
        link.sendall(b"GET /health/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        said = b""
        while b'"ok"' not in said:
            said += link.recv(1000)
        assert said.index(b" 415 ") < said.index(b" 200 ")


def test_too_few_open_files_are_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(model="fake")
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: limits.append(to))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connections.with_open_files(config).max_connections == config.max_connections
    assert limits == [(1408, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert connections.with_open_files(config).max_connections == 640
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(ConfigError, match="ulimit -n 256"):
        connections.with_open_files(config)
