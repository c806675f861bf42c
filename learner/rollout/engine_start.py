"""Makes the start of a colocated engine faster, and restores what vLLM changes in the learner's process.

In: vLLM, before its engine is made. Out: an engine that starts faster for two reasons. The engine does not read the
checkpoint's weights, because the first sync overwrites them (`unread_weights`). The engine starts no process to inspect
the model's class (`inspecting_here`).

Invariants: parameters are zero until the first sync, not uninitialised. Buffers keep the values that the model gave
them. No answer is generated before a sync has written every parameter: `WeightLoad.finish` counts the parameters, and
`ColocatedEngine.ver` is None until then. If a version of vLLM lacks the functions that are replaced here, the engine
starts too, but more slowly.
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
# vLLM sets these variables for the whole process. TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR then name folders of
# vLLM's compiled model, which differ for each engine's settings.
COMPILER_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")


@cache
def unread_weights() -> str:
    """Register a load format with vLLM in this process, and return the format's name. A load in this format reads no
    weights and sets all parameters to zero. Reading 8.9 GB takes 1.4 s with the files in memory (H200)."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class Zeros(BaseModelLoader):
        def download_model(self, model_config: ModelConfig) -> None:
            """Do nothing: no weights are read."""

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            for parameter in model.parameters():
                # Unset memory may hold NaNs, which the engine's warm-up would leave in the KV cache.
                parameter.zero_()

    return LOAD_FORMAT


@contextmanager
def inspecting_here() -> Iterator[None]:
    """Let vLLM inspect the model's class in this process inside the `with` block. By default vLLM inspects the class in
    another process, so that CUDA is not initialised in this process. The other process takes 15 s with empty caches
    (vLLM 0.26, H200), and in this process CUDA is in use already."""
    from vllm.model_executor.models import registry

    before = getattr(registry, "_run_in_subprocess", None)
    if before is None:  # another version of vLLM, which then starts more slowly
        yield
        return
    registry._run_in_subprocess = lambda inspect: inspect()
    try:
        yield
    finally:
        registry._run_in_subprocess = before


@contextmanager
def keeping_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch after the `with` block. vLLM seeds all these generators
    when it starts, and may later use torch's generator."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def keeping_compiler_variables() -> Iterator[None]:
    """Restore COMPILER_VARIABLES after the `with` block. With vLLM's values the learner's compiled layers would be
    stored in the folder of vLLM's model, and a run with other engine settings would compile them again.

    Triton's kernels are copied from vLLM's folder to this process's folder."""
    before = {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    try:
        yield
    finally:
        # vLLM sets its own folder for kernels, but only when it compiles its model. A later run finds the model
        # compiled, and looks for other kernels in the run's folder. Without a copy the later run would compile these
        # kernels again, which takes 11 s.
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
    """Copy the Triton kernels (one folder each) that `source` has and `folder` lacks. Other processes may read and
    write `folder` at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for kernel in source.iterdir():
            if not (folder / kernel.name).exists():
                shutil.copytree(kernel, Path(scratch) / kernel.name)
                with suppress(OSError):  # this fails if another process has copied the kernel meanwhile.
                    # A rename shows other processes the whole kernel at once.
                    (Path(scratch) / kernel.name).rename(folder / kernel.name)


@contextmanager
def all_told_by(name: str) -> Iterator[None]:
    """Log the messages of level INFO of the library `name` inside the `with` block. Only vLLM's log has the times of
    loading, compiling and capturing graphs."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
