"""The sync's wire half for real: gloo groups with two workers, over loopback (R09)."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import respx
import torch

from learner.rollout.server import ServerBackend
from learner.sync import WeightSync
from shared import communicator
from shared.errors import DigestError
from shared.ports import free_port
from shared.weights import SEAL_BYTES, is_sealed, unpack
from shared.wire import UpdateWeightsCall
from tests.unit.learner.rollout import fakes
from tests.unit.learner.sync.fakes import FakeServer, Weights, canary_items, logprobs
from tests.unit.learner.sync.test_weight_sync import Alone

WORKERS = 2


class GlooServer(FakeServer):
    """Its workers are threads, each with a real communicator; all must get the same bytes."""

    async def _init(self, request: httpx.Request) -> httpx.Response:
        call = json.loads(request.content)
        self.pool = ThreadPoolExecutor(WORKERS)
        joins = [
            self.pool.submit(
                communicator.join, call["backend"], "127.0.0.1", call["group_port"], rank, WORKERS + 1, 10.0
            )
            for rank in range(WORKERS)
        ]
        self.workers = await asyncio.gather(*map(asyncio.wrap_future, joins))
        return httpx.Response(200, json={})

    def _receive(self, call: UpdateWeightsCall) -> dict[str, torch.Tensor]:
        received = list(self.pool.map(lambda worker: self._receive_on(worker, call), self.workers))
        assert all(torch.equal(received[0][name], received[1][name]) for name in received[0])
        return received[0]

    def _receive_on(self, worker: Any, call: UpdateWeightsCall) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for index, bucket in enumerate(call.buckets):
            buffer = torch.empty(bucket.num_bytes + SEAL_BYTES, dtype=torch.uint8)
            worker.broadcast(buffer, WORKERS)
            if not is_sealed(buffer, ver=call.ver, index=index):
                raise DigestError("bytes differ")
            tensors |= dict(unpack(buffer, bucket.tensors))
        return tensors


def test_two_syncs_reach_every_worker(respx_mock: respx.MockRouter) -> None:
    """R09: the same group serves sync after sync."""
    url, port = "http://127.0.0.1:9", free_port()
    weights = Weights()
    server = GlooServer(respx_mock, url, port, world_size=WORKERS)
    config = fakes.config([url], first_port=port, timeout_s=10.0)
    backend = ServerBackend(config, run_seed=0)
    vllm = config.vllm.model_copy(update={"sync": config.vllm.sync.model_copy(update={"bucket_bytes": 500})})
    sync = WeightSync(
        backend,
        weights,
        config=vllm,
        canary=canary_items(),
        learner_logprobs=lambda: [logprobs(weights.tensors, item.response_token_ids) for item in canary_items()],
        fence=Alone(),
        device=torch.device("cpu"),
    )
    try:
        backend.connect()
        for ver in (1, 2):
            weights.step()
            assert sync.sync().ver == ver
            assert all(torch.equal(server.tensors[name], tensor) for name, tensor in weights.tensors.items())
    finally:
        sync.close()
        backend.close()
        for worker in server.workers:
            worker.close()
        server.pool.shutdown()
