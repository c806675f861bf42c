"""Skips steps of a colocated engine's start that are not needed, because the learner's process has their results.

In: vLLM, before its engine is made. Out: it starts without reading weights that the first sync overwrites
(`unread_weights`), and starts no process to look at the model's class (`inspecting_here`).

Invariants: parameters are zero until the first sync. Memory that was only taken may hold NaNs, which would stay in the
KV cache after the engine's warm-up. Buffers stay as the model made them. Nothing generates before a sync has written
every parameter: `WeightLoad.finish` counts them, and `ColocatedEngine.ver` is None until then. Where another version of
vLLM has none of what is changed here, its start only takes longer.
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
    """Make vLLM know a load format by which it reads no weights, in this process; returns its name. To read 8.9 GB took
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
    """Let vLLM look at the model's class in this process, which needs the class anyway. vLLM starts another one, so as
    not to touch CUDA: 15 s where its caches are empty (0.26, H200). Here CUDA has long begun."""
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
