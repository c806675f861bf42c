"""Several "machines" on this one: Linux network namespaces, joined by a bridge whose links can be broken.

    with network(["server", "other"]) as (hub, nodes):
        subprocess.Popen([*nodes["server"].enter, "command"])
        nodes["server"].cut(2.0)

Everything lies in a user namespace of its own: no root needed, nothing of this machine's network is touched, nothing
has a name that could stay behind. The namespaces live as long as the processes in them, and those that this module
starts end with their standard input, whatever ends the program.

Packets that a broken link loses are lost in silence: neither side gets a FIN, an RST or an ICMP message. A process that
ends a fault by itself is left running for it, so a fault ends in time even if the program does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SUBNET = "10.213.7"  # seen by nobody outside
HUB_ADDRESS = f"{_SUBNET}.254"
_TIMEOUT_S = 20.0
_TOOLS = ("ip", "unshare", "nsenter")
_HOLD = ("sh", "-c", "echo ready; exec cat")  # runs until its standard input ends
_NOBODY = "02:00:00:00:00:99"


class NoNamespacesError(Exception):
    """This machine makes none; says why."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The hub, which all links meet at, or a machine at one of them."""

    address: str
    pid: int  # holds the namespaces
    hub_pid: int
    port: str = ""  # the hub's end of the link

    @property
    def enter(self) -> list[str]:
        """The words before a command that make it run on this node. They become that command: there is no process
        between."""
        return _enter(self.pid)

    def traffic(self, interface: str = "eth0") -> tuple[int, int]:
        """Bytes received and sent by all of the node's processes together."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        counters = next(line for line in lines if line.strip().startswith(f"{interface}:")).partition(":")[2].split()
        return int(counters[0]), int(counters[8])

    def cut(self, seconds: float) -> None:
        """Nothing passes in either direction for a while. Returns once that is so, as all faults here."""
        link = f"ip link set {self.port}"
        _for_a_while(self.hub_pid, f"{link} down", seconds, f"{link} up")

    def mute(self, seconds: float) -> None:
        """Lose what the node sends to the hub, for a while; what it is sent arrives."""
        there = f"{HUB_ADDRESS} dev eth0"
        silent = f"ip neigh replace {there} lladdr {_NOBODY} nud permanent"
        _for_a_while(self.pid, silent, seconds, f"ip neigh del {there}")

    def shape(self, seconds: float, qdisc: str) -> None:
        """Pass what the node is sent through this queueing discipline (`tc`), for a while."""
        link = f"dev {self.port} root"
        _for_a_while(self.hub_pid, f"tc qdisc replace {link} {qdisc}", seconds, f"tc qdisc del {link}")

    def slow(self, qdisc: str) -> None:
        """Let what the node is sent pass through this queueing discipline (`tc`) from now on."""
        _run([*_enter(self.hub_pid), "tc", "qdisc", "replace", "dev", self.port, "root", *qdisc.split()])

    def can_shape(self, qdisc: str) -> bool:
        """Return True if this kernel has the discipline."""
        try:
            self.shape(0.0, qdisc)
        except NoNamespacesError:
            return False
        return True


def enter(pid: int) -> None:
    """Move this process, which must have one thread, into the namespaces of a node's process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        with Path(f"/proc/{pid}/ns/{kind}").open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"the {kind} namespace of process {pid}")


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[tuple[Node, dict[str, Node]]]:
    """Yield the hub, and nodes by name, each with an address that all others reach, and a loopback of its own. Raises
    NoNamespacesError."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NoNamespacesError(f"{', '.join(missing)} not found (util-linux, iproute2)")
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(_held(["unshare", "--user", "--map-root-user", "--net"]))
        at_hub = [*_enter(hub), "ip"]
        _run([*at_hub, "link", "add", "bridge0", "type", "bridge"])
        _run([*at_hub, "address", "add", f"{HUB_ADDRESS}/24", "dev", "bridge0"])
        _run([*at_hub, "link", "set", "bridge0", "up"])
        _run([*at_hub, "link", "set", "lo", "up"])
        nodes = {name: _join(stack, hub, index) for index, name in enumerate(names, start=1)}
        yield Node(address=HUB_ADDRESS, pid=hub, hub_pid=hub), nodes


def _join(stack: contextlib.ExitStack, hub: int, index: int) -> Node:
    pid = stack.enter_context(_held([*_enter(hub), "unshare", "--net"]))
    address, port = f"{_SUBNET}.{index}", f"port{index}"
    at_hub, at_node = [*_enter(hub), "ip"], [*_enter(pid), "ip"]
    _run([*at_hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
    _run([*at_hub, "link", "set", port, "master", "bridge0", "up"])
    _run([*at_node, "address", "add", f"{address}/24", "dev", "eth0"])
    _run([*at_node, "link", "set", "eth0", "up"])
    _run([*at_node, "link", "set", "lo", "up"])
    return Node(address=address, pid=pid, hub_pid=hub, port=port)


@contextlib.contextmanager
def _held(command: Sequence[str]) -> Iterator[int]:
    """Yield the id of a process that `command` puts into new namespaces, and that stays there."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *_HOLD], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise NoNamespacesError(f"{' '.join(command)}: {process.stderr.read().strip()}")
            yield process.pid
        finally:
            process.stdin.close()


def _enter(pid: int) -> list[str]:
    there = [f"--target={pid}", "--net", "--preserve-credentials"]
    if _user_namespace(pid) != _user_namespace("self"):  # nobody enters where they are already
        there.append("--user")
    return ["nsenter", *there, "--"]


def _user_namespace(process: int | str) -> str:
    return str(Path(f"/proc/{process}/ns/user").readlink())


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")


def _for_a_while(pid: int, begin: str, seconds: float, end: str) -> None:
    """Both are commands without quotes. What ends the fault closes its output first, so nobody waits for it."""
    later = f"(sleep {seconds:.3f}; {end}) </dev/null >/dev/null 2>&1 &"
    _run([*_enter(pid), "sh", "-c", f"{begin} || exit 1; {later}"])
