"""Syncs to fake servers: versions, canary, failures, ranks (R09, R10, R24).

And what servers are asked before the first sync (R03, R16).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import respx
import torch

from learner.data.prompt import PromptCheck
from learner.policy.canary_scores import CanaryScores
from learner.policy.weights import checksum
from learner.records import VisionInputs
from learner.rollout import client
from learner.rollout.server_backend import ServerBackend
from learner.sync import server_delivery
from learner.sync.canary import Scorer
from learner.sync.fitness import check_architecture, check_prompt, check_vision
from learner.sync.sync import Sync
from shared.errors import (
    CanaryError,
    CommunicatorError,
    CoverageError,
    DigestError,
    NotFiniteError,
    ProjectError,
    PromptMismatchError,
    ServerBusyError,
    ServerMismatchError,
    ServerUnreachableError,
    SyncError,
)
from shared.pixels import ImageProcessing
from shared.wire import ScoreReply, ServerStatus
from tests.syncs import ONE_RANK, server_sync
from tests.unit.learner.rollout import fakes
from tests.unit.learner.rollout.fakes import config
from tests.unit.learner.sync.fakes import PROMPT_IDS, FakeServer, Weights, canary_items, joiner, logprobs
from tests.waits import DEADLINE_S, wait_until

URLS = ["http://a.test/x", "http://b.test"]
Build = Callable[..., Sync]


def served_ver(backend: ServerBackend) -> int | None:
    served = backend.membership.served
    return served and served.ver


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

    def make(*, ranks: Any = ONE_RANK, scorer: Scorer | None = None, timeout_s: float = 2.0, **sync: Any) -> Sync:
        backend = ServerBackend(config(URLS, decode_batch_size=4, timeout_s=timeout_s), run_seed=1)
        backends.append(backend)
        backend.connect()
        vllm = backend.config.vllm
        section = vllm.sync.model_copy(update={"bucket_bytes": 400} | sync)
        return server_sync(
            backend,
            weights,
            canary_items(),
            learner_logprobs,
            scorer=scorer,
            config=vllm.model_copy(update={"sync": section}),
            ranks=ranks,
            start_join=joiner(servers),
        )

    return make


def test_every_server_gets_every_byte_and_the_version_rises_by_one(
    build: Build, servers: list[FakeServer], weights: Weights, backends: list[ServerBackend]
) -> None:
    """R09, R10: several buckets to two servers of different size; the backend then accepts that version only."""
    sync = build()
    sync.connect()
    assert (sync.ver, served_ver(backends[0])) == (0, None)
    first = sync.sync()
    weights.step()
    second = sync.sync()
    assert (first.ver, second.ver, sync.ver, served_ver(backends[0])) == (1, 2, 2, 2)
    for server in servers:
        assert server.log == ["init", "update 1", "update 2"]
        assert len(server.updates[0].buckets) > 1
        assert server.tensors.keys() == weights.tensors.keys()
        assert all(torch.equal(server.tensors[name], tensor) for name, tensor in weights.tensors.items())
    assert (second.mode, second.num_tensors, second.canary_gap, second.canary_gap_max) == ("full", 4, 0.0, 0.0)
    parts = dict(second.parts)
    assert parts.pop("scores") > 0
    assert parts.pop("send") > 0
    assert parts == pytest.approx({"drain": 0.0, "load": 0.006, "canary": 0.012, "verdict": 0.002}), (
        "of the longest pause"
    )
    assert second.pause_s == 0.02
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


def test_a_tensor_that_is_not_the_scored_one_is_never_served(
    build: Build, servers: list[FakeServer], weights: Weights
) -> None:
    """D14: a stale tensor may change no log-probability. The servers hear no verdict, and the next sync is right."""
    fresh, stale = dict(weights.tensors), weights.tensors["positions"] + 1

    def scorer(dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        scores = [logprobs(fresh, item.response_token_ids) for item in canary_items()]
        checksums = {name: checksum(tensor) for name, tensor in fresh.items()}
        return CanaryScores(read=lambda: scores, merge_gap=0.0, checksums=checksums)

    sync = build(scorer=scorer)
    weights.tensors["positions"] = stale
    with pytest.raises(SyncError, match="positions"):
        sync.sync()
    assert [server.expected for server in servers] == [None, None]
    weights.tensors["positions"] = fresh["positions"]
    assert sync.sync().canary_gap == 0.0


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
    assert (sync.ver, served_ver(backends[0])) == (1, 1)
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


@pytest.mark.parametrize("where", ["init", "update"])
def test_a_newcomer_that_hangs_holds_a_step_only_briefly(
    build: Build,
    servers: list[FakeServer],
    backends: list[ServerBackend],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """R40, D16: the others go on without it, long before `timeout_s`. It may come again."""
    monkeypatch.setattr(server_delivery, "NEWCOMER_S", 0.3)
    monkeypatch.setattr(server_delivery, "NEWCOMER_MARGIN", 0.0)
    monkeypatch.setattr("learner.sync.members.BACK_OFF_S", 0.3)
    monkeypatch.setattr(client, "REPLY_GRACE_S", 0.1)
    monkeypatch.setattr(client, "POLL_S", 0.1)
    sync = build(timeout_s=DEADLINE_S)
    sync.sync()
    backends[0].adopt(replace(backends[0].membership, min_servers=1))
    members = sync._delivery.members  # type: ignore[attr-defined]
    members.leave_out(URLS[1], ServerUnreachableError("killed"))
    wait_until(lambda: members.returning.ready() == [URLS[1]])
    sync.close()  # the next sync opens a group again
    servers[1].hangs = where
    receipt = sync.sync()
    assert [member.base_url for member in backends[0].membership.serving] == URLS[:1]
    assert len(receipt.repeated) == 1
    assert receipt.seconds < DEADLINE_S / 2
    servers[1].hangs = ""
    monkeypatch.setattr(server_delivery, "NEWCOMER_S", DEADLINE_S)
    wait_until(lambda: members.returning.ready() == [URLS[1]])
    assert sync.sync().repeated == ()
    assert [member.base_url for member in backends[0].membership.serving] == URLS


def test_a_newcomer_that_is_slow_all_the_time_holds_a_step_once(
    build: Build, servers: list[FakeServer], backends: list[ServerBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R40: its join and its update share one limit, and an update that was slow long ago does not stretch it."""
    monkeypatch.setattr(server_delivery, "NEWCOMER_S", 3.0)
    sync = build(timeout_s=DEADLINE_S)

    def slow(where: str) -> float:
        """Sync while the second server hangs a second in this call; the update's limit."""
        servers[1].hangs = where
        timer = threading.Timer(1.0, lambda: setattr(servers[1], "hangs", ""))
        timer.start()
        assert sync.sync().repeated == ()
        timer.join()
        return servers[0].updates[-1].timeout_s

    assert slow("update") == DEADLINE_S
    sync.sync()
    backends[0].adopt(replace(backends[0].membership, min_servers=1))
    members = sync._delivery.members  # type: ignore[attr-defined]
    members.leave_out(URLS[1], ServerUnreachableError("killed"))
    wait_until(lambda: members.returning.ready() == [URLS[1]])
    sync.close()
    assert slow("init") <= 2.5
    assert [member.base_url for member in backends[0].membership.serving] == URLS


