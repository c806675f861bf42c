"""The server's own listening socket (R06)."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from rollout_server.__main__ import _bind
from rollout_server.config import ServerConfig
from shared.addresses import free_port


def test_replies_are_sent_at_once() -> None:
    """The second packet of a reply would wait without TCP_NODELAY for the client's delayed acknowledgement, 40 ms."""

    async def is_without_delay(listener: socket.socket) -> bool:
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            answer = await asyncio.wait_for(accepted, 10)
            writer.close()
            return answer

    assert asyncio.run(is_without_delay(_bind(ServerConfig(model="m", port=free_port()))))


GLOO = """
import os, socket, sys, tempfile
socket.sethostname(sys.argv[1])
import torch.distributed as dist
from rollout_server.__main__ import _prepare_environment
from rollout_server.config import ServerConfig
from bench.listening import tcp_listeners

def listens_at():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    print(*{address for address, _ in tcp_listeners([os.getpid()])})
    dist.destroy_process_group()

listens_at()
_prepare_environment(ServerConfig(model="m"))
listens_at()
"""


def own_address() -> str:
    """Return this machine's address in its network; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # datagram: nothing is sent
        return str(probe.getsockname()[0])
    return ""


@pytest.mark.slow
def test_the_engine_s_groups_listen_on_loopback_only() -> None:
    """Gloo listens at the address that the machine's name stands for, in a cluster that of its network, and anybody
    could connect. vLLM opens such groups in each worker."""
    address = own_address()
    namespace = ["unshare", "--user", "--map-root-user", "--uts"]
    if not address or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network address, or no namespaces")

    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    command = [*namespace, sys.executable, "-c", GLOO, address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    before, after = done.stdout.split()
    assert before == address, "the test shows nothing"
    assert after == "127.0.0.1"
