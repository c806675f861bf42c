"""A colocated vLLM engine on CPU with its KV cache in FP8, too: the same as `test_fp8.py` shows without (R09)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.tiny_models import build_qwen3_vl
from learner.policy.parallel import Ranks
from tests import fp8
from tests.fp8 import QuantisedSyncs, World

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM needs AVX-512 for it on CPU"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    build_qwen3_vl(folder)
    with fp8.started(folder, Ranks(), fp8.CACHE_TOO) as world:
        yield world


class TestSyncs(QuantisedSyncs): ...


def test_scales_are_1_after_all_this(world: World) -> None:
    fp8.check_cache(world)
