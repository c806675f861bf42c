"""Weights that arrive while others are served (R09, R10): the endpoints over a fake engine, and a worker over a real
pair of connections."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from rollout_server import staging as staging_module
from rollout_server.config import ServerConfig
from rollout_server.engine import WorkerReply
from rollout_server.service import RolloutService
from rollout_server.staging import Staging
from rollout_server.worker import SyncWorker
from shared.addresses import free_port
from shared.errors import DigestError, StagingError
from shared.sync.buckets import SEAL_BYTES, pack, seal, seal_key
from shared.sync.delta import encode, sealed
from shared.sync.group import Communicator, start_join
from shared.sync.host_memory import OTHERS_S, SPARE_BYTES
from shared.wire import BUCKETS as BUCKETS_TYPE
from shared.wire import Delta, InitCommunicatorCall, StageWeightsCall, UpdateWeightsCall
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
        assert min(done["load_s"], done["canary_s"]) > 0
        assert done["load_s"] + done["canary_s"] <= done["pause_s"]
        assert done["transfer_s"] == reply.json()["seconds"]
        assert await answer(http) == 1
        assert ("sync_load", "sync_start" in engine.called()) == (engine.called()[-3], False)
        text = (await http.get("/metrics/")).text
        assert "rollout_staged_bytes 32.0" in text
        assert f"rollout_sync_last_pause_seconds {done['pause_s']}" in text
        assert f"rollout_sync_last_load_seconds {done['load_s']}" in text
        assert f"rollout_sync_last_canary_seconds {done['canary_s']}" in text
        assert (await push(http, update(ver=2))).status_code == 200
        assert "rollout_staged_bytes 0.0" in (await http.get("/metrics/")).text, "all weights came otherwise"

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
    "wrong",
    [{"sizes": []}, {"sizes": [16, 16]}, {"sizes": [48]}, {"sizes": [15]}, {"mode": "adapter", "sizes": [16]}],
)
def test_changes_that_fit_no_bucket_are_refused(wrong: dict[str, Any]) -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        mode = wrong.get("mode", "full")
        call = stage(mode=mode, delta={"base": "", "sizes": wrong["sizes"]})
        assert error(await http.post("/stage_weights/", json=call)) == (400, "SyncError")
        assert ("sync_stage" in engine.called(), service.gate.state, await answer(http)) == (False, "serving", 0)

    serve(check, enable_lora=True)


def test_bytes_that_arrived_are_counted_and_so_are_deltas() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        for ver, delta in ((1, None), (2, {"base": "", "sizes": [16]})):
            staged = (await http.post("/stage_weights/", json=stage(ver=ver, delta=delta))).json()
            assert (staged["num_bytes"], staged["received_bytes"]) == (32, 16 if delta else 32)
            done = (await push(http, update(ver=ver, staged=True))).json()
            assert (done["num_bytes"], done["received_bytes"]) == (32, 16 if delta else 32)
        text = (await http.get("/metrics/")).text
        assert "rollout_sync_deltas 1.0" in text
        assert "rollout_sync_bytes 48.0" in text

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

    def stage(self, ver: int, place: str = "device", delta: Delta | None = None) -> WorkerReply:
        call = StageWeightsCall(incarnation="a", ver=ver, place=place, buckets=[], delta=delta, timeout_s=5.0)
        return self.said(self.worker.sync_stage(call.model_dump_json(), BUCKETS_TYPE.dump_json(BUCKETS).decode()))

    def send(self, ver: int, tensors: dict[str, torch.Tensor], *, flip: bool = False) -> WorkerReply:
        for index, specs in enumerate(PLAN):
            buffer = pack(specs, tensors, "cpu")
            seal(buffer, key=self._key, ver=ver, index=index)
            buffer[3] ^= flip
            self.learner.start_broadcast(buffer, src=1)
        return self.received()

    def send_changes(
        self, ver: int, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], *, flip: int | None = None
    ) -> tuple[WorkerReply, int]:
        """Stage `new` as changes of `old`. `flip`: the byte of the second bucket's changes that arrives as another."""
        outgoing, sizes = [], []
        for index, specs in enumerate(PLAN):
            before, after = (pack(specs, tensors, "cpu") for tensors in (old, new))
            seal(after, key=self._key, ver=ver, index=index)
            changes = encode(after[:-SEAL_BYTES], before[:-SEAL_BYTES])
            assert changes is not None
            sizes.append(changes.numel())
            outgoing.append(sealed(changes, after[-SEAL_BYTES:], key=self._key, ver=ver, index=index))
        if flip is not None:
            outgoing[1][flip] ^= 1
        reply = self.stage(ver, delta=Delta(base=self.kept, sizes=sizes))
        if reply.error is not None:
            return reply, sum(sizes)
        for buffer in outgoing:
            self.learner.start_broadcast(buffer, src=1)
        return self.received(), sum(sizes)

    @property
    def kept(self) -> str:
        assert self.worker._sync_staging is not None
        return self.worker._sync_staging.weights

    def received(self) -> WorkerReply:
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
    """It gets every bit, in the same memory update after update."""
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