def test_a_server_serves_nothing_before_the_learner_s_verdict(
    build: Build, servers: list[FakeServer], weights: Weights
) -> None:
    """R09: each is told what its canary must score, and judges before it counts the version."""
    sync = build()
    sync.sync()
    weights.step()
    for server in servers:
        server.score_delta = 0.2
    with pytest.raises(CanaryError, match="http"):
        sync.sync()
    assert [server.ver for server in servers] == [1, 1]
    assert [server.expected and server.expected.ver for server in servers] == [2, 2]


def test_a_learner_whose_own_scores_are_no_numbers_ends_the_update(
    build: Build, servers: list[FakeServer], weights: Weights
) -> None:
    weights.tensors["layer.bias"] = torch.full((8,), float("nan"))
    with pytest.raises(NotFiniteError, match="the learner's own"):
        build().sync()
    assert [server.ver for server in servers] == [0, 0]


def test_no_server_pauses_for_the_learner_s_own_scores(
    build: Build, servers: list[FakeServer], weights: Weights
) -> None:
    """They are made once, before the first server hears of the update: by `prepare`, while rollouts still go on, or
    else by `sync`. Those of another step are never used."""
    heard: list[list[int]] = []

    def scorer(dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        scores = [logprobs(weights.tensors, item.response_token_ids) for item in canary_items()]

        def read() -> list[list[float]]:
            heard.append([len(server.updates) for server in servers])
            return scores

        return CanaryScores(read=cache(read), merge_gap=0.0)

    sync = build(scorer=scorer)
    for i in range(2):
        sync.prepare()
        assert len(heard) == i, "the pass is captured in the second sync, and nothing else may use the device then"
        sync.sync()
        weights.step()
    sync.prepare()
    assert heard == [[0, 0], [1, 1], [2, 2]]
    assert sync.sync().parts["scores"] > 0
    weights.step()
    assert sync.sync().canary_gap == 0.0
    assert heard == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_no_server_pauses_for_the_first_buckets(
    build: Build, servers: list[FakeServer], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three buckets are made before the first server hears of the update, and the rest while servers wait."""
    heard: list[list[int]] = []

    def slowly(dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for named in Weights.named_weights(weights, dtype):
            time.sleep(0.1)  # for a server to hear of the update, if it has been called
            heard.append([len(server.updates) for server in servers])
            yield named

    monkeypatch.setattr(weights, "named_weights", slowly)
    sync = build(bucket_bytes=1)  # a bucket for each tensor
    sync.sync()
    assert heard == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_scores_of_a_failed_sync_are_not_used_again(build: Build, servers: list[FakeServer], weights: Weights) -> None:
    sync = build()
    for _ in range(2):
        sync.sync()
        weights.step()
    sync.prepare()
    servers[1].flips_a_bit = True
    with pytest.raises(DigestError):
        sync.sync()
    servers[1].flips_a_bit = False
    weights.step()
    assert sync.sync().canary_gap == 0.0


def test_close_says_goodbye(build: Build, servers: list[FakeServer]) -> None:
    sync = build()
    sync.sync()
    sync.close()
    sync.close()
    assert [server.log[-1] for server in servers] == ["close", "close"]
    assert [server.log.count("close") for server in servers] == [1, 1]
    assert all(server.groups[0].closed for server in servers)


class ThreadRanks:
    """Two ranks as threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any], log: list[str]) -> None:
        self.is_main = rank == 0
        self._rank, self._barrier, self._box, self._log = rank, barrier, box, log

    def barrier(self) -> None:
        self._log.append(f"barrier {self._rank}")
        self._barrier.wait(60)

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        self._box[self._rank] = value
        self._barrier.wait(60)
        found = list(self._box)
        self._barrier.wait(60)
        return found


