"""What vLLM does at the start of a colocated engine, and need not do: the learner's process has it, or will have it.

In: vLLM, before its engine is made. Out: it starts without reading weights that the first sync overwrites
(`unread_weights`), reads a tokenizer once (`sharing_tokenizers`), starts no process to look at the model's class
(`inspecting_here`), and does not look for garbage in what the learner has made (`learner_set_aside`).

Invariants: parameters are zero until the first sync. Memory that was only taken may hold NaNs, which would stay in the
KV cache after the engine's warm-up. Buffers stay as the model made them. Nothing generates before a sync has written
every parameter: `WeightLoad.finish` counts them, and `ColocatedEngine.ver` is None until then. Where another version of
vLLM has none of what is changed here, its start only takes longer.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

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
            """Nothing is needed of the folder."""

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            for parameter in model.parameters():
                parameter.zero_()

    return LOAD_FORMAT


@contextmanager
def sharing_tokenizers(folder: str) -> Iterator[None]:
    """Let vLLM read the tokenizer of the model in `folder` once while its engine starts in this thread, and copy it
    less, from then on. A tokenizer takes a third of a second to read if the vocabulary is large, and a quarter to copy
    (152,000 tokens).

    transformers reads a tokenizer for every processor that it makes. vLLM makes up to four, and passes its own
    tokenizer on to those that it keeps; transformers then puts it in the place of the one that it has read, and has
    copied it deeply several times in between. Threads may share vLLM's thread-safe tokenizer, because each call takes a
    tokenizer of its own from a pool. vLLM makes that pool from plain tokenizers, which are copied as before.
    """
    from vllm.tokenizers import hf

    # Without the class (in another version) the copies only take longer.
    if pool := getattr(hf, "ThreadSafeHFTokenizerMixin", None):
        pool.__deepcopy__ = lambda tokenizer, memo: tokenizer
    read, method = AutoTokenizer.from_pretrained, AutoTokenizer.__dict__["from_pretrained"]
    thread = threading.get_ident()
    known: dict[str, Any] = {}  # by the other settings

    def read_once(path: object, *args: Any, **kwargs: Any) -> Any:
        # Another thread may read for the learner meanwhile, and must not share.
        if threading.get_ident() != thread or str(path) != folder:
            return read(path, *args, **kwargs)
        if (given := kwargs.get("tokenizer")) is not None:
            return given
        key = str(kwargs.get("subfolder") or "")
        if key not in known:
            known[key] = read(path, *args, **kwargs)
        return known[key]

    AutoTokenizer.from_pretrained = staticmethod(read_once)
    try:
        yield
    finally:
        AutoTokenizer.from_pretrained = method


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


@contextmanager
def learner_set_aside() -> Iterator[None]:
    """Take all objects that live out of Python's garbage collections, inside the context. vLLM collects garbage by
    itself again and again, as before it measures memory, and each time walks all modules and the learner's model."""
    gc.collect()  # garbage that was set aside would keep its memory
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
