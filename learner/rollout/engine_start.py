"""What vLLM does at the start of a colocated engine, and need not do: the learner's process has it, or will have it.

In: vLLM, before its engine is made. Out: it reads a tokenizer once (`sharing_tokenizers`), and starts no process to
look at the model's class (`inspecting_here`). Where another version of vLLM has none of what is changed here, its start
only takes longer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoTokenizer


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
