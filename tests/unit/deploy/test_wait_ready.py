"""Waiting for rollout servers: until all are ready, and no longer than asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy import wait_ready
from shared.config.parse import write_yaml
from tests.proxies import watched_proxy
from tests.unit.learner.config.examples import REMOVE, SERVER, changed, minimal


@contextlib.contextmanager
def server(*statuses: int) -> Iterator[str]:
    """Run a server that answers `/ready/` with these, one after the other, the last again and again; yield its URL."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/x/ready/"
            self.send_response((left.pop(0) if len(left) > 1 else left[0]) if known else 404)
            self.end_headers()
            self.wfile.write(b'{"server_id": "job7-a"}')

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/x"
        finally:
            http.shutdown()
            thread.join()


def config(folder: Path, *urls: str) -> str:
    entries = [{"base_url": url, "group_port": 51216 + i} for i, url in enumerate(urls)]
    path = folder / "learner.yaml"
    write_yaml(path, changed(minimal(), {f"{SERVER}.servers": entries}))
    return str(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_ready, "POLL_S", 0.01)


def test_it_ends_when_every_server_was_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R16: one that is ready is not asked again, so that its first weight update does not count against it."""
    with server(503, 200) as late, server(200, 503) as once:
        assert wait_ready.main(["--config", config(tmp_path, late, once), "--timeout-s", "30"]) == 0
    assert "2 server(s) ready" in capsys.readouterr().out


def test_the_silent_ones_are_named_when_time_has_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R16: and what they said."""
    with server(200) as ready, server(503) as busy:
        code = wait_ready.main(["--config", config(tmp_path, ready, busy, "http://127.0.0.1:1"), "--timeout-s", "0.1"])
    said = capsys.readouterr().err
    assert code == 1
    assert f"{busy}: HTTP 503" in said
    assert "http://127.0.0.1:1: ConnectError" in said
    assert ready not in said


def test_a_proxy_of_the_environment_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched_proxy(monkeypatch) as asked:
        assert wait_ready.main(["--config", config(tmp_path, "http://rollout.invalid"), "--timeout-s", "0.1"]) == 1
    assert asked == []


def test_a_run_without_servers_has_nothing_to_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "learner.yaml"
    write_yaml(path, changed(minimal(), {"custom.trainer_variant": "sft", "custom.extra": REMOVE}))
    assert wait_ready.main(["--config", str(path)]) == 2
    assert "nothing to wait for" in capsys.readouterr().err
