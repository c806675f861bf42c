"""Find where processes listen (Linux): their TCP sockets with addresses, their named Unix sockets with permissions."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"  # a TCP state in /proc/net/tcp
_ACCEPTS = 1 << 16  # a flag in /proc/net/unix


def tcp_listeners(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Address and port of each."""
    own = _sockets(pids)
    return [
        (_address(fields[1].partition(":")[0]), int(fields[1].rpartition(":")[2], 16))
        for name in ("tcp", "tcp6")
        for fields in _lines(name)
        if fields[3] == _LISTENING and fields[9] in own
    ]


def unix_listeners(pids: Iterable[int]) -> list[Path]:
    """Return the Unix sockets with a name in the file system."""
    own = _sockets(pids)
    return [
        Path(fields[7])
        for fields in _lines("unix")
        if len(fields) > 7 and int(fields[3], 16) & _ACCEPTS and fields[6] in own and fields[7].startswith("/")
    ]


def _sockets(pids: Iterable[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
    return found


def _lines(name: str) -> list[list[str]]:
    path = Path("/proc/net") / name
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _address(digits: str) -> str:
    """Read four-byte words, each in the machine's byte order (little-endian)."""
    data = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    return str(ipaddress.ip_address(data))
