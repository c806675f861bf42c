"""A colocated engine on CUDA with weights and KV cache in FP8, which sleeps and wakes around each sync (R08, R09)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.policy.parallel import Ranks
from tests import fp8
from tests.fp8 import QuantisedAdapters, QuantisedSyncs, World
from tests.gpu.devices import needs_fp8, needs_gpus

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_fp8()]


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[World]:
    with fp8.started(model, Ranks(device=torch.device("cuda", 0)), fp8.CACHE_TOO) as world:
        yield world


class TestSyncs(QuantisedSyncs, QuantisedAdapters): ...


def test_scales_are_1_after_all_this(world: World) -> None:
    with world.engine.awake():
        fp8.check_cache(world)
