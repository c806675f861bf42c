"""No call costs more than its share (R16): what one body may cost in memory and in time of the event loop.

Each row runs in a forked process, whose peak memory is its own. `pytest -rP` shows the measured table.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import multiprocessing
import os
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_server import guards
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.decoding import Decoders
from rollout_server.service import RolloutService
from shared.generation import Generation
from shared.processes import descendants
from shared.wire import RequestConfig, RolloutInferRequest
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.rollout_server.test_decoding import encoded, with_scans
from tests.unit.rollout_server.test_fuzz import JSON, RIGHT

pytestmark = pytest.mark.slow

MESSAGE = '{"messages":[{"role":"user","content":%s}]}'
SCORE = '{"items":[{"request":{"messages":[{"role":"user","content":""}]},"response_token_ids":[%s]}]}'
TENSOR = '{"name":"model.layers.0.weight","dtype":"bfloat16","shape":[1,2]}'
BUCKET = '{"tensors":[],"num_bytes":0}'
UPDATE = '{"incarnation":"a","ver":1,"timeout_s":5,"buckets":[%s]}'
NUM_BYTES = 1_900_000
HUGE = 50_000_000


def wrong_items(item: str, around: str = '{"infer_requests":[%s]}', num_bytes: int = NUM_BYTES) -> bytes:
    return (around % ",".join([item] * (num_bytes // (len(item) + 1)))).encode()


def with_images(*images: bytes) -> bytes:
    request = {
        "messages": [{"role": "user", "content": "a"}],
        "images": [base64.b64encode(data).decode() for data in images],
    }
    return json.dumps({"infer_requests": [request]}).encode()


def png(width: int, height: int, *, rows: int | None = None, chunks: bytes = b"") -> bytes:
    """Return a black PNG of grey values, cut off after `rows`."""
    packed = zlib.compressobj(1)
    row = bytes(1 + width)
    pixels = b"".join([packed.compress(row) for _ in range(rows or height)]) + packed.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")
    head, body, end = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    return b"\x89PNG\r\n\x1a\n" + head + chunks + body + end


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call, and what it may cost: MiB of the server and of the processes that decode, CPU seconds of the event loop
    in one go, and CPU seconds of the server in all."""

    body: Callable[[], bytes]
    path: str = "/infer/"
    status: tuple[int, ...] = (400, 413, 422)
    mib: float = 120.0
    decoding_mib: float = 100.0
    stall_s: float = 0.5  # seconds of its thread; twice what SECURITY.md says, because machines differ
    cpu_s: float = 6.0