@pytest.mark.parametrize(("mode", "keeps"), [("full", False), ("adapter", True)])
def test_full_weights_that_come_otherwise_end_the_copy(pair: Pair, mode: str, keeps: bool) -> None:
    """So does a learner send that has no copy any more: no changes of these weights will come. An adapter lies on
    them."""
    assert pair.stage(1).error is None
    assert pair.send(1, TENSORS).error is None
    pair.said(pair.worker.sync_load("full"))
    assert pair.said(pair.worker.sync_poll(5.0)).done
    call = UpdateWeightsCall.model_validate(
        {"incarnation": "a", "ver": 2, "mode": mode, "buckets": [], "timeout_s": 5.0, "canary": []}
    )
    buckets = BUCKETS_TYPE.dump_json(BUCKETS).decode()
    assert pair.said(pair.worker.sync_start(call.model_dump_json(), buckets)).error is None
    assert (pair.worker._sync_staging is not None) == keeps
    reply = pair.send(2, TENSORS)
    assert (reply.error, reply.num_tensors) == (None, len(TENSORS))


def test_nothing_is_loaded_that_was_not_staged_whole(pair: Pair) -> None:
    worker = pair.worker
    for prepare in (lambda: None, lambda: pair.stage(1), lambda: pair.send(1, TENSORS, flip=True)):
        prepare()
        error = pair.said(worker.sync_load("full")).error
        assert error is not None
        assert error.what == "no staged weights are kept"
    assert worker.loads == []


def one_changed(tensors: dict[str, torch.Tensor], at: int) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor[at] += 1.0
    return changed


def test_changes_make_the_new_weights_of_those_that_are_kept(pair: Pair) -> None:
    """Update after update, and the served model is touched by the load alone."""
    worker, tensors = pair.worker, TENSORS
    assert pair.stage(1).error is None
    first = pair.send(1, tensors)
    for ver in (2, 3):
        new = one_changed(tensors, at=7 * ver)
        reply, num_bytes = pair.send_changes(ver, tensors, new)
        assert (reply.error, reply.num_tensors, len(worker.loads)) == (None, len(TENSORS), ver - 2)
        assert num_bytes < sum(bucket.num_bytes for bucket in BUCKETS) // 10
        pair.said(worker.sync_load("full"))
        loaded = pair.said(worker.sync_poll(5.0))
        assert (loaded.done, loaded.weights == reply.weights != first.weights) == (True, True)
        assert all(torch.equal(worker.loads[-1].loaded[name], tensor) for name, tensor in new.items())
        tensors = new
    assert pair.stage(4).error is None
    whole = pair.send(4, tensors)
    assert (whole.error, whole.num_tensors) == (None, len(TENSORS))


@pytest.mark.parametrize("flip", [0, 5, 20, -33, -32, -17, -16, -1])
def test_changes_with_another_byte_load_nothing(pair: Pair, flip: int) -> None:
    """The byte may be in the table, a place, a value, or one of both seals."""
    assert pair.stage(1).error is None
    pair.send(1, TENSORS)
    reply, _ = pair.send_changes(2, TENSORS, one_changed(TENSORS, at=3), flip=flip)
    assert reply.error is not None
    assert reply.error.error == "DigestError"
    assert pair.said(pair.worker.sync_load("full")).error is not None
    assert pair.worker.loads == []


def test_changes_of_other_weights_are_refused_before_they_travel(pair: Pair) -> None:
    """The digest names other ones. If it named the wrong ones, the seal of what came out would differ."""
    assert pair.stage(1).error is None
    pair.send(1, TENSORS)
    changes = Delta(base="00" * 16, sizes=[bucket.num_bytes for bucket in BUCKETS])
    error = pair.said(
        pair.worker.sync_stage(
            StageWeightsCall(incarnation="a", ver=2, buckets=[], delta=changes, timeout_s=5.0).model_dump_json(),
            BUCKETS_TYPE.dump_json(BUCKETS).decode(),
        )
    ).error
    assert error is not None
    assert (error.error, "00" * 16 in error.wanted) == ("SyncError", True)


def test_changes_of_weights_that_were_not_kept_do_not_pass_the_seal(pair: Pair) -> None:
    assert pair.stage(1).error is None
    pair.send(1, TENSORS)
    others = one_changed(TENSORS, at=9)
    reply, _ = pair.send_changes(2, others, one_changed(others, at=3))
    assert reply.error is not None
    assert reply.error.error == "DigestError"
    assert pair.worker.loads == []


