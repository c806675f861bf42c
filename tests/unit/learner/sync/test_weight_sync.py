"""Weight sync against fake servers: versions, canary, failures, fences (R09, R10, R24)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import respx
import torch

from learner.rollout.servers import ServerBackend
from learner.sync.weight_sync import WeightSync
from shared.errors import (
    CanaryError,
    CommunicatorError,
    CoverageError,
    DigestError,
    ProjectError,
    PromptMismatchError,
    ServerBusyError,
    ServerMismatchError,
)
from tests.unit.learner.rollout.fakes import config
from tests.unit.learner.sync.fakes import FakeServer, Weights, canary_items, joiner, logprobs

URLS = ["http://a.test/x", "http://b.test"]
Build = Callable[..., WeightSync]


class Alone:
    """The fence of one rank."""

    is_main = True

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any) -> Any:
        return value


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with respx.mock(assert_all_called=False) as router:
        yield [FakeServer(router, url, 51216 + i, world_size=1 + i) for i, url in enumerate(URLS)]


@pytest.fixture
def backends() -> Iterator[list[ServerBackend]]:
    made: list[ServerBackend] = []
    yield made
    for backend in made:
        backend.close()


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def build(servers: list[FakeServer], backends: list[ServerBackend], weights: Weights) -> Build:
    def learner_logprobs() -> list[list[float]]:
        return [logprobs(weights.tensors, item.response_token_ids) for item in canary_items()]

    def make(*, fence: Any = None, **sync: Any) -> WeightSync:
        backend = ServerBackend(config(URLS, decode_batch_size=4), run_seed=1)
        backends.append(backend)
        backend.connect()
        vllm = backend.config.vllm
        section = vllm.sync.model_copy(update={"bucket_bytes": 400} | sync)
        return WeightSync(
            backend,
            weights,
            config=vllm.model_copy(update={"sync": section}),
            canary=canary_items(),
            learner_logprobs=learner_logprobs,
            fence=fence or Alone(),
            device=torch.device("cpu"),
            start_join=joiner(servers),
        )

    return make


def test_every_server_gets_every_byte_and_the_version_rises_by_one(
    build: Build, servers: list[FakeServer], weights: Weights, backends: list[ServerBackend]
) -> None:
    """R09, R10: several buckets to two servers of different size; the backend then accepts that version only."""
    sync = build()
    sync.connect()
    assert (sync.ver, backends[0].expected_ver) == (0, None)
    first = sync.sync()
    weights.step()
    second = sync.sync()
    assert (first.ver, second.ver, sync.ver, backends[0].expected_ver) == (1, 2, 2, 2)
    assert sync.receipts == [first, second]
    for server in servers:
        assert server.log == ["init", "update 1", "update 2"]
        assert len(server.updates[0].buckets) > 1
        assert server.tensors.keys() == weights.tensors.keys()
        assert all(torch.equal(server.tensors[name], tensor) for name, tensor in weights.tensors.items())
    assert (second.mode, second.num_tensors, second.canary_gap, second.canary_gap_max) == ("full", 4, 0.0, 0.0)
    assert second.num_bytes == sum(bucket.num_bytes for bucket in servers[0].updates[1].buckets)


def test_versions_continue_above_what_the_servers_have_seen(build: Build, servers: list[FakeServer]) -> None:
    """R10: a learner that came back never reuses a version, so that no old rollout passes for a new one."""
    servers[1].ver = 7
    assert build().sync().ver == 8


def test_weights_travel_in_the_served_type_where_all_servers_agree(build: Build, servers: list[FakeServer]) -> None:
    for server in servers:
        server.dtype = "bfloat16"
    sync = build(canary_tolerance=10.0)
    sync.sync()
    assert servers[0].tensors["embed"].dtype == torch.bfloat16
    assert servers[0].tensors["positions"].dtype == torch.int64
    sync.close()
    servers[0].dtype = "float32"
    sync.sync()
    assert servers[0].tensors["embed"].dtype == torch.float32


FAILURES: list[tuple[dict[str, Any], type[ProjectError]]] = [
    ({"refuses_update": ServerMismatchError("wrong incarnation")}, ServerMismatchError),
    ({"refuses_update": ServerBusyError("still draining")}, ServerBusyError),
    ({"flips_a_bit": True}, DigestError),
    ({"fails_after_bucket": (1, CoverageError("layer.bias was not written"))}, CoverageError),
    ({"drops_the_wire": True}, CommunicatorError),
    ({"misses": "layer.weight"}, CanaryError),
    ({"score_delta": 0.2}, CanaryError),
    ({"prompt_ids": (5, 6, 8)}, PromptMismatchError),
]


@pytest.mark.parametrize(("trouble", "wanted"), FAILURES)
def test_one_of_two_servers_fails(
    build: Build,
    servers: list[FakeServer],
    weights: Weights,
    backends: list[ServerBackend],
    trouble: dict[str, Any],
    wanted: type[ProjectError],
) -> None:
    """The first cause is raised, typed, with the server named; no version is counted; the groups are aborted; and a
    later sync opens new ones and heals."""
    sync = build()
    sync.sync()
    weights.step()
    healthy = {name: getattr(servers[1], name) for name in trouble}
    for name, value in trouble.items():
        setattr(servers[1], name, value)
    with pytest.raises(wanted) as caught:
        sync.sync()
    if wanted is not PromptMismatchError:
        assert URLS[1] in caught.value.what
    assert (sync.ver, backends[0].expected_ver, len(sync.receipts)) == (1, 1, 1)
    assert all(server.groups[-1].aborted.is_set() for server in servers)
    for name, value in healthy.items():
        setattr(servers[1], name, value)
    assert sync.sync().ver > 1
    assert [len(server.groups) for server in servers] == [2, 2]


def test_a_server_that_refuses_the_group_names_itself_and_the_other_is_left(
    build: Build, servers: list[FakeServer]
) -> None:
    servers[1].refuses_init = CommunicatorError("port 51217 is in use")
    with pytest.raises(CommunicatorError, match=f"{URLS[1]}: port 51217"):
        build().connect()
    assert servers[0].groups[0].aborted.is_set()


def test_the_canary_gap_is_measured_and_the_worst_server_counts(build: Build, servers: list[FakeServer]) -> None:
    servers[0].score_delta = -0.03
    receipt = build().sync()
    assert receipt.canary_gap == pytest.approx(0.03)
    assert receipt.canary_gap_max == pytest.approx(0.03)


def test_close_says_goodbye(build: Build, servers: list[FakeServer]) -> None:
    sync = build()
    sync.sync()
    sync.close()
    sync.close()
    assert [server.log[-1] for server in servers] == ["close", "close"]
    assert [server.log.count("close") for server in servers] == [1, 1]
    assert all(server.groups[0].closed for server in servers)


class ThreadFence:
    """Two ranks as threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any], log: list[str]) -> None:
        self.is_main = rank == 0
        self._rank, self._barrier, self._box, self._log = rank, barrier, box, log

    def barrier(self) -> None:
        self._log.append(f"barrier {self._rank}")
        self._barrier.wait(10)

    def broadcast_object(self, value: Any) -> Any:
        if self.is_main:
            self._box[0] = value
        self._barrier.wait(10)
        value = self._box[0]
        self._barrier.wait(10)
        return value


