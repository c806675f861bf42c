"""Weights that arrive while others are served (R09, R10): the endpoints over a fake engine, and a worker over a real
pair of connections."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from rollout_server import staging as staging_module
from rollout_server.engine import WorkerReply
from rollout_server.service import RolloutService
from rollout_server.staging import Staging
from rollout_server.worker import SyncWorker
from shared.addresses import free_port
from shared.errors import DigestError, StagingError
from shared.sync.buckets import SEAL_BYTES, pack, seal, seal_key
from shared.sync.group import Communicator, start_join
from shared.wire import BUCKETS as BUCKETS_TYPE
from shared.wire import InitCommunicatorCall, StageWeightsCall
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.rollout_server.test_app import error, open_group, push, request, serve, update
from tests.unit.rollout_server.test_worker import BUCKETS, PLAN, TENSORS, RememberingLoad
from tests.waits import until, wait_until

SPECS = [{"name": "w", "dtype": "float32", "shape": [2, 3]}]


def stage(incarnation: str = "a", ver: int = 1, **fields: Any) -> dict[str, Any]:
    buckets = [{"tensors": SPECS, "num_bytes": 32}]
    return {"incarnation": incarnation, "ver": ver, "buckets": buckets, "timeout_s": 5, **fields}


async def answer(http: httpx.AsyncClient, text: str = "a") -> int:
    """Roll out; return the version that answers."""
    reply = await http.post("/infer/", json={"infer_requests": [request(text)]})
    assert reply.status_code == 200, reply.text
    return int(reply.json()[0]["rollout_infos"]["ver"])


def arriving() -> WorkerReply:
    return WorkerReply(done=False)


# ---- the server ----------------------------------------------------------------------------------------------------


def test_rollouts_go_on_while_weights_arrive_and_pause_only_for_the_load() -> None:
    """No answer spans two versions: what began by the old one ends by it, before anything is loaded."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        engine.replies["sync_poll"] = arriving
        staging = asyncio.create_task(http.post("/stage_weights/", json=stage()))
        await until(lambda: engine.called().count("sync_poll") > 1)
        assert [await answer(http), await answer(http)] == [0, 0]
        assert (service.gate.state, staging.done(), engine.num_resets) == ("serving", False, 0)
        engine.replies["sync_poll"] = lambda: WorkerReply(num_tensors=1, weights="w")
        reply = await staging
        assert (reply.status_code, reply.json()["num_bytes"], reply.json()["num_tensors"]) == (200, 32, 1)
        assert await answer(http) == 0
        engine.holds = {"long": asyncio.Event()}
        calling = asyncio.create_task(answer(http, "long"))
        await until(lambda: "long" in engine.generated)
        updating = asyncio.create_task(push(http, update(staged=True)))
        await until(lambda: service.gate.state == "draining")
        assert "sync_load" not in engine.called()
        engine.holds["long"].set()
        assert await calling == 0
        done = (await updating).json()
        assert (done["ver"], done["num_bytes"], done["num_tensors"]) == (1, 32, 1)
        assert done["pause_s"] <= done["seconds"]
        assert done["transfer_s"] == reply.json()["seconds"]
        assert await answer(http) == 1
        assert ("sync_load", "sync_start" in engine.called()) == (engine.called()[-3], False)
        text = (await http.get("/metrics/")).text
        assert "rollout_staged_bytes 32.0" in text
        assert f"rollout_sync_last_pause_seconds {done['pause_s']}" in text

    serve(check)


def fails() -> WorkerReply:
    raise DigestError("other bytes")


async def the_learner_closes(http: httpx.AsyncClient, staging: asyncio.Task[httpx.Response]) -> str:
    await http.post("/close_communicator/", json={"incarnation": "a"})
    return error(await staging)[1]


async def another_learner_comes(http: httpx.AsyncClient, staging: asyncio.Task[httpx.Response]) -> str:
    await open_group(http, "b")
    return error(await staging)[1]


ENDS = [the_learner_closes, another_learner_comes]


@pytest.mark.parametrize("end", ENDS)
def test_weights_that_never_arrive_whole_change_nothing(end: Callable[..., Any]) -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        engine.replies["sync_poll"] = arriving
        staging = asyncio.create_task(http.post("/stage_weights/", json=stage()))
        await until(lambda: "sync_poll" in engine.called())
        assert await end(http, staging) == "CommunicatorError"
        assert (service.gate.state, await answer(http), "sync_leave" in engine.called()) == ("serving", 0, True)
        del engine.replies["sync_poll"]
        await open_group(http, "c")
        assert (await push(http, update("c"))).status_code == 200
        assert await answer(http) == 1

    serve(check)


