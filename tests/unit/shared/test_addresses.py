"""Loopback addresses; free ports, which are different and never of the kind that an outgoing connection takes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared import addresses as ports
from shared.errors import ConfigError

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_are_free_and_different() -> None:
    found = ports.free_ports(20)
    assert len(set(found)) == 20
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.skipif(not EPHEMERAL.exists(), reason="Linux only")
def test_none_is_of_the_kernel_s_range() -> None:
    first, last = map(int, EPHEMERAL.read_text().split())
    assert not [port for port in ports.free_ports(50) if first <= port <= last]


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_LAST", port)
        with pytest.raises(ConfigError, match=f"not enough free ports; found 0 between {port} and {port}; wanted 1"):
            ports.free_port()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.8.1.2", True), ("::1", True), ("a.localhost", True), ("10.0.0.1", False), ("b", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert ports.is_loopback(host) is loopback
