"""Two ranks of a group on one GPU: refused, unless it is asked for."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.addresses import free_port
from shared.errors import CommunicatorError, DeadlineError
from shared.sync import group
from shared.sync.meeting import Seat
from tests.waits import wait_until

GPUS = [b"GPU-a", b"GPU-b", b"GPU-a"]


def test_the_refusal_names_the_key() -> None:
    with pytest.raises(CommunicatorError) as raised:
        group._refuse_shared_gpus(GPUS)
    assert group.SHARED_GPU_KEY in str(raised.value)
    assert "GPU-a" in str(raised.value)
    group._refuse_shared_gpus(GPUS[:2])


def test_each_process_passes_for_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "")  # set so that it is restored
    monkeypatch.delenv("NCCL_HOSTID")
    group._tell_apart()
    assert str(os.getpid()) in os.environ["NCCL_HOSTID"]
    own = os.environ["NCCL_HOSTID"]
    monkeypatch.setenv("NCCL_HOSTID", f"{group._HOST_ID}here-0")  # the parent process's
    group._tell_apart()
    assert os.environ["NCCL_HOSTID"] == own
    monkeypatch.setenv("NCCL_HOSTID", "of the user")
    group._tell_apart()
    assert os.environ["NCCL_HOSTID"] == "of the user"


class UniqueId(ctypes.Structure):
    """NCCL's."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def introduced(monkeypatch: pytest.MonkeyPatch, gpus: list[str], *, allow_shared_gpu: bool = False) -> list[Any]:
    """Return what each rank, whose GPU is named here, gets for rank 0's id; or its error."""
    monkeypatch.setitem(sys.modules, "vllm.distributed.utils", SimpleNamespace(StatelessProcessGroup=object))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[device.index]))
    port = free_port()

    def one(rank: int) -> Any:
        device = torch.device("cuda", rank)
        seat = Seat(
            host="127.0.0.1", port=port, rank=rank, world_size=len(gpus), timeout_s=20.0, device=device, secret=b"a"
        )
        own = UniqueId((ctypes.c_byte * 128)(*([7, *range(1, 127), 9] if rank == 0 else [])))
        introduction = group._introduction(seat, threading.Event(), allow_shared_gpu)
        assert (introduction.rank, introduction.world_size) == (rank, len(gpus))
        try:
            return bytes(introduction.broadcast_obj(own, 0))
        except (CommunicatorError, DeadlineError) as error:
            return error

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(one, range(len(gpus))))


def test_every_rank_gets_the_unique_id_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels at the meeting, as bytes: nothing is unpickled."""
    monkeypatch.setattr(group, "_tell_apart", lambda: pytest.fail("each has a GPU of its own"))
    assert introduced(monkeypatch, ["a" * 40, "b" * 40, "c"]) == [bytes([7, *range(1, 127), 9])] * 3


def test_ranks_on_one_gpu_learn_it_when_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[None]()
    monkeypatch.setattr(group, "_tell_apart", lambda: told.append(None))
    for error in introduced(monkeypatch, ["a", "a"]):
        assert isinstance(error, CommunicatorError)
        assert "one GPU" in error.what
    assert not told
    found = introduced(monkeypatch, ["a", "b", "a"], allow_shared_gpu=True)
    assert found == [bytes([7, *range(1, 127), 9])] * 3
    assert len(told) == 2, "those that share one"


def test_leaving_a_group_waits_for_nobody_until_the_process_ends() -> None:
    release, ended = threading.Event(), threading.Event()

    def leave() -> None:
        release.wait(20)
        ended.set()
        raise RuntimeError("the peer is gone")

    group._in_background(leave)
    (thread,) = [one for one in threading.enumerate() if one.name == "leaving a group"]
    assert thread in group._leaving
    assert thread.daemon
    assert not ended.is_set()
    threading.Timer(0.2, release.set).start()
    group._let_them_leave()
    assert ended.is_set(), "a thread inside NCCL at the end would abort the process"
    wait_until(lambda: not thread.is_alive())
    group._in_background(lambda: None)
    assert thread not in group._leaving, "those that have left are forgotten"


def test_a_bucket_that_nobody_keeps_stays_until_the_device_has_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sends on a stream of its own: memory that was freed before would go to the next bucket."""
    sent = threading.Event()

    class Event:
        def record(self, stream: object) -> None: ...

        def synchronize(self) -> None:
            assert sent.wait(20)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    communicator = object.__new__(group._Nccl)
    communicator.device = torch.device("cpu")
    communicator._stream = SimpleNamespace(wait_event=lambda event: None)  # type: ignore[assignment]
    communicator._nccl = SimpleNamespace(broadcast=lambda tensor, src, stream: None)  # type: ignore[assignment]
    bucket = torch.zeros(8)
    memory = weakref.ref(bucket)
    finish = communicator._prepare(bucket, src=1, timeout_s=5.0)()
    del bucket
    assert memory() is not None
    sent.set()
    finish()
    del finish
    assert memory() is None
