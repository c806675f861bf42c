"""Page-locked memory, as torch counts it (R09)."""

from __future__ import annotations

import pytest
import torch

from shared.sync.host_memory import page_locked_bytes, release_page_locked
from tests.gpu.devices import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


def taken() -> int:
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


@pytest.mark.parametrize("num_bytes", [3 << 20, (64 << 20) + 16, 100_000_016])
def test_page_locked_memory_takes_what_is_counted_until_it_is_released(num_bytes: int) -> None:
    torch.cuda.init()
    release_page_locked()
    before = taken()
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    assert taken() - before == page_locked_bytes(num_bytes)
    del tensor
    release_page_locked()
    assert taken() == before
