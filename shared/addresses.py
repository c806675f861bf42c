"""Addresses and ports of this machine: which addresses are loopback, and where a program can listen.

Free ports are chosen below the range that the kernel uses for outgoing connections (Linux: from 32768 on). If a port
were in this range, an outgoing connection could take it before a program binds it.
"""

from __future__ import annotations

import ipaddress
import random
import socket

from shared.errors import ConfigError, ServerError

_FIRST, _LAST = 15_000, 32_000
_TRIES = 1_000


def is_loopback(host: str) -> bool:
    """Return True if `host` (a name or an address) is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def listen(host: str, port: int, *, what: str) -> socket.socket:
    """Return a socket that listens at `host:port`; port 0: any free port. Raises ServerError, which says that `what`
    cannot listen. Print the address only once `listen` has returned: until then another program may have the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Without this option the port of a server that has just ended would count as in use for a while.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ServerError(
            f"{what} cannot listen",
            found=f"{host}:{port}: {error.strerror or error}",
            wanted="an address of this machine with a free port",
            remedy="choose another --port",
        ) from error
    return listener


def is_free(port: int) -> bool:
    """Return True if a program can listen on this loopback port now."""
    with socket.socket() as probe:
        # Without this option the port of a server that has just ended would count as in use for a while.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(number: int) -> list[int]:
    """Return different free ports, chosen at random. Raises ConfigError if there are not enough."""
    # `SystemRandom` ignores seeds: two processes must not choose the same ports.
    draw = random.SystemRandom()
    ports: set[int] = set()
    for _ in range(_TRIES):
        if len(ports) == number:
            return sorted(ports)
        port = draw.randint(_FIRST, _LAST)
        if is_free(port):
            ports.add(port)
    raise ConfigError(
        "not enough free ports",
        found=f"{len(ports)} between {_FIRST} and {_LAST}",
        wanted=f"{number}",
        remedy="stop programs that listen there (ss -ltn lists them)",
    )


def free_port() -> int:
    """Return a free port. Raises ConfigError (see `free_ports`)."""
    return free_ports(1)[0]