def test_staging_that_fails_leaves_the_old_weights_serving() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        engine.replies["sync_poll"] = fails
        assert error(await http.post("/stage_weights/", json=stage())) == (500, "DigestError")
        assert engine.called()[-1] == "sync_leave"
        assert (service.gate.state, await answer(http)) == ("serving", 0)
        del engine.replies["sync_poll"]
        refused = await push(http, update(staged=True))
        assert (*error(refused), refused.json()["found"]) == (409, "SyncError", "nothing")
        assert (service.gate.state, await answer(http)) == ("serving", 0)
        await open_group(http, "b")
        assert (await http.post("/stage_weights/", json=stage("b"))).status_code == 200
        assert (await push(http, update("b", staged=True))).status_code == 200

    serve(check)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"ver": 2}, (409, "SyncError")),
        ({"mode": "adapter"}, (409, "SyncError")),
        ({"buckets": [{"tensors": SPECS, "num_bytes": 32}]}, (400, "RequestError")),
        ({"base_of_adapter": True, "canary": []}, (400, "RequestError")),
    ],
)
def test_an_update_of_other_weights_than_the_staged_ones_is_refused(
    wrong: dict[str, Any], status: tuple[int, str]
) -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        assert (await http.post("/stage_weights/", json=stage())).status_code == 200
        assert error(await push(http, update(staged=True, **wrong))) == status
        assert (service.gate.state, await answer(http), "sync_load" in engine.called()) == ("serving", 0, False)

    serve(check, enable_lora=True)


def test_staged_weights_count_once_and_belong_to_their_group() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        assert (await http.post("/stage_weights/", json=stage())).status_code == 200
        assert (await push(http, update())).status_code == 200  # the same version, received again
        assert error(await push(http, update(ver=2, staged=True))) == (409, "SyncError")
        assert (await http.post("/stage_weights/", json=stage(ver=2))).status_code == 200
        await open_group(http, "b")
        assert "rollout_staged_bytes 0.0" in (await http.get("/metrics/")).text
        assert error(await push(http, update("b", 2, staged=True))) == (409, "SyncError")
        assert error(await http.post("/stage_weights/", json=stage("a", 2))) == (409, "SyncError")
        assert error(await http.post("/stage_weights/", json=stage("b", 1))) == (409, "SyncError")
        assert await answer(http) == 1

    serve(check)


def test_a_poisoned_server_has_nothing_to_serve_meanwhile() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        engine.replies["sync_poll"] = fails
        await push(http, update())
        del engine.replies["sync_poll"]
        await open_group(http, "b")
        refused = await http.post("/stage_weights/", json=stage("b"))
        assert (*error(refused), "sync_stage" in engine.called()) == (409, "SyncError", False)
        assert (await push(http, update("b"))).status_code == 200

    serve(check)


