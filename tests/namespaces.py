"""Several "machines" on this one, for tests of several nodes: Linux network namespaces, joined by a bridge.

    with network(["server", "learner"]) as nodes:
        subprocess.Popen([*nodes["learner"].enter, "ping", nodes["server"].address])

Everything lies in a user namespace of its own: no root needed, nothing of this machine's network is touched, nothing
has a name that could stay behind. The namespaces live as long as the processes in them, and those that this module
starts end with their standard input, whatever ends the test.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_SUBNET = "10.213.7"  # seen by nobody outside
_TIMEOUT_S = 20.0
_TOOLS = ("ip", "unshare", "nsenter")
_HOLD = ("sh", "-c", "echo ready; exec cat")  # until its standard input ends


@dataclass(frozen=True, kw_only=True)
class Node:
    address: str
    pid: int  # of the process that holds the namespaces

    @property
    def enter(self) -> list[str]:
        """What to put before a command, so that it runs on this node. It becomes that command: no process between."""
        return _enter(self.pid)

    def traffic(self, interface: str = "eth0") -> tuple[int, int]:
        """Bytes received and sent by all of the node's processes together."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        counters = next(line for line in lines if line.strip().startswith(f"{interface}:")).partition(":")[2].split()
        return int(counters[0]), int(counters[8])


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Node]]:
    """Nodes by name, each with an address that all others reach, and a loopback of its own. Skips the test where this
    machine makes no namespaces."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"no network namespaces here: {', '.join(missing)} not found (util-linux, iproute2)")
    with contextlib.ExitStack() as stack:
        try:
            hub = stack.enter_context(_held(["unshare", "--user", "--map-root-user", "--net"]))
            _run([*_enter(hub), "ip", "link", "add", "bridge0", "type", "bridge"])
            _run([*_enter(hub), "ip", "link", "set", "bridge0", "up"])
            nodes = {name: _join(stack, hub, index) for index, name in enumerate(names, start=1)}
        except _RefusedError as refused:
            pytest.skip(f"no network namespaces here: {refused}")
        yield nodes


class _RefusedError(Exception):
    """The machine does not do it; says what it said."""


def _join(stack: contextlib.ExitStack, hub: int, index: int) -> Node:
    pid = stack.enter_context(_held([*_enter(hub), "unshare", "--net"]))
    address, port = f"{_SUBNET}.{index}", f"port{index}"
    at_hub, at_node = [*_enter(hub), "ip"], [*_enter(pid), "ip"]
    _run([*at_hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
    _run([*at_hub, "link", "set", port, "master", "bridge0", "up"])
    _run([*at_node, "address", "add", f"{address}/24", "dev", "eth0"])
    _run([*at_node, "link", "set", "eth0", "up"])
    _run([*at_node, "link", "set", "lo", "up"])
    return Node(address=address, pid=pid)


@contextlib.contextmanager
def _held(command: Sequence[str]) -> Iterator[int]:
    """The id of a process that `command` puts into new namespaces, and that stays there."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *_HOLD], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            if process.stdout.readline() != "ready\n":
                raise _RefusedError(f"{' '.join(command)}: {process.stderr.read().strip()}")
            yield process.pid
        finally:
            process.stdin.close()


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials", "--"]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise _RefusedError(f"{' '.join(command)}: {done.stderr.strip()}")