def run_two_ranks(build: Build) -> tuple[list[Any], list[WeightSync], list[str]]:
    barrier, box, log = threading.Barrier(2), [None], []
    syncs = [build(fence=ThreadFence(rank, barrier, box, log)) for rank in range(2)]
    outcomes: list[Any] = [None, None]

    def rank_main(rank: int) -> None:
        try:
            outcomes[rank] = syncs[rank].sync()
            log.append(f"infer {rank}")
        except ProjectError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs at a fence"
    return outcomes, syncs, log


def test_only_rank_0_syncs_and_all_ranks_infer_afterwards(
    build: Build, servers: list[FakeServer], backends: list[ServerBackend]
) -> None:
    """R24, D1: barrier, sync, barrier, infer; one group per server, the same receipt and version on both ranks."""
    outcomes, syncs, log = run_two_ranks(build)
    assert outcomes[0] == outcomes[1]
    assert [sync.ver for sync in syncs] == [backend.expected_ver for backend in backends] == [1, 1]
    assert [server.log for server in servers] == [["init", "update 1"]] * 2
    assert all(entry.startswith("barrier") for entry in log[:4])
    assert sorted(log[4:]) == ["infer 0", "infer 1"]


def test_a_failure_on_rank_0_is_everybody_s(build: Build, servers: list[FakeServer]) -> None:
    """R24: no rank waits for one that failed; all tell the same cause."""
    servers[0].flips_a_bit = True
    outcomes, syncs, _ = run_two_ranks(build)
    assert [type(outcome) for outcome in outcomes] == [DigestError, DigestError]
    assert str(outcomes[0]) == str(outcomes[1])
    assert [sync.ver for sync in syncs] == [0, 0]
