"""Tests of what a process of the learner is set up with: its device, its threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.policy.parallel import init_ranks
from shared.errors import CollectiveError, ConfigError
from shared.wire import ErrorBody
from tests import ranks
from tests.waits import wait_until


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch tell of two GPUs: nothing runs there."""
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


@pytest.mark.slow
@pytest.mark.parametrize("hung", [0, 2])
def test_the_rank_that_hangs_is_named_by_those_that_wait(hung: int, tmp_path: Path) -> None:
    """R24: of three ranks one sleeps; the healthy ones name it first, and not themselves."""
    ended = ranks.launch(__name__, 3, str(hung), str(tmp_path))
    healthy = [process.stdout for rank, process in enumerate(ended) if rank != hung]
    assert len(healthy) == 2
    for said in healthy:
        assert said.startswith(f"rank {hung} did not come"), ended
        assert f"learner_rank{hung}.log" in said


def main(hung: int, folder: Path) -> None:
    """One of the ranks above. All stay until the healthy ones have said their word: the store may live in any."""
    here = init_ranks(os.environ, timeout_s=5.0)
    here.barrier()
    if here.rank != hung:
        try:
            here.barrier()
        except CollectiveError as error:
            print(error, flush=True)
        (folder / str(here.rank)).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    os._exit(0)


def one_leaves() -> None:
    """Rank 0 prints its error, as JSON, once rank 1 has gone."""
    here = init_ranks(os.environ, timeout_s=10.0)
    here.barrier()
    if here.rank == 0:
        try:
            here.barrier()
        except CollectiveError as error:
            print(ErrorBody.of(error).model_dump_json(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "one leaves":
        one_leaves()
    main(int(sys.argv[1]), Path(sys.argv[2]))