WEBP_16383 = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xfe\x3f\0" * 2 + bytes(40)
ROWS = {
    "numbers for requests": Row(body=lambda: wrong_items("1")),
    "empty requests": Row(body=lambda: wrong_items("{}")),
    "numbers for parts": Row(body=lambda: wrong_items("1", '{"infer_requests":[' + MESSAGE % "[%s]" + "]}")),
    "empty messages": Row(body=lambda: wrong_items("{}", '{"infer_requests":[{"messages":[%s]}]}')),
    "numbers for stop strings": Row(
        body=lambda: wrong_items("1", '{"infer_requests":[],"request_config":{"stop":[%s]}}')
    ),
    "unknown fields": Row(body=lambda: json.dumps({str(i): 1 for i in range(150_000)}).encode()),
    "unknown fields inside": Row(
        body=lambda: json.dumps({"infer_requests": [{str(i): 1 for i in range(150_000)}]}).encode()
    ),
    "text for token ids": Row(body=lambda: wrong_items('"x"', SCORE), path="/score/"),
    "80,000 requests": Row(body=lambda: wrong_items(MESSAGE % '"a"', num_bytes=80_000 * 46)),
    "20,000 requests": Row(body=lambda: wrong_items(MESSAGE % '"a"', num_bytes=20_000 * 46)),
    "a long uuid": Row(
        body=lambda: json.dumps(
            {"infer_requests": [{**RIGHT["/infer/"]["infer_requests"][0], "uuid": "u" * NUM_BYTES}]}
        ).encode()
    ),
    "deep lists": Row(body=lambda: b"[" * NUM_BYTES),
    "50 MB of numbers": Row(body=lambda: wrong_items("1", num_bytes=HUGE)),
    "50 MB of text": Row(body=lambda: b'{"infer_requests":["%s"]}' % (b"A" * HUGE), mib=600.0, cpu_s=10.0),
    "50 MB of escaped text": Row(
        body=lambda: b'{"infer_requests":["%s"]}' % (b"\\u20ac" * (HUGE // 6)), mib=150.0, stall_s=0.25, cpu_s=2.0
    ),
    "149,000 parts": Row(
        body=lambda: wrong_items(
            '{"type":"text","text":""}',
            '{"infer_requests":[{"messages":[{"role":"user","content":[%s]}]}]}',
            149_000 * 26,
        )
    ),
    "149,000 turns": Row(
        body=lambda: wrong_items('{"role":"user","content":""}', '{"messages":[%s]}', 149_000 * 29),
        path="/v1/chat/completions",
    ),
    "149,000 prompts": Row(body=lambda: wrong_items("[1,2]", '{"prompt":[%s]}', 149_000 * 6), path="/v1/completions"),
    "4,000 requests": Row(
        body=lambda: wrong_items(MESSAGE % '[{"type":"text","text":"a"}]', num_bytes=4000 * 71), status=(200,)
    ),
    "60,000 tensors": Row(
        body=lambda: wrong_items(TENSOR, UPDATE % '{"tensors":[%s],"num_bytes":240000}', 60_000 * len(TENSOR)),
        path="/update_weights/",
    ),
    "70,000 buckets": Row(
        body=lambda: wrong_items(BUCKET, UPDATE % "%s", 70_000 * len(BUCKET)), path="/update_weights/"
    ),
    # 0.4 to 0.6 s here, and 1.1 s beside other programs: JSON of 120 MB is read in one call.
    "120 MB of images": Row(body=lambda: with_images(*[bytes(22_500_000)] * 4), mib=600.0, stall_s=1.5, cpu_s=10.0),
    "1,024 answers with log-probabilities": Row(
        body=lambda: (
            b'{"infer_requests":[%s],"request_config":{"n":1024,"logprobs":true}}' % (MESSAGE % '"a"').encode()
        ),
        status=(200,),
    ),
    "world size 1.2e8": Row(
        path="/init_communicator/",
        body=lambda: json.dumps({**RIGHT["/init_communicator/"], "world_size": 120_000_000}).encode(),
    ),
    "16 images, too many": Row(body=lambda: with_images(*[png(8, 8)] * 16)),
    "8 images of 64 megapixels": Row(body=lambda: with_images(*[png(8000, 8000, rows=1)] * 8)),
    "an image of 65 megapixels": Row(body=lambda: with_images(png(8000, 8125, rows=1))),
    "an image of 64 megapixels": Row(
        body=lambda: with_images(png(8000, 8000)), status=(200,), mib=700.0, decoding_mib=900.0, cpu_s=12.0
    ),
    "a WebP of 16383 x 16383": Row(body=lambda: with_images(WEBP_16383)),
    "a JPEG of 1,000 scans": Row(body=lambda: with_images(with_scans((1000, 1000), 1000)), decoding_mib=150.0),
    "a JPEG of 5,000 scans, small": Row(
        body=lambda: with_images(with_scans((200, 200), 5000)), status=(200,), cpu_s=12.0
    ),
    "a PNG of 30,000 chunks": Row(
        body=lambda: with_images(
            png(8, 8, chunks=30_000 * (bytes(4) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))))
        ),
        status=(200,),
    ),
    "a PNG that is cut off": Row(body=lambda: with_images(encoded((100, 100))[:-30])),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "incarnation": ("/init_communicator/", {"incarnation": "a" * NUM_BYTES}),
    "group timeout": ("/init_communicator/", {"timeout_s": 1e9}),
    "update timeout": ("/update_weights/", {"timeout_s": 1e9}),
    "bucket": ("/update_weights/", {"buckets": [{"tensors": [], "num_bytes": -1}]}),
    "shape": (
        "/update_weights/",
        {"buckets": [{"tensors": [{"name": "a", "dtype": "bfloat16", "shape": [-1]}], "num_bytes": 4}]},
    ),
}


class Engine(FakeEngine):
    """Reads and decodes images as the real one does."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__()
        self.decoders, self._threads = Decoders(config), ThreadPoolExecutor(2)

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        share = self.decoders.share()
        try:
            run = asyncio.get_running_loop().run_in_executor
            await run(self._threads, self.decoders.load, request.images, share)
        finally:
            share.close()
        return await super().generate(request, config, seed)


@dataclass(frozen=True, kw_only=True)
class Cost:
    status: int
    mib: float
    decoding_mib: float
    stall_s: float
    cpu_s: float


def cost(path: str, body: bytes) -> Cost:
    """Measure the cost of one call, in a process of its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(theirs, path, body))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join(10)
    assert isinstance(result, Cost)
    return result


