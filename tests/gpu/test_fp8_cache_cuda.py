"""A colocated engine on CUDA with weights and KV cache in FP8, which sleeps and wakes around each sync (R08, R09)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.policy.parallel import Ranks
from tests import fp8
from tests.fp8 import SPOILS, Spoil, World
from tests.gpu.devices import needs_fp8, needs_gpus

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_fp8()]


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[World]:
    with fp8.started(model, Ranks(device=torch.device("cuda", 0)), fp8.CACHE_TOO) as world:
        yield world


def test_syncs_are_quantised_on_the_way_and_change_the_answers(world: World) -> None:
    fp8.check_syncs(world)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_wrong_layer_is_found(world: World, spoil: Spoil) -> None:
    fp8.check_fault(world, spoil)


def test_an_adapter_lies_on_weights_in_fp8(world: World) -> None:
    fp8.check_adapters(world)


def test_scales_are_1_after_all_this(world: World) -> None:
    with world.engine.awake():
        fp8.check_cache(world)
