"""Which network interface gloo shall use between learner nodes, where torch would choose the wrong one.

In: torchrun's environment. Out: the interface through which this node reaches MASTER_ADDR, for GLOO_SOCKET_IFNAME. Left
to itself, torch takes the address that the machine's name has, which many systems map to the loopback: ranks on other
nodes then wait for it until the deadline. NCCL chooses by itself and avoids the loopback. Called by `__main__`.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_INTERFACE_ADDRESSES_V6 = Path("/proc/net/if_inet6")


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """The interface's name; None where the user has chosen, or where all ranks may be on this machine."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if environment.get(GLOO_VARIABLE) or not host or not port:
        return None
    address = _address_towards(host, int(port))
    if address is None or address.is_loopback:
        return None
    return next((name for name, other in _addresses() if other == address), None)


def _address_towards(host: str, port: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """This machine's address on the way there; None where the name or the way is unknown, of which torch, which must
    go there, speaks in its own words."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # datagram: nothing is sent, the kernel only picks the route
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Every interface with its first IPv4 address and all of its IPv6 addresses (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(answer[20:24])
    if _INTERFACE_ADDRESSES_V6.exists():
        for line in _INTERFACE_ADDRESSES_V6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))
