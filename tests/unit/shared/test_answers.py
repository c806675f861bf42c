"""Answers of strangers are read up to a length and for a time that are known before."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest

from deploy import wait_ready
from learner.rollout import client as client_module
from learner.rollout.client import ServerClient, Timeouts
from shared.answers import MAX_STATUS_BYTES, ask
from shared.errors import RolloutError
from shared.wire import InferCall, RolloutInferRequest
from tests.unit.deploy.test_wait_ready import config

Kind = Literal["long", "chunked", "error", "line", "packed", "slow", "good"]
HEADS = {
    "long": b"200 OK\r\nContent-Length: 1099511627776\r\n",
    "chunked": b"200 OK\r\nTransfer-Encoding: chunked\r\n",
    "error": b"503 Busy\r\nContent-Length: 1099511627776\r\n",
    "line": b"200 OK\r\nContent-Type: application/x-ndjson\r\n",
    "packed": b"200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 100\r\n",
    "slow": b"200 OK\r\nContent-Length: 1000\r\n",
    "good": b"200 OK\r\nContent-Length: 20\r\n",
}
MOST_SENT = 300 << 20  # the test has failed then


class Stranger:
    """Answers every call in one way, until the caller has gone. `num_sent`: bytes of all bodies."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self.num_sent = kind, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.recv(1 << 16)
            link.sendall(b"HTTP/1.1 " + HEADS[self._kind] + b"Connection: close\r\n\r\n")
            if self._kind == "packed":
                link.sendall(gzip.compress(bytes(50_000_000))[:100])
            elif self._kind == "good":
                link.sendall(b'{"server_id": "abc"}')
            while self._kind not in ("packed", "good") and self.num_sent < MOST_SENT:
                part = b"x" if self._kind == "slow" else b"x" * (1 << 18)
                self.num_sent += len(part)
                link.sendall(b"%x\r\n%s\r\n" % (len(part), part) if self._kind == "chunked" else part)
                time.sleep(0.05 if self._kind == "slow" else 0.0)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def stranger(request: pytest.FixtureRequest) -> Iterator[Stranger]:
    one = Stranger(request.param)
    yield one
    one.close()


@pytest.mark.parametrize("stranger", ["long", "chunked", "error", "packed", "slow"], indirect=True)
def test_an_answer_ends_at_its_limits(stranger: Stranger) -> None:
    began = time.monotonic()
    with httpx.Client(trust_env=False) as client, pytest.raises(ValueError, match="answer"):
        ask(client, f"{stranger.url}/status/", timeout_s=0.5)
    assert time.monotonic() - began < 10
    assert stranger.num_sent < 20 * MAX_STATUS_BYTES


@pytest.mark.parametrize("stranger", ["good"], indirect=True)
def test_a_short_answer_is_read(stranger: Stranger) -> None:
    with httpx.Client(trust_env=False) as client:
        assert ask(client, stranger.url, timeout_s=5.0) == (200, b'{"server_id": "abc"}')


@pytest.mark.parametrize("stranger", ["long", "error", "packed", "slow", "good"], indirect=True)
def test_launch_and_wait_ready_read_no_more(
    stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait_ready, "ANSWER_S", 0.5)
    monkeypatch.setattr(wait_ready, "POLL_S", 0.01)
    is_good = stranger.url and stranger._kind == "good"
    code = wait_ready.main(["--config", config(tmp_path, stranger.url), "--timeout-s", "0"])
    assert code == (0 if is_good else 1)
    assert is_good or stranger.url in capsys.readouterr().err
    with httpx.Client(trust_env=False, timeout=0.5) as client:
        assert bool(wait_ready.look(client, stranger.url, "abc")) != is_good
        assert wait_ready.look(client, stranger.url, "another start")
    assert stranger.num_sent < 40 * MAX_STATUS_BYTES


@pytest.mark.parametrize("stranger", ["long", "chunked", "error", "line"], indirect=True)
@pytest.mark.parametrize("path", ["/status/", "/infer/"])
def test_the_learners_client_reads_no_more(path: str, stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing, one long line or chunks make no difference."""
    monkeypatch.setattr(client_module, "MAX_REPLY_BYTES", 1 << 20)
    monkeypatch.setattr(client_module, "_ANSWER_BYTES", 1 << 20)
    request = RolloutInferRequest.model_validate({"messages": [{"role": "user", "content": "?"}]})
    call = InferCall.model_validate({"infer_requests": [request], "request_config": {"max_tokens": 16}})

    async def run() -> None:
        client = ServerClient(stranger.url, timeouts=Timeouts.of(5.0, 5.0))
        try:
            await (client.status() if path == "/status/" else client.infer(call, lambda i, output: None))
        finally:
            await client.aclose()

    with pytest.raises(RolloutError, match="too long"):
        asyncio.run(run())
    assert stranger.num_sent < 30 << 20
