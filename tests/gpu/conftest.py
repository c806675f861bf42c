"""Tests of one GPU run beside each other (`python -m tests.gpu`), so each process has a share of its memory."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.devices import FOUND, PROCESS_SHARE


@pytest.fixture(scope="session", autouse=True)
def _a_share_of_the_memory() -> None:
    for device in range(FOUND):
        torch.cuda.set_per_process_memory_fraction(PROCESS_SHARE, device)
