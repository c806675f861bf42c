"""The start of a colocated engine: skips steps whose results the learner's process already has, and restores what vLLM
changes in the process.

In: vLLM, before its engine is made. Out: the engine starts without reading weights that the first sync overwrites
(`unread_weights`), and starts no process to look at the model's class (`inspecting_here`).

Invariants: parameters are zero until the first sync. Memory that was only taken may hold NaNs, which would stay in the
KV cache after the engine's warm-up. Buffers stay as the model made them. Nothing generates before a sync has written
every parameter: `WeightLoad.finish` counts the parameters, and `ColocatedEngine.ver` is None until then. A version of
vLLM without the functions that are replaced here starts too, but more slowly.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

LOAD_FORMAT = "by_the_first_sync"
# vLLM sets these variables for the whole process, to a folder of its compiled model, named after the engine's settings.
COMPILER_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")


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


@contextmanager
def keeping_random_state(device: torch.device) -> Iterator[None]:
    """Restore every random generator: vLLM seeds all of them at its start, and sometimes draws from torch's."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def keeping_compiler_variables() -> Iterator[None]:
    """Restore COMPILER_VARIABLES. Otherwise the learner's compiled layers would go to the folder of vLLM's model, and a
    run with other settings of the engine would compile them again.

    vLLM sets Triton's folder only when it compiles its model. A run that finds the model compiled looks for the other
    kernels in this process's folder, so they are copied there: to compile them again took 11 s."""
    before = {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    try:
        yield
    finally:
        own, vllm = before["TRITON_CACHE_DIR"], os.environ.get("TRITON_CACHE_DIR")
        if own and vllm and own != vllm:
            with suppress(OSError):  # without the copy, the next run compiles the kernels
                _copy_kernels(Path(vllm), Path(own))
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _copy_kernels(source: Path, folder: Path) -> None:
    """Copy Triton's kernels, a folder each, that `folder` lacks. Other processes may read and add meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for kernel in source.iterdir():
            if not (folder / kernel.name).exists():
                shutil.copytree(kernel, Path(scratch) / kernel.name)
                with suppress(OSError):  # another process has copied this kernel
                    (Path(scratch) / kernel.name).rename(folder / kernel.name)


@contextmanager
def all_told_by(name: str) -> Iterator[None]:
    """Log all messages of the library `name` inside this block, because only vLLM's log has its times of loading,
    compiling and capturing."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
