"""Tests of R21 and D10: over real HTTP, no server ever holds more than its cap, whatever two ranks ask for, and
whenever.

Six servers with the real app and a fake engine that sleeps and counts; two ranks in threads, out of phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn

from learner.rollout.backend import MicroStep
from learner.rollout.distribution import distribute
from learner.rollout.server_backend import ServerBackend
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.service import RolloutService
from shared.addresses import free_ports
from shared.aio import LoopThread
from shared.generation import Generation
from shared.wire import RequestConfig, RolloutInferRequest
from tests.unit.learner.rollout.fakes import config, sample
from tests.unit.rollout_server.fakes import FakeEngine

WORLD_SIZES = (1, 1, 2, 1, 1, 2)
DECODE_BATCH_SIZE = 2
NUM_RANKS = 2
CHUNK = DECODE_BATCH_SIZE * sum(WORLD_SIZES) // NUM_RANKS
# Each rank asks for these, call by call: whole and partial shares, the end of an epoch, a long evaluation, nothing.
ASKED = ((CHUNK, 1, CHUNK, 3 * CHUNK, 5, 0, CHUNK, 7, 2), (5, CHUNK - 1, 40, 3, CHUNK, CHUNK, 0, 6))


class CountingEngine(FakeEngine):
    """Takes a few milliseconds per answer, and knows how many it held at once."""

    max_model_len = 10_000

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.in_flight = self.peak = self.total = 0
        self._chance = random.Random(seed)

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> Generation:
        self.in_flight += 1
        self.peak, self.total = max(self.peak, self.in_flight), self.total + 1
        try:
            await asyncio.sleep(self._chance.uniform(0.002, 0.02))
            return await super().generate(request, config, seed)
        finally:
            self.in_flight -= 1


class Servers:
    """One thread with an event loop for all of them."""

    def __init__(self) -> None:
        self.engines = [CountingEngine(i) for i in range(len(WORLD_SIZES))]
        ports = free_ports(len(WORLD_SIZES))
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._servers = [
            self._make(engine, port, size) for engine, port, size in zip(self.engines, ports, WORLD_SIZES, strict=True)
        ]
        self._loop = LoopThread("servers")
        self._serving = [self._loop.submit(server.serve()) for server in self._servers]

    @staticmethod
    def _make(engine: CountingEngine, port: int, world_size: int) -> uvicorn.Server:
        settings = ServerConfig(model="fake", port=port, tensor_parallel_size=world_size)
        app = create_app(RolloutService(engine, settings), None)
        return uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off", access_log=False))

    def close(self) -> None:
        for server in self._servers:
            server.should_exit = True
        for serving in self._serving:
            serving.result(60)
        self._loop.close(10)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr("rollout_server.service._versions", dict)
    with contextlib.closing(Servers()) as running:
        yield running


@contextlib.contextmanager
def rank_backend(servers: Servers, rank: int) -> Iterator[ServerBackend]:
    settings: dict[str, Any] = {"decode_batch_size": DECODE_BATCH_SIZE, "timeout_s": 60.0}
    backend = ServerBackend(config(servers.urls, **settings), run_seed=1, rank=rank, num_ranks=NUM_RANKS)
    try:
        backend.connect()
        yield backend
    finally:
        backend.close()


def test_no_server_holds_more_than_its_cap_at_any_moment(servers: Servers) -> None:
    """Unequal shares and ranks out of phase: each keeps to its own quotas."""
    both = threading.Barrier(NUM_RANKS, timeout=60)

    def rank_main(rank: int) -> int:
        num_answers = 0
        with rank_backend(servers, rank) as backend:
            assert backend.chunk == CHUNK
            both.wait()
            for step, number in enumerate(ASKED[rank]):
                samples = [sample(i) for i in range(number)]
                window = [MicroStep(samples=samples, micro_step_idx=0, first_req_idx=0)]
                (rollouts,) = backend.generate_window(window, global_step=step, greedy=step % 2 == 1)
                assert [rollout.sample for rollout in rollouts] == samples
                num_answers += len(rollouts)
        return num_answers

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        answered = [one.result(60) for one in [pool.submit(rank_main, rank) for rank in range(NUM_RANKS)]]
    assert answered == [sum(asked) for asked in ASKED]
    assert sum(engine.total for engine in servers.engines) == sum(answered), "nothing was rolled out twice"
    caps = [DECODE_BATCH_SIZE * size for size in WORLD_SIZES]
    peaks = [engine.peak for engine in servers.engines]
    assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True)), (peaks, caps)


def test_one_rank_alone_reaches_its_quotas_and_no_more(servers: Servers) -> None:
    """D10: also where the other rank is silent, because it may begin at any moment."""
    with rank_backend(servers, 0) as backend:
        samples = [sample(i) for i in range(6 * CHUNK)]
        backend.generate(samples, global_step=0, micro_step_idx=0, first_req_idx=0)
    plan = distribute(
        CHUNK, rank=0, num_ranks=NUM_RANKS, server_world_sizes=WORLD_SIZES, decode_batch_size=DECODE_BATCH_SIZE
    )
    assert [engine.peak for engine in servers.engines] == list(plan.quotas)
