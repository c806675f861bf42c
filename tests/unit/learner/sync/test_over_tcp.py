"""The sync's wire half for real: groups over loopback, of two servers on one machine (R09)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import respx
import torch

from learner.rollout.server_backend import ServerBackend
from shared.addresses import free_ports
from shared.errors import CommunicatorError, CoverageError, DigestError, ProjectError, ServerUnreachableError
from shared.sync import group as communicator
from shared.sync.buckets import SEAL_BYTES, is_sealed, unpack
from shared.wire import InitCommunicatorCall, UpdateWeightsCall
from tests.syncs import server_sync
from tests.unit.learner.rollout import fakes
from tests.unit.learner.sync.fakes import FakeServer, Weights, canary_items, logprobs

URLS = ["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"]
HOST = "127.0.0.1"


class TcpServer(FakeServer):
    """Its workers are threads, each with a real communicator; all must get the same bytes. Like the real server, it
    leaves the group where an update fails."""

    group_host = HOST
    workers: tuple[Any, ...] = ()
    joined: InitCommunicatorCall

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"group_host": self.group_host}

    async def _init(self, request: httpx.Request) -> httpx.Response:
        if self.refuses_init:
            return fakes.error(self.refuses_init)
        self.joined = call = InitCommunicatorCall.model_validate_json(request.content)
        self.leave()
        self.pool = ThreadPoolExecutor(self.world_size)
        place, secret = (call.backend, HOST, call.group_port), bytes.fromhex(call.secret)
        ranks = range(call.first_rank, call.first_rank + self.world_size)
        joins = [communicator.start_join(*place, rank, call.world_size, 10.0, secret=secret) for rank in ranks]
        try:
            self.workers = await asyncio.gather(*(asyncio.to_thread(join.result) for join in joins))
        except asyncio.CancelledError:  # the learner gave up
            for join in joins:
                join.cancel(CommunicatorError("the learner went away"))
            raise
        return httpx.Response(200, json={})

    def _receive(self, call: UpdateWeightsCall, num_groups: int) -> dict[str, torch.Tensor]:
        try:
            received = list(self.pool.map(lambda worker: self._receive_on(worker, call), self.workers))
        except ProjectError:
            self.leave()
            raise
        for other in received[1:]:
            assert all(torch.equal(received[0][name], tensor) for name, tensor in other.items())
        return received[0]

    def _receive_on(self, worker: communicator.Communicator, call: UpdateWeightsCall) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for index, bucket in enumerate(call.buckets):
            if self.fails_after_bucket and self.fails_after_bucket[0] == index:
                raise self.fails_after_bucket[1]
            buffer = torch.empty(bucket.num_bytes + SEAL_BYTES, dtype=torch.uint8)
            worker.broadcast(buffer, worker.world_size - 1)
            if not is_sealed(buffer, key=worker.seal_key, ver=call.ver, index=index):
                raise DigestError("bytes differ")
            tensors |= dict(unpack(buffer, bucket.tensors))
        return tensors

    def leave(self) -> None:
        for worker in self.workers:
            worker.abort()
        self.workers = ()


class World:
    """Two servers, of two workers and of one, and a learner."""

    def __init__(self, router: respx.MockRouter) -> None:
        self.ports = free_ports(2)
        self.weights = Weights()
        self.servers = [TcpServer(router, URLS[i], self.ports[i], world_size=2 - i) for i in range(2)]
        config = fakes.config(URLS, timeout_s=10.0)
        entries = [
            entry.model_copy(update={"group_port": port})
            for entry, port in zip(config.vllm.server.servers or (), self.ports, strict=True)
        ]
        server = config.vllm.server.model_copy(update={"servers": entries})
        sync = config.vllm.sync.model_copy(update={"bucket_bytes": 500})
        vllm = config.vllm.model_copy(update={"server": server, "sync": sync})
        self.backend = ServerBackend(config.model_copy(update={"vllm": vllm}), run_seed=0)
        self.sync = server_sync(
            self.backend,
            self.weights,
            canary_items(),
            lambda: [logprobs(self.weights.tensors, item.response_token_ids) for item in canary_items()],
            config=vllm,
        )

    def sync_and_compare(self) -> int:
        self.weights.step()
        receipt = self.sync.sync()
        for server in self.servers:
            for name, tensor in self.weights.tensors.items():
                assert torch.equal(server.tensors[name], tensor), f"{server.base_url}: {name}"
        return receipt.ver

    @property
    def groups(self) -> list[tuple[int, int, int]]:
        """Port, first rank and size of the group that each server was last asked to join."""
        return [(s.joined.group_port, s.joined.first_rank, s.joined.world_size) for s in self.servers]

    def close(self) -> None:
        self.sync.close()
        self.backend.close()
        for server in self.servers:
            server.leave()


@pytest.fixture
def world(respx_mock: respx.MockRouter) -> Iterator[World]:
    world = World(respx_mock)
    world.backend.connect()
    yield world
    world.close()


def test_servers_of_one_machine_are_one_group_in_sync_after_sync(world: World) -> None:
    """R09: a bucket leaves the learner once; every worker of both servers gets it."""
    assert [world.sync_and_compare() for _ in range(3)] == [1, 2, 3]
    assert world.groups == [(world.ports[0], 0, 4), (world.ports[0], 2, 4)]


def test_servers_that_join_at_other_addresses_are_groups_of_their_own(world: World) -> None:
    world.servers[1].group_host = "localhost"
    world.sync_and_compare()
    assert world.groups == [(world.ports[0], 0, 3), (world.ports[1], 0, 2)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [CoverageError("layer.bias was not written"), DigestError("bytes differ")])
def test_whose_fault_it_was_in_one_group(world: World, which: int, error: ProjectError) -> None:
    """All lose the wire when one leaves it; the one that left says why. The next sync is a new group's."""
    world.sync_and_compare()
    world.servers[which].fails_after_bucket = (1, error)
    with pytest.raises(type(error), match=f"{URLS[which]}: {error.what}"):
        world.sync.sync()
    world.servers[which].fails_after_bucket = None
    assert world.sync_and_compare() in (2, 3)  # 3 where the other server had all of it, and serves version 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_server_that_refuses_lets_the_others_go(world: World, which: int) -> None:
    """Nobody keeps the port, so that the next group has it at once."""
    world.servers[which].refuses_init = ServerUnreachableError("gone")
    with pytest.raises(ServerUnreachableError, match=f"{URLS[which]}: gone"):
        world.sync.connect()
    world.servers[which].refuses_init = None
    assert world.sync_and_compare() == 1
