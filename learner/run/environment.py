"""Settings of the learner's process: environment variables for torch and vLLM, Python's threads, garbage collection.

`collect_rarely` makes garbage collections rare while a run starts. `collect_as_usual` restores the usual frequency
before the first step.

`gloo_interface` returns the network interface through which this node reaches torchrun's MASTER_ADDR, for
GLOO_SOCKET_IFNAME. By default torch uses the address of the machine's host name, which is the loopback address on many
systems. Ranks on other nodes then cannot connect, and wait until their deadline. NCCL chooses its interface itself and
avoids the loopback.

`keep_compiled` sets the folders in which torch and Triton keep compiled code. A run's first step compiles for minutes.
With the folder of an earlier run, the first step takes a fifth of this time.

`prepare_for_vllm` sets variables for a vLLM engine inside the learner's process. `prepare_for_vllm` overrides two
settings of the user, which cannot work here: an engine in a process of its own, and torchrun's store if there is one
rank.

`shorten_turns` shortens the time that a thread may keep the interpreter's lock while another thread waits for it.
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
    """Set the variables for a vLLM engine inside this process (see the module) in `environment`."""
    # An engine in another process could not share the learner's device memory, nor run in step with other ranks.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A single rank makes no process group, but its engine makes one. With torchrun's variable the engine would wait for
    # half an hour for torchrun's store, where no process listens.
    if environment.get("WORLD_SIZE", "1") == "1":
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    # vLLM must not print its log, because the run writes it to a file.
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Set the folders for code that torch and Triton compile in `environment`, unless the user has set them."""
    # torch's default folder is under /tmp, which many machines clear, and where another user could have made the
    # folder.
    if not environment.get(COMPILED_VARIABLE):
        environment[COMPILED_VARIABLE] = str(cache_folder(environment, "rollout-learner"))
    # torch sets Triton's folder only when it compiles. A second run compiles nothing, so without this line it would
    # look for Triton's kernels in another folder.
    environment.setdefault(TRITON_VARIABLE, str(Path(environment[COMPILED_VARIABLE]) / "triton"))


def shorten_turns() -> None:
    """Make a thread of this process release the interpreter's lock after TURN_S if another thread waits for it."""
    # The thread that learns releases the lock in every operation of torch. With Python's default, a thread that reads
    # rollouts could then keep the lock for 5 ms, a time in which hundreds of operations could start.
    sys.setswitchinterval(TURN_S)


def collect_rarely() -> None:
    """Collect garbage less often in this process, until `collect_as_usual`."""
    # While a run starts, nearly all new objects stay alive, and collections find nothing: they took 2.0 of the 8.6 s of
    # processor time of a run's imports (with vLLM).
    gc.set_threshold(*RARELY)


def collect_as_usual() -> None:
    # From the first step on, Python must collect garbage often, because garbage may hold memory of the device.
    gc.set_threshold(*USUALLY)


RARELY = (50_000, 20, 100)  # thresholds of Python's `gc`: new objects, then collections of the younger generation
USUALLY = gc.get_threshold()
TURN_S = 0.0002  # max seconds that a thread keeps Python's global lock while another waits; a switch takes 0.00001 s
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux's ioctl that returns an interface's IPv4 address
_INTERFACE_ADDRESSES_V6 = Path("/proc/net/if_inet6")


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """Return the name of the network interface towards MASTER_ADDR. None if the user has chosen an interface, if
    MASTER_ADDR is this machine's loopback, or if there is no such interface."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if environment.get(GLOO_VARIABLE) or not host or not port:
        return None
    address = _address_towards(host, int(port))
    if address is None or address.is_loopback:
        return None
    return next((name for name, other in _addresses() if other == address), None)


def _address_towards(host: str, port: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return this machine's address on the route to `host`. None if the name or the route is unknown; torch raises an
    error later."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # For a datagram socket, `connect` only chooses the route, and sends nothing.
            probe.connect(target)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield (name of an interface, address) for the first IPv4 address and all IPv6 addresses of each interface
    (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the network interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(answer[20:24])
    if _INTERFACE_ADDRESSES_V6.exists():
        for line in _INTERFACE_ADDRESSES_V6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))
