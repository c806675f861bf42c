"""Skips steps of a colocated engine's start whose results the learner's process already has.

In: vLLM, before its engine is made. Out: the engine starts without reading weights that the first sync overwrites
(`unread_weights`), and starts no process to look at the model's class (`inspecting_here`).

Invariants: parameters are zero until the first sync. Memory that was only taken may hold NaNs, which would stay in the
KV cache after the engine's warm-up. Buffers stay as the model made them. Nothing generates before a sync has written
every parameter: `WeightLoad.finish` counts the parameters, and `ColocatedEngine.ver` is None until then. A version of
vLLM without the functions that are replaced here starts too, but more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

LOAD_FORMAT = "by_the_first_sync"


@cache
def unread_weights() -> str:
    """Register a load format with vLLM, in this process, that reads no weights; return its name. Reading 8.9 GB took
    1.4 s with the files in memory (H200)."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class Zeros(BaseModelLoader):
        def download_model(self, model_config: ModelConfig) -> None:
            """Do nothing: no file of the folder is needed."""

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            for parameter in model.parameters():
                parameter.zero_()

    return LOAD_FORMAT


@contextmanager
def inspecting_here() -> Iterator[None]:
    """Let vLLM inspect the model's class in this process, which needs the class anyway. vLLM would start another
    process to leave CUDA untouched: 15 s with empty caches (0.26, H200). Here CUDA is in use already."""
    from vllm.model_executor.models import registry

    before = getattr(registry, "_run_in_subprocess", None)
    if before is None:  # another version: the start only takes longer
        yield
        return
    registry._run_in_subprocess = lambda inspect: inspect()
    try:
        yield
    finally:
        registry._run_in_subprocess = before
