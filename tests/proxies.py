"""A proxy that the environment names, and what came to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

NAMES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@contextmanager
def watched_proxy(patch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Yield the first bytes of each connection to the proxy of the environment, which answers nothing."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError):
            while True:
                link, _ = listener.accept()
                with link:
                    asked.append(link.recv(1 << 12))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for name in NAMES:
        patch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
    for name in ("no_proxy", "NO_PROXY"):
        patch.delenv(name, raising=False)
    try:
        yield asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
