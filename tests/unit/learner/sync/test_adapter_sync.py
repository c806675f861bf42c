"""Adapter sync against fake servers: what travels, when it falls back, and how that is told (R08, R15)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import respx
import torch

from learner.rollout.server_backend import ServerBackend
from learner.sync.sync import Sync
from shared.errors import CoverageError, ProjectError, ServerMismatchError, SyncError
from tests.syncs import server_sync
from tests.unit.learner.rollout.fakes import config
from tests.unit.learner.sync.fakes import Adapter, FakeServer, Merged, Weights, canary_items, joiner, logprobs
from tests.unit.learner.sync.test_server_delivery import URLS

Build = Callable[..., Sync]


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with respx.mock(assert_all_called=False) as router:
        yield [FakeServer(router, url, 51216 + i, max_lora_rank=8) for i, url in enumerate(URLS)]


@pytest.fixture
def adapter() -> Adapter:
    return Adapter(Weights())


@pytest.fixture
def build(servers: list[FakeServer], adapter: Adapter) -> Iterator[Build]:
    made: list[ServerBackend] = []

    def learner_logprobs() -> list[list[float]]:
        return [logprobs(adapter.merged.tensors, item.response_token_ids) for item in canary_items()]

    def make(*, fallback_to_full: bool = True) -> Sync:
        made.append(ServerBackend(config(URLS), run_seed=1))
        made[-1].connect()
        vllm = made[-1].config.vllm
        return server_sync(
            made[-1],
            Merged(adapter),
            canary_items(),
            learner_logprobs,
            adapter=adapter,
            config=vllm.model_copy(
                update={"sync": vllm.sync.model_copy(update={"fallback_to_full": fallback_to_full})}
            ),
            start_join=joiner(servers),
        )

    yield make
    for backend in made:
        backend.close()


def modes(server: FakeServer) -> list[tuple[int, str]]:
    return [(update.ver, update.mode) for update in server.updates]


def test_the_weights_below_travel_once_and_then_the_adapter_alone(
    build: Build, servers: list[FakeServer], adapter: Adapter
) -> None:
    """R08, R10: on every server; a receipt counts what the adapter weighs."""
    sync = build()
    for ver in (2, 3, 4):
        adapter.step()
        receipt = sync.sync()
        assert receipt.ver == ver
        assert (receipt.mode, receipt.num_tensors, receipt.num_bytes) == ("adapter", 2, 2 * 8 * 8 * 4)
        assert receipt.canary_gap == pytest.approx(0.0, abs=1e-4)
    for server in servers:
        assert modes(server) == [(1, "full"), (2, "adapter"), (3, "adapter"), (4, "adapter")]
        assert torch.equal(server.tensors["layer.weight"], adapter.base.tensors["layer.weight"])


def without_adapters(servers: list[FakeServer], adapter: Adapter) -> None:
    servers[1].max_lora_rank = 0


def too_small(servers: list[FakeServer], adapter: Adapter) -> None:
    servers[1].max_lora_rank = 4


def unfit(servers: list[FakeServer], adapter: Adapter) -> None:
    adapter.obstacle = "the adapter is a DoRA"


KNOWN = [
    (without_adapters, ServerMismatchError, "enable_lora: false"),
    (too_small, ServerMismatchError, "max_lora_rank: 4"),
    (unfit, SyncError, "DoRA"),
]


@pytest.mark.parametrize(("trouble", "error", "word"), KNOWN)
def test_what_is_known_before_the_first_step_is_told_then(
    build: Build,
    servers: list[FakeServer],
    adapter: Adapter,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[list[FakeServer], Adapter], None],
    error: type[ProjectError],
    word: str,
) -> None:
    """R08: an error without falling back; else one warning, full syncs, and the reason in the first receipt."""
    trouble(servers, adapter)
    with pytest.raises(error, match=word):
        build(fallback_to_full=False).connect()
    assert all(group.aborted.is_set() for server in servers for group in server.groups)
    assert all(server.log[-1] == "close" for server in servers)
    with caplog.at_level(logging.WARNING, "learner.sync"):
        sync = build()
        sync.connect()
        receipts = [sync.sync() for _ in range(2)]
    assert [receipt.mode for receipt in receipts] == ["full", "full"]
    assert word in receipts[0].fallback
    assert receipts[1].fallback == ""
    assert len([record for record in caplog.records if word in record.getMessage()]) == 1


def test_a_failure_on_one_server_falls_back_for_good(
    build: Build, servers: list[FakeServer], adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    """R08: in the third sync; the same call ends with a full sync to all, also after the server is well again."""
    sync = build()
    sync.sync()
    servers[1].refuses_adapter = CoverageError("layer has no place")
    adapter.step()
    with caplog.at_level(logging.WARNING, "learner.sync"):
        receipt = sync.sync()
    servers[1].refuses_adapter = None
    assert (receipt.mode, URLS[1] in receipt.fallback, "has no place" in receipt.fallback) == ("full", True, True)
    assert receipt.canary_gap == pytest.approx(0.0, abs=1e-4)
    assert [record.levelname for record in caplog.records if "full syncs from here" in record.message] == ["WARNING"]
    adapter.step()
    again = sync.sync()
    assert (again.mode, again.fallback, again.ver) == ("full", "", receipt.ver + 1)
    for server in servers:
        assert [mode for _, mode in modes(server)][-2:] == ["full", "full"]
        assert torch.equal(server.tensors["layer.weight"], adapter.merged.tensors["layer.weight"])
        assert [name for name in server.tensors if ".lora_" in name] == []


def test_without_falling_back_the_error_ends_the_sync_and_the_next_one_begins_anew(
    build: Build, servers: list[FakeServer], adapter: Adapter
) -> None:
    sync = build(fallback_to_full=False)
    first = sync.sync()
    servers[0].refuses_adapter = CoverageError("layer has no place")
    with pytest.raises(CoverageError, match=URLS[0]):
        sync.sync()
    assert sync.ver == first.ver
    servers[0].refuses_adapter = None
    assert sync.sync().mode == "adapter"
    assert [mode for _, mode in modes(servers[0])] == ["full", "adapter", "adapter", "full", "adapter"]
