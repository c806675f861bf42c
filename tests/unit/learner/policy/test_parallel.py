"""What a process of the learner is set up with: its device, its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from learner.policy.parallel import init_ranks
from shared.errors import ConfigError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torch tells of them: nothing runs there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_learner_alone_on_a_gpu_has_one_thread_as_one_of_several_has(two_gpus: None) -> None:
    assert str(init_ranks({"LOCAL_RANK": "1"}, timeout_s=1.0).device) == "cuda:1"
    assert torch.get_num_threads() == 1


def test_threads_that_the_user_asked_for_stay(two_gpus: None) -> None:
    init_ranks({"OMP_NUM_THREADS": "2"}, timeout_s=1.0)
    assert torch.get_num_threads() == 2


def test_more_processes_than_gpus_are_told(two_gpus: None) -> None:
    with pytest.raises(ConfigError, match="local rank 2, 2 visible GPUs"):
        init_ranks({"LOCAL_RANK": "2", "RANK": "2", "WORLD_SIZE": "3"}, timeout_s=1.0)
