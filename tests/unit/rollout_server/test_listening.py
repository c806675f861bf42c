"""The server's own listening socket (R06)."""

from __future__ import annotations

import asyncio
import socket

from rollout_server.__main__ import _bind
from rollout_server.config import ServerConfig
from shared.addresses import free_port


def test_replies_are_sent_at_once() -> None:
    """Without TCP_NODELAY the second packet of a reply waits for the client's delayed acknowledgement, 40 ms."""

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
