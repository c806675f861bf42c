"""An update as a worker sees it (R09), over a real pair of connections and a load that only remembers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from rollout_server.engine import WorkerReply
from rollout_server.worker import Receiving, SyncWorker
from shared.addresses import free_port
from shared.errors import CommunicatorError, DeadlineError, DigestError
from shared.sync import buckets as weights
from shared.sync.group import Communicator, start_join
from shared.wire import BUCKETS as BUCKETS_TYPE
from shared.wire import Bucket, InitCommunicatorCall, UpdateWeightsCall
from tests.waits import wait_until


class RememberingLoad:
    runs_meanwhile = False

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.opened = self.closed = False

    def open(self) -> None:
        self.opened = True

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}

    def finish(self) -> int:
        return len(self.loaded)

    def close(self) -> None:
        self.closed = True


TENSORS = {f"t{i}": torch.full((300,), float(i)) for i in range(5)}
SPECS = [weights.spec_of(name, tensor) for name, tensor in TENSORS.items()]
PLAN = weights.plan_buckets(SPECS, 2500)
BUFFERS = [weights.pack(specs, TENSORS, "cpu") for specs in PLAN]
BUCKETS = [Bucket(tensors=specs, num_bytes=weights.num_bucket_bytes(specs)) for specs in PLAN]
KEY = weights.seal_key(b"a")
for index, buffer in enumerate(BUFFERS):
    weights.seal(buffer, key=KEY, ver=1, index=index)


@pytest.fixture
def pair() -> Iterator[tuple[Communicator, Communicator]]:
    port = free_port()
    joining = [start_join("tcp", "127.0.0.1", port, rank, 2, 10.0, secret=b"a") for rank in (0, 1)]
    worker, learner = (operation.result() for operation in joining)
    yield worker, learner
    worker.close()
    learner.close()


def update(timeout_s: float = 10.0) -> UpdateWeightsCall:
    return UpdateWeightsCall(incarnation="a", ver=1, buckets=BUCKETS, timeout_s=timeout_s)


def in_turn(learner: Communicator, buffers: Sequence[torch.Tensor]) -> threading.Thread:
    """Broadcast `buffers` one after the other."""
    thread = threading.Thread(target=lambda: [learner.broadcast(buffer, src=1) for buffer in buffers])
    thread.start()
    return thread


def test_buckets_arrive_in_order_and_are_loaded(pair: tuple[Communicator, Communicator]) -> None:
    worker, learner = pair
    assert len(PLAN) == 3
    load = RememberingLoad()
    receiving = Receiving(update(), worker, load)
    assert receiving.advance(0.01) == WorkerReply(done=False)
    sending = in_turn(learner, BUFFERS)
    while not (result := receiving.advance(0.5)).done:
        pass
    seals = b"".join(bytes(buffer[-weights.SEAL_BYTES :].tolist()) for buffer in BUFFERS)
    assert result == WorkerReply(num_tensors=5, weights=hashlib.blake2b(seals, digest_size=16).hexdigest())
    assert receiving.advance(0.0) == result
    assert list(load.loaded) == list(TENSORS)
    assert all(load.loaded[name].equal(tensor) for name, tensor in TENSORS.items())
    sending.join(1.0)
    assert not sending.is_alive()


def _flipped() -> list[torch.Tensor]:
    buffer = BUFFERS[1].clone()
    buffer[7] ^= 1
    return [BUFFERS[0], buffer, BUFFERS[2]]


def _of_an_older_update() -> list[torch.Tensor]:
    buffer = BUFFERS[1].clone()
    weights.seal(buffer, key=KEY, ver=0, index=1)
    return [BUFFERS[0], buffer, BUFFERS[2]]


def _in_another_place() -> list[torch.Tensor]:
    buffer = BUFFERS[0].clone()
    assert buffer.numel() == BUFFERS[1].numel()
    return [BUFFERS[0], buffer, BUFFERS[2]]


def _sealed_by_a_stranger() -> list[torch.Tensor]:
    buffer = _flipped()[1]
    weights.seal(buffer, key=weights.seal_key(b"of another group"), ver=1, index=1)
    return [BUFFERS[0], buffer, BUFFERS[2]]


@pytest.mark.parametrize("wrong", [_sealed_by_a_stranger, _flipped, _of_an_older_update, _in_another_place])
def test_nothing_is_loaded_whose_seal_is_wrong(
    pair: tuple[Communicator, Communicator], wrong: Callable[[], list[torch.Tensor]]
) -> None:
    worker, learner = pair
    load = RememberingLoad()
    receiving = Receiving(update(timeout_s=2.0), worker, load)
    sending = in_turn(learner, wrong()[:2])
    with pytest.raises(DigestError, match="bucket 1 of 3 arrived with other bytes"):
        receiving.advance(5.0)
    assert list(load.loaded) == ["t0", "t1"]
    receiving.close()
    assert load.closed
    sending.join(5.0)
    assert not sending.is_alive()


def test_a_learner_that_stops_ends_at_the_deadline(pair: tuple[Communicator, Communicator]) -> None:
    worker, learner = pair
    receiving = Receiving(update(timeout_s=0.3), worker, RememberingLoad())
    sending = learner.start_broadcast(BUFFERS[0], src=1)
    with pytest.raises((DeadlineError, CommunicatorError), match="broadcasting"):
        receiving.advance(10.0)
    assert sending.done(1.0)
    receiving.close()
    receiving.close()


class UnopenedLoad(RememberingLoad):
    def open(self) -> None:
        raise RuntimeError("no such layer")


def test_an_update_that_can_t_begin_leaves_the_model_whole(pair: tuple[Communicator, Communicator]) -> None:
    worker, _ = pair
    load = UnopenedLoad()
    receiving = Receiving(update(timeout_s=2.0), worker, load)
    with pytest.raises(RuntimeError, match="no such layer"):
        receiving.advance(0.0)
    receiving.close()
    assert load.closed


class Worker(SyncWorker):
    device, rank = torch.device("cpu"), 0
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0, world_size=1))

    def _load(self, mode: str) -> RememberingLoad:
        return RememberingLoad()


@pytest.mark.parametrize("silent", ["never came", "says nothing more", "in an update"])
def test_leaving_never_waits_for_a_peer_and_the_next_learner_gets_in(silent: str) -> None:
    """R16: the silent one has asked for a day, and its connection stays open."""
    worker, port = Worker(), free_port()

    def joins(incarnation: str) -> str:
        secret = hashlib.sha256(incarnation.encode()).hexdigest()
        call = InitCommunicatorCall(
            incarnation=incarnation, secret=secret, group_port=port, world_size=2, backend="tcp", timeout_s=86_400.0
        )
        assert WorkerReply.model_validate_json(worker.sync_join(call.model_dump_json(), "127.0.0.1")).error is None
        return secret

    def meets(secret: str) -> Communicator:
        joining = start_join("tcp", "127.0.0.1", port, 1, 2, 60.0, secret=bytes.fromhex(secret))
        wait_until(lambda: WorkerReply.model_validate_json(worker.sync_poll_join(0.05)).done)
        return joining.result()

    secret = joins("silent")
    learner = None if silent == "never came" else meets(secret)
    if silent == "in an update":
        call = update(timeout_s=86_400.0)
        rest = call.model_copy(update={"buckets": []}).model_dump_json()
        worker.sync_start(rest, BUCKETS_TYPE.dump_json(call.buckets).decode())
        assert not WorkerReply.model_validate_json(worker.sync_poll(0.05)).done
    worker.sync_leave("its time is over")
    meets(joins("next")).close()
    worker.sync_leave("the end")
    if learner is not None:
        learner.close()
