"""Addresses of this machine: which ones are loopback, and ports for programs that are about to be started here.

The ports lie below the range that the kernel uses for outgoing connections (from 32768 on, by Linux's default).
Otherwise an outgoing connection could take a port between its choice and its use.
"""

from __future__ import annotations

import ipaddress
import random
import socket

from shared.errors import ConfigError

_FIRST, _LAST = 15_000, 32_000
_TRIES = 1_000


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address) is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def free_ports(number: int) -> list[int]:
    """Different ports on which nobody listens now, drawn at random. Raises ConfigError if hardly any is free."""
    draw = random.SystemRandom()  # not a test's seed: two processes must not draw the same ports
    ports: set[int] = set()
    for _ in range(_TRIES):
        if len(ports) == number:
            return sorted(ports)
        port = draw.randint(_FIRST, _LAST)
        if _is_free(port):
            ports.add(port)
    raise ConfigError(
        "not enough free ports",
        found=f"{len(ports)} between {_FIRST} and {_LAST}",
        wanted=f"{number}",
        remedy="see what listens there (ss -ltn)",
    )


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server may follow another one at once
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
