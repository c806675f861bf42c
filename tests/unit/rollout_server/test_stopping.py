"""How a server ends: it answers what is in flight, and takes nothing new."""

from __future__ import annotations

import asyncio
import os
import pty
import threading

import httpx

from rollout_server.__main__ import _bind
from rollout_server.config import ServerConfig
from rollout_server.serving import serve
from shared.addresses import free_port
from shared.generation import Generation
from shared.wire import RequestConfig, RolloutInferRequest
from tests.unit.rollout_server.fakes import FakeEngine


class AskingEngine(FakeEngine):
    """Says through one pipe that a call has come, and answers once the other one says so."""

    def __init__(self, tell: int, told: int) -> None:
        super().__init__()
        self._tell, self._told = tell, told

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        os.write(self._tell, b"called")
        await asyncio.to_thread(os.read, self._told, 1)
        return await super().generate(request, config, seed)


def test_a_server_whose_terminal_is_closed_answers_what_is_in_flight(without_nohup: None) -> None:
    """SIGHUP ended it at once. Whatever it prints later has nowhere to go."""
    from_server, tell = os.pipe()
    told, to_server = os.pipe()
    config = ServerConfig(model="m", port=free_port())
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        try:
            code = asyncio.run(serve(AskingEngine(tell, told), config, None, _bind(config), os.fdopen(os.dup(2), "w")))
        finally:
            os._exit(code)
    assert b"serving" in os.read(terminal, 1000)
    replies: list[int | str] = []

    def call() -> None:
        body = {"infer_requests": [{"messages": [{"role": "user", "content": "?"}]}], "request_config": {}}
        try:
            with httpx.Client(trust_env=False, timeout=60.0) as http:
                replies.append(http.post(f"{config.base_url}/infer/", json=body).status_code)
        except httpx.HTTPError as error:
            replies.append(repr(error))

    calling = threading.Thread(target=call)
    calling.start()
    assert os.read(from_server, 6) == b"called"
    os.close(terminal)
    os.write(to_server, b"!")
    calling.join(60)
    assert (replies, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == ([200], 0)
    for end in (from_server, tell, told, to_server):
        os.close(end)