def test_a_load_of_staged_weights_that_fails_poisons() -> None:
    """They were being written when it failed."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        assert (await http.post("/stage_weights/", json=stage())).status_code == 200
        engine.replies["sync_poll"] = fails
        assert error(await push(http, update(staged=True))) == (500, "DigestError")
        assert service.gate.state == "poisoned"

    serve(check)


# ---- a worker ------------------------------------------------------------------------------------------------------


class Worker(SyncWorker):
    device, rank = torch.device("cpu"), 0
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0, world_size=1))

    def __init__(self) -> None:
        self.loads: list[RememberingLoad] = []

    def _load(self, mode: str) -> RememberingLoad:
        self.loads.append(RememberingLoad())
        return self.loads[-1]


class Pair:
    """A worker and a learner that have met."""

    def __init__(self) -> None:
        self.worker, port = Worker(), free_port()
        secret = hashlib.sha256(b"a").hexdigest()
        call = InitCommunicatorCall(
            incarnation="a", secret=secret, group_port=port, world_size=2, backend="tcp", timeout_s=20.0
        )
        self.said(self.worker.sync_join(call.model_dump_json(), "127.0.0.1"))
        joining = start_join("tcp", "127.0.0.1", port, 1, 2, 20.0, secret=bytes.fromhex(secret))
        wait_until(lambda: self.said(self.worker.sync_poll_join(0.05)).done)
        self.learner: Communicator = joining.result()
        self._key = seal_key(bytes.fromhex(secret))

    @staticmethod
    def said(reply: str) -> WorkerReply:
        return WorkerReply.model_validate_json(reply)

    def stage(self, ver: int, place: str = "device") -> WorkerReply:
        call = StageWeightsCall(incarnation="a", ver=ver, place=place, buckets=[], timeout_s=5.0)  # type: ignore[arg-type]
        return self.said(self.worker.sync_stage(call.model_dump_json(), BUCKETS_TYPE.dump_json(BUCKETS).decode()))

    def send(self, ver: int, tensors: dict[str, torch.Tensor], *, flip: bool = False) -> WorkerReply:
        for index, specs in enumerate(PLAN):
            buffer = pack(specs, tensors, "cpu")
            seal(buffer, key=self._key, ver=ver, index=index)
            buffer[3] ^= flip
            self.learner.start_broadcast(buffer, src=1)
        replies: list[WorkerReply] = []

        def ended() -> bool:
            replies.append(self.said(self.worker.sync_poll(0.0)))
            return replies[-1].done or replies[-1].error is not None

        wait_until(ended)
        return replies[-1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.worker.sync_leave("the end")
    pair.learner.close()


def buffers_of(worker: Worker) -> list[int]:
    assert worker._sync_staging is not None
    return [buffer.data_ptr() for buffer in worker._sync_staging._buffers]


def test_the_model_is_first_touched_by_the_load(pair: Pair) -> None:
    """And gets every bit, in the same memory update after update."""
    worker, places = pair.worker, []
    for ver in (1, 2):
        tensors = {name: tensor + ver for name, tensor in TENSORS.items()}
        assert pair.stage(ver).error is None
        reply = pair.send(ver, tensors)
        assert (reply.error, reply.num_tensors, len(worker.loads)) == (None, len(TENSORS), ver - 1)
        pair.said(worker.sync_load("full"))
        assert not pair.said(worker.sync_poll(-1.0)).done, "a bucket at a time, so that nobody waits long"
        loaded = pair.said(worker.sync_poll(5.0))
        assert (loaded.done, loaded.num_tensors, loaded.weights) == (True, len(TENSORS), reply.weights)
        assert all(torch.equal(worker.loads[-1].loaded[name], tensor) for name, tensor in tensors.items())
        places.append(buffers_of(worker))
    assert places[0] == places[1]
    worker.sync_leave("the end")
    assert worker._sync_staging is None


def test_nothing_is_loaded_that_was_not_staged_whole(pair: Pair) -> None:
    worker = pair.worker
    for prepare in (lambda: None, lambda: pair.stage(1), lambda: pair.send(1, TENSORS, flip=True)):
        prepare()
        error = pair.said(worker.sync_load("full")).error
        assert error is not None
        assert error.what == "no staged weights are kept"
    assert worker.loads == []


def test_what_does_not_fit_is_refused_with_the_figures(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first byte, and with the way out."""
    monkeypatch.setattr(staging_module, "_available_bytes", lambda: staging_module.SPARE_BYTES + 2000)
    reply = pair.stage(1)
    assert reply.error is not None
    assert reply.error.error == "StagingError"
    assert "0.00 GB" in reply.error.found
    assert "sync.staging: none" in reply.error.remedy
    assert pair.worker._sync_staging is None


def test_memory_is_taken_once_for_as_many_bytes_as_travel() -> None:
    staging = Staging(BUCKETS, "host", torch.device("cpu"))
    assert sum(staging.sizes) == sum(bucket.num_bytes + SEAL_BYTES for bucket in BUCKETS)
    assert sum(buffer.nbytes for buffer in staging._buffers) == sum(staging.sizes)
    assert staging.begin(BUCKETS, "host")
    assert not staging.begin(BUCKETS[:1], "host")


def test_memory_that_the_device_does_not_give_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.\nmore")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(StagingError, match="Tried to allocate") as caught:
        Staging(BUCKETS, "device", torch.device("cpu"))
    assert "\n" not in caught.value.found


def test_room_on_a_gpu_is_what_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch holds unused counts as free, but for the engine's largest batch."""
    spare, device = staging_module.SPARE_BYTES, torch.device("cuda:0")
    for name, value in (("mem_get_info", (10 << 30, 80 << 30)), ("memory_reserved", 50 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 48 << 30)
    room = [staging_module._room(device, activations)[0] + spare for activations in (None, 1 << 30, 5 << 30)]
    assert room == [10 << 30, 10 << 30, 7 << 30]
    with pytest.raises(StagingError, match=r"sync\.staging: host") as caught:
        staging_module._check_fits(8_900_000_000, device, 5 << 30)
    assert "8.90 GB of weights, and room for 7.25 GB on cuda:0, beside 5.37 GB for activations" in caught.value.found
