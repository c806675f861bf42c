"""Rollout servers whose engine spans two GPUs: every worker gets every byte and loads its own part (R23).

With three GPUs the learner has the first one. With two it shares it with a worker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.devices import FOUND, needs_gpus
from tests.gpu.servers import answers, change, learner, load, server_on

pytestmark = [pytest.mark.gpu, needs_gpus(2)]


@pytest.mark.parametrize("how", ["tensor_parallel_size", "data_parallel_size"])
def test_servers_of_two_gpus(model: Path, tmp_path: Path, how: str) -> None:
    policy = load(model)
    devices = "1,2" if FOUND > 2 else "0,1"
    with (
        server_on(devices, model, tmp_path, **{how: 2}) as running,
        learner(running, policy, allow_shared_gpu=FOUND < 3) as (backend, sync),
    ):
        for seed in range(2):
            change(policy, seed)
            sync.sync()
            assert answers(backend)