def _in_child(pipe: Connection, path: str, body: bytes) -> None:
    stalls: list[float] = []
    run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(loop: asyncio.BaseEventLoop) -> None:
        """Time one turn of the loop: nobody else gets one meanwhile. In CPU time, so that a busy machine changes
        nothing."""
        begin = time.thread_time()
        run_once(loop)
        stalls.append(time.thread_time() - begin)

    asyncio.BaseEventLoop._run_once = timed  # type: ignore[attr-defined]

    async def call() -> tuple[int, float]:
        config = ServerConfig(model="fake")
        engine = Engine(config)
        transport = httpx.ASGITransport(create_app(RolloutService(engine, config), None))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=None, verify=False
        ) as http:
            await http.post(path, content=_parts(json.dumps(RIGHT.get(path, {})).encode()), headers=JSON)
            await asyncio.sleep(0)
            stalls.clear()  # the first call of a process imports what it needs: seconds, once
            status = (await http.post(path, content=_parts(body), headers=JSON)).status_code
        mib = sum(_kib("VmHWM", pid) for pid in descendants(os.getpid())) / 1024
        engine.decoders.close()
        return status, mib

    Path("/proc/self/clear_refs").write_text("5")  # the peak of the process that was forked is not its own
    gc.collect()
    gc.freeze()  # the server does so, once its engine is there
    before, begin = _kib("VmRSS"), time.process_time()
    status, decoding_mib = asyncio.run(call())
    seconds = time.process_time() - begin
    mib = (_kib("VmHWM") - before) / 1024
    pipe.send(Cost(status=status, mib=mib, decoding_mib=decoding_mib, stall_s=max(stalls), cpu_s=seconds))


async def _parts(body: bytes) -> Any:
    """Yield the body in parts, as they come from a socket."""
    for begin in range(0, len(body), 1 << 16):
        yield body[begin : begin + (1 << 16)]
        await asyncio.sleep(0)


def _kib(field: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.parametrize("name", ROWS)
def test_a_call_costs_little(name: str) -> None:
    """Some of these cost 3,500 MiB and 19 s without bounds."""
    row = ROWS[name]
    found = cost(row.path, row.body())
    for _ in range(2):  # other programs stall the loop too, but not in each of three calls
        if found.stall_s >= row.stall_s:
            found = cost(row.path, row.body())
    print(
        f"| {name} | {found.status} | {found.mib:.0f} MiB | {found.decoding_mib:.0f} MiB | {found.stall_s:.3f} s "
        f"| {found.cpu_s:.2f} s |"
    )
    assert found.status in row.status, found
    assert found.mib < row.mib, found
    assert found.decoding_mib < row.decoding_mib, found
    assert found.stall_s < row.stall_s, found
    assert found.cpu_s < row.cpu_s, found


@pytest.mark.parametrize("name", OTHERS)
def test_sizes_have_bounds(name: str) -> None:
    path, fields = OTHERS[name]
    assert cost(path, json.dumps({**RIGHT[path], **fields}).encode()).status == 400


def test_bodies_have_a_budget_together_and_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST_BYTES", 1500)
    monkeypatch.setattr(guards, "BODY_S", 0.2)

    async def run() -> None:
        config = ServerConfig(model="fake", max_body_bytes=1000)
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


def test_requests_have_a_limit_together_and_are_forgotten_when_their_caller_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.service.MOST_REQUESTS", 4)

    def call(num: int) -> dict[str, Any]:
        return {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}] * num}

    async def run() -> None:
        engine = FakeEngine()
        app = create_app(RolloutService(engine, ServerConfig(model="fake")), None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            engine.go.clear()
            first = asyncio.create_task(http.post("/infer/", json=call(3)))
            while len(engine.generated) < 3:
                await asyncio.sleep(0.01)
            second = await http.post("/infer/", json=call(2))
            assert (second.status_code, second.json()["error"]) == (503, "ServerBusyError")
            first.cancel()
            while len(engine.cancelled) < 3:
                await asyncio.sleep(0.01)
            engine.go.set()
            for _ in range(2):
                assert (await http.post("/infer/", json=call(4))).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)