def test_changes_after_weights_that_never_arrived_whole_are_refused(pair: Pair) -> None:
    assert pair.stage(1).error is None
    kept = pair.send(1, TENSORS).weights
    assert pair.stage(2).error is None
    assert pair.send(2, TENSORS, flip=True).error is not None
    changes = Delta(base=kept, sizes=[0] * len(BUCKETS))
    error = pair.stage(3, delta=changes).error
    assert error is not None
    assert error.what.startswith("these are changes of weights")


def test_what_does_not_fit_is_refused_with_the_figures(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the first byte, and says the way out."""
    monkeypatch.setattr(staging_module, "available_bytes", lambda: SPARE_BYTES + 2000)
    reply = pair.stage(1)
    assert reply.error is not None
    assert reply.error.error == "StagingError"
    assert "0.00 GB" in reply.error.found
    assert "sync.staging: none" in reply.error.remedy
    assert pair.worker._sync_staging is None


def test_workers_of_one_host_do_not_count_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for two of three copies. Memory is taken some time after the look at what is free."""
    taken = sum(bucket.num_bytes + SEAL_BYTES for bucket in BUCKETS)
    free = [SPARE_BYTES + 2 * taken]

    def allocate(staging: Staging) -> None:
        time.sleep(0.05)
        free[0] -= taken

    monkeypatch.setattr(staging_module, "available_bytes", lambda: free[0])
    monkeypatch.setattr(Staging, "_allocate", allocate)
    together = threading.Barrier(3)

    def stage() -> str:
        together.wait(10.0)
        try:
            Staging(BUCKETS, "host", torch.device("cpu"))
        except StagingError as error:
            return error.found
        return ""

    with ThreadPoolExecutor(3) as threads:
        found = [future.result(20.0) for future in [threads.submit(stage) for _ in range(3)]]
    assert sum(one == "" for one in found) == 2
    assert free == [SPARE_BYTES]


def test_a_worker_that_waits_for_memory_does_not_count_as_stopped() -> None:
    """Where it waits for another server's worker, its own engine answers no ping and uses no CPU time."""
    assert 0.5 * ServerConfig(model="m").engine_stall_s >= OTHERS_S


def test_page_locked_memory_is_counted_as_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: each buffer takes the next power of two. Nothing was allocated when that is refused."""
    sizes = [bucket.num_bytes + SEAL_BYTES for bucket in BUCKETS]
    taken = sum(next(2**n for n in range(40) if 2**n >= size) for size in sizes)
    assert taken > sum(sizes)
    allocated: list[int] = []

    def zeros(size: int, *, dtype: torch.dtype, **where: Any) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(staging_module, "available_bytes", lambda: SPARE_BYTES + taken - 1)
    with pytest.raises(StagingError, match="room for"):
        Staging(BUCKETS, "host", torch.device("cuda:0"))
    assert allocated == []
    monkeypatch.setattr(staging_module, "available_bytes", lambda: SPARE_BYTES + taken)
    Staging(BUCKETS, "host", torch.device("cuda:0"))
    assert allocated == sizes


def test_page_locked_memory_that_came_before_a_refusal_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would keep it, on a host that is short of memory."""
    made: list[weakref.ref[torch.Tensor]] = []
    in_use: list[int] = []

    def zeros(size: int, *, dtype: torch.dtype, **where: Any) -> torch.Tensor:
        if made:
            raise RuntimeError("CUDA error: out of memory")
        buffer = torch.empty(size, dtype=dtype)
        made.append(weakref.ref(buffer))
        return buffer

    def release() -> None:
        in_use.append(sum(buffer() is not None for buffer in made))

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(staging_module, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(staging_module, "release_page_locked", release)
    with pytest.raises(StagingError, match="out of memory"):
        Staging(BUCKETS, "host", torch.device("cuda:0"))
    assert (len(made), in_use) == (1, [0])


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
    """Memory that torch holds unused counts as free, but for the engine's largest batch."""
    spare, device = SPARE_BYTES, torch.device("cuda:0")
    for name, value in (("mem_get_info", (10 << 30, 80 << 30)), ("memory_reserved", 50 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 48 << 30)
    room = [staging_module._room(device, activations)[0] + spare for activations in (None, 1 << 30, 5 << 30)]
    assert room == [10 << 30, 10 << 30, 7 << 30]
    with pytest.raises(StagingError, match=r"sync\.staging: host") as caught:
        staging_module._check_fits(8_900_000_000, device, 5 << 30)
    assert "8.90 GB for weights, and room for 7.25 GB on cuda:0, beside 5.37 GB for activations" in caught.value.found
