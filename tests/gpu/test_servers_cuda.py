"""Two rollout servers on CUDA, each on a GPU of its own or both on one (R09). With two GPUs the learner shares one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.devices import FOUND, OTHER, needs_gpus
from tests.gpu.servers import answers, change, learner, load, server_on
from tests.servers import RunningServer

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
THIRD = "2" if FOUND > 2 else "0"  # differs from the first server's


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_on(str(OTHER), model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.parametrize("device", [str(OTHER), pytest.param(THIRD, marks=needs_gpus(2), id="another")])
def test_two_servers_at_once(
    server: RunningServer, model: Path, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are in one group if each has a GPU of its own, in two if they share one; both serve every update."""
    policy = load(model)
    shared = FOUND < 2 or device == "0"
    with (
        server_on(device, model, tmp_path) as second,
        learner([server, second], policy, allow_shared_gpu=shared) as (backend, sync),
    ):
        caplog.set_level("INFO", "learner.sync")
        said = []
        for seed in range(2):
            change(policy, seed)
            sync.sync()
            said.append(answers(backend))
        assert said[0] != said[1]
        one, two = server.base_url, second.base_url
        assert f"joined {[one, two] if device == str(OTHER) else [f'{one}, {two}']}" in caplog.text
