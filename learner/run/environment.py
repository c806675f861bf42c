"""Environment variables that the learner sets before torch and vLLM are loaded, and settings of Python's threads and
garbage collection.

`collect_rarely` makes garbage collections rare while a run starts. Nearly all objects of imports stay alive, and each
collection visits them again: this took 2.0 s of the 8.6 s of processor time of a run's imports, with vLLM's.
`collect_as_usual` restores the usual frequency before the first step, whose garbage may hold memory of the device.

`gloo_interface` names the interface through which this node reaches torchrun's MASTER_ADDR, for GLOO_SOCKET_IFNAME. By
default torch takes the address of the machine's name, which many systems map to the loopback; ranks on other nodes then
cannot connect, and wait until their deadline. NCCL chooses its interface itself and avoids the loopback.

`keep_compiled` names the folder in which torch keeps compiled code. The default is under /tmp, which many machines and
all containers clear, and where another user can make the folder first. A first step compiles for minutes; with the
folder of an earlier run it takes a fifth of that. Triton's folder is named too: torch sets it only when it compiles, so
a second run, which finds its code compiled, would look for kernels in Triton's default folder.

`prepare_for_vllm` sets variables for a vLLM engine inside the learner's process. The user's settings stay, except two
that cannot work here:
- an engine in its own process: it would neither share the device's weights nor run in step with other ranks;
- torchrun's own store with one rank. Such a rank makes no process group, but its engine does, and under torchrun the
  engine always connects to torchrun's store. No process listens there, so the engine would wait for half an hour.

`shorten_turns` shortens the time for which a thread may keep the interpreter's lock while another thread waits. The
thread that learns releases the lock in every operation of torch. By default a thread that reads rollouts could then
keep the lock for 5 ms, in which the learning thread could have started hundreds of operations.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from shared.private import cache_folder


def prepare_for_vllm(environment: MutableMapping[str, str]) -> None:
    """Set the variables in `environment`."""
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if environment.get("WORLD_SIZE", "1") == "1":
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM's log goes to the run's log
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Set the variables in `environment`, unless the user has."""
    if not environment.get(COMPILED_VARIABLE):
        environment[COMPILED_VARIABLE] = str(cache_folder(environment, "rollout-learner"))
    environment.setdefault(TRITON_VARIABLE, str(Path(environment[COMPILED_VARIABLE]) / "triton"))


def shorten_turns() -> None:
    """Make a thread of this process release the interpreter's lock after TURN_S if another thread waits for it."""
    sys.setswitchinterval(TURN_S)


def collect_rarely() -> None:
    """Collect garbage less often in this process, until `collect_as_usual`."""
    gc.set_threshold(*RARELY)


def collect_as_usual() -> None:
    gc.set_threshold(*USUALLY)


RARELY = (50_000, 20, 100)  # thresholds of `gc`: new objects, then collections of the generation below
USUALLY = gc.get_threshold()
TURN_S = 0.0002  # seconds; a change of threads takes about 0.00001 s
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_INTERFACE_ADDRESSES_V6 = Path("/proc/net/if_inet6")


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """Return the interface's name. None if the user chose an interface, or if all ranks may be on this machine."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if environment.get(GLOO_VARIABLE) or not host or not port:
        return None
    address = _address_towards(host, int(port))
    if address is None or address.is_loopback:
        return None
    return next((name for name, other in _addresses() if other == address), None)


def _address_towards(host: str, port: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return this machine's address on the route to `host`. None if the name or the route is unknown: then torch raises
    its own error."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # datagram: nothing is sent, the kernel only picks the route
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield every interface with its first IPv4 address and all of its IPv6 addresses (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(answer[20:24])
    if _INTERFACE_ADDRESSES_V6.exists():
        for line in _INTERFACE_ADDRESSES_V6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))
