"""Two ranks of a group on one GPU: refused, unless it is asked for."""

from __future__ import annotations

import os

import pytest

from shared.errors import CommunicatorError
from shared.sync import group

GPUS = [b"GPU-a", b"GPU-b", b"GPU-a"]


def test_the_refusal_names_the_key() -> None:
    with pytest.raises(CommunicatorError) as raised:
        group._refuse_shared_gpus(GPUS)
    assert group.SHARED_GPU_KEY in str(raised.value)
    assert "GPU-a" in str(raised.value)
    group._refuse_shared_gpus(GPUS[:2])


def test_each_process_passes_for_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "")  # so that it is restored
    monkeypatch.delenv("NCCL_HOSTID")
    group._tell_apart()
    assert str(os.getpid()) in os.environ["NCCL_HOSTID"]
    own = os.environ["NCCL_HOSTID"]
    monkeypatch.setenv("NCCL_HOSTID", f"{group._HOST_ID}here-0")  # of the parent process
    group._tell_apart()
    assert os.environ["NCCL_HOSTID"] == own
    monkeypatch.setenv("NCCL_HOSTID", "of the user")
    group._tell_apart()
    assert os.environ["NCCL_HOSTID"] == "of the user"
