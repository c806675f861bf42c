"""Tests of one GPU run beside each other (`python -m tests.gpu`), so each process has a share of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.demo_model import build
from tests.gpu.devices import FOUND, PROCESS_SHARE


@pytest.fixture(scope="session", autouse=True)
def _a_share_of_the_memory() -> None:
    for device in range(FOUND):
        torch.cuda.set_per_process_memory_fraction(PROCESS_SHARE, device)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "model"
    build(path, "demo", seed=0)
    return path
