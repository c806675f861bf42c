"""No call costs more than its share: what one body may cost in memory and in time of the event loop (R16).

Each case runs in a forked process, whose peak memory is its own.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.service import RolloutService
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.rollout_server.test_fuzz import JSON, RIGHT

TEXT = [{"role": "user", "content": "a"}]
MESSAGE = '{"messages":[{"role":"user","content":%s}]}'
SCORE = '{"items":[{"request":{"messages":[{"role":"user","content":""}]},"response_token_ids":[%s]}]}'
NUM_BYTES = 4_000_000


def wrong_items(item: str, around: str = '{"infer_requests":[%s]}') -> bytes:
    return (around % ",".join([item] * (NUM_BYTES // (len(item) + 1)))).encode()


BODIES: dict[str, Callable[[], bytes]] = {
    "numbers for requests": lambda: wrong_items("1"),
    "empty requests": lambda: wrong_items("{}"),
    "numbers for parts": lambda: wrong_items("1", '{"infer_requests":[' + MESSAGE % "[%s]" + "]}"),
    "empty messages": lambda: wrong_items("{}", '{"infer_requests":[{"messages":[%s]}]}'),
    "numbers for images": lambda: wrong_items("1", '{"infer_requests":[{"messages":[],"images":[%s]}]}'),
    "numbers for stop strings": lambda: wrong_items("1", '{"infer_requests":[],"request_config":{"stop":[%s]}}'),
    "unknown fields": lambda: json.dumps({str(i): 1 for i in range(NUM_BYTES // 10)}).encode(),
    "unknown fields inside": lambda: json.dumps({"infer_requests": [{str(i): 1 for i in range(300_000)}]}).encode(),
    "text for token ids": lambda: wrong_items('"x"', SCORE),
    "many requests": lambda: wrong_items(MESSAGE % '"a"'),
    "a long uuid": lambda: json.dumps(
        {"infer_requests": [{**RIGHT["/infer/"]["infer_requests"][0], "uuid": "u" * NUM_BYTES}]}
    ).encode(),
    "deep lists": lambda: b"[" * NUM_BYTES,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "world size": ("/init_communicator/", {"world_size": 120_000_000}),
    "incarnation": ("/init_communicator/", {"incarnation": "a" * NUM_BYTES}),
    "group timeout": ("/init_communicator/", {"timeout_s": 1e9}),
    "update timeout": ("/update_weights/", {"timeout_s": 1e9}),
    "bucket": ("/update_weights/", {"buckets": [{"tensors": [], "num_bytes": -1}]}),
    "shape": (
        "/update_weights/",
        {"buckets": [{"tensors": [{"name": "a", "dtype": "bfloat16", "shape": [-1]}], "num_bytes": 4}]},
    ),
}


def cost(path: str, body: bytes) -> tuple[int, float, float]:
    """HTTP status, peak MiB and CPU seconds of one call."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(theirs, path, body))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join(10)
    return result  # type: ignore[no-any-return]


def _in_child(pipe: Connection, path: str, body: bytes) -> None:
    async def call() -> int:
        app = create_app(RolloutService(FakeEngine(), ServerConfig(model="fake", max_requests_per_call=4096)), None)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return (await http.post(path, content=body, headers=JSON)).status_code

    before, begin = _kib("VmRSS"), time.process_time()
    status = asyncio.run(call())
    pipe.send((status, (_kib("VmHWM") - before) / 1024, time.process_time() - begin))


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_costs_little(name: str) -> None:
    """Without bounds, these cost up to 3,500 MiB and 19 s."""
    body = BODIES[name]()
    path = "/score/" if name == "text for token ids" else "/infer/"
    status, peak_mib, seconds = cost(path, body)
    assert status in (400, 413)
    assert peak_mib < 150, f"{peak_mib:.0f} MiB"
    assert seconds < 1.5, f"{seconds:.2f} s"


@pytest.mark.parametrize("name", OTHERS)
def test_sizes_have_bounds(name: str) -> None:
    path, fields = OTHERS[name]
    assert cost(path, json.dumps({**RIGHT[path], **fields}).encode())[0] == 400


def test_bodies_have_a_budget_together_and_a_deadline() -> None:
    async def run() -> None:
        config = ServerConfig(model="fake", max_body_bytes=1000, max_bodies_bytes=1500, body_timeout_s=0.2)
        engine = FakeEngine()
        app = create_app(RolloutService(engine, config), None)
        gone = asyncio.Event()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:

            async def slow() -> Any:
                yield b"{" + b" " * 899
                await gone.wait()

            first = asyncio.create_task(http.post("/infer/", content=slow(), headers=JSON))
            await asyncio.sleep(0.05)
            second = await http.post("/infer/", content=b" " * 900, headers=JSON)
            assert (second.status_code, second.json()["error"]) == (503, "ServerBusyError")
            assert (await first).status_code == 408
            gone.set()
            third = await http.post("/infer/", content=b" " * 900, headers=JSON)
            assert third.status_code == 400  # the first one's share is free again

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)
