"""Real vLLM in FP8, on CPU, inside the learner's process: syncs, their canary, adapters (R08, R09)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.tiny_models import build_qwen3_vl
from learner.policy.parallel import Ranks
from tests import fp8
from tests.fp8 import QuantisedAdapters, QuantisedSyncs, World

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    build_qwen3_vl(folder)
    with fp8.started(folder, Ranks()) as world:
        yield world


class TestSyncs(QuantisedSyncs, QuantisedAdapters): ...