def run_two_ranks(build: Build) -> tuple[list[Any], list[Sync], list[str]]:
    barrier, box, log = threading.Barrier(2), [None, None], []
    syncs = [build(ranks=ThreadRanks(rank, barrier, box, log)) for rank in range(2)]
    outcomes: list[Any] = [None, None]

    def rank_main(rank: int) -> None:
        try:
            syncs[rank].connect()
            syncs[rank].prepare()
            outcomes[rank] = syncs[rank].sync()
            log.append(f"infer {rank}")
        except ProjectError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes, syncs, log


def test_only_rank_0_syncs_and_all_ranks_infer_afterwards(
    build: Build, servers: list[FakeServer], backends: list[ServerBackend]
) -> None:
    """R24, D1: barrier, sync, barrier, infer; one group per server, the same receipt and version on both ranks."""
    outcomes, syncs, log = run_two_ranks(build)
    assert outcomes[0] == outcomes[1]
    assert [sync.ver for sync in syncs] == [served_ver(backend) for backend in backends] == [1, 1]
    assert [server.log for server in servers] == [["init", "update 1"]] * 2
    assert all(entry.startswith("barrier") for entry in log[:-2])
    assert sorted(log[-2:]) == ["infer 0", "infer 1"]


def test_a_failure_on_rank_0_is_everybody_s(build: Build, servers: list[FakeServer]) -> None:
    """R24: no rank waits for one that failed; all tell the same cause."""
    servers[0].flips_a_bit = True
    outcomes, syncs, _ = run_two_ranks(build)
    assert [type(outcome) for outcome in outcomes] == [DigestError, DigestError]
    assert str(outcomes[0]) == str(outcomes[1])
    assert [sync.ver for sync in syncs] == [0, 0]


# ---- before the first sync -------------------------------------------------------------------------------------------


def test_another_architecture_names_server_and_size() -> None:
    sizes = {"model_type": "qwen3", "hidden_size": "64"}
    status = ServerStatus(**fakes.status(model="some/model", architecture=sizes))
    check_architecture(URLS[0], status, {"model_type": "qwen3", "num_heads": "4"})
    with pytest.raises(ServerMismatchError, match=r"http://a\.test.*hidden_size 64, not 128.*some/model") as caught:
        check_architecture(URLS[0], status, {"model_type": "qwen3", "hidden_size": "128"})
    assert caught.value.exit_code == 2


def test_another_prompt_names_server_and_sample() -> None:
    (item,) = canary_items(1)
    check_prompt(URLS[0], item, ScoreReply(ver=0, logprobs=[[0.0]], prompt_token_ids=[list(PROMPT_IDS)]))
    with pytest.raises(PromptMismatchError, match=r"http://a\.test.*token 1\b"):
        check_prompt(URLS[0], item, ScoreReply(ver=0, logprobs=[[0.0]], prompt_token_ids=[[PROMPT_IDS[0], 99]]))


def test_other_pixels_name_server_and_sample() -> None:
    """R45: the prompt's ids say nothing about the pixels of an image of the same size."""
    (item,) = canary_items(1)
    vision = VisionInputs(pixel_values=torch.rand(16, 12), image_grid_thw=torch.tensor([[1, 4, 4]]))
    pictured = replace(item, prompt=replace(item.prompt, vision=vision))
    processing = ImageProcessing(settings={}, scale=(1.0,), shift=(0.0,))
    check = PromptCheck(image_processing=processing)

    def reply(pixel_values: torch.Tensor) -> ScoreReply:
        seen = processing.processed(pixel_values, vision.image_grid_thw, "float32")
        return ScoreReply(ver=0, logprobs=[[0.0]], prompt_token_ids=[[1]], pixels=[seen])

    check_vision(URLS[0], pictured, reply(vision.pixel_values), check)
    check_vision(URLS[0], item, ScoreReply(ver=0, logprobs=[[0.0]], prompt_token_ids=[[1]], pixels=[None]), check)
    with pytest.raises(ServerMismatchError, match=r"http://a\.test") as caught:
        check_vision(URLS[0], pictured, reply(vision.pixel_values.flip(0)), check)
    assert item.sample.sample_id in caught.value.what
