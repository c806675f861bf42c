"""Tiny models on disk, made once per test session (`bench/tiny_models.py`), and one thread to learn them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.tiny_models import build_qwen2_5_vl, build_qwen3, build_qwen3_vl


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Qwen3-VL of 0.7M parameters (bfloat16 on disk)."""
    path = tmp_path_factory.mktemp("models") / "tiny-vlm"
    build_qwen3_vl(path)
    return path


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random text-only Qwen3 with the same tokenizer, and an output head of its own (not tied)."""
    path = tmp_path_factory.mktemp("models") / "tiny-text"
    build_qwen3(path)
    return path


@pytest.fixture(scope="session")
def tiny_qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Qwen2.5-VL, the second family of models that see."""
    path = tmp_path_factory.mktemp("models") / "tiny-qwen2-5-vl"
    build_qwen2_5_vl(path)
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The models are tiny: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
