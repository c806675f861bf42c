"""The trained model as a generator, for as long as a `with` block lasts.

In: a transformers model as `load.py` made it, whose language model attends to packed rows only (`attention.py`). Out:
the same model, ready for `generate`: padded batches, key-value cache, no dropout, no gradients. Called by
`learner/rollout/hf.py`.

Invariant: afterwards the model is as it was, whatever happened inside: attention, every module's training mode, and the
checkpoint's generation settings. Weights, `requires_grad` and random generators are not touched at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel

from learner.policy.compiled import uncompiled


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model.generate` takes left-padded batches and decodes by what its caller says, and by nothing else."""
    settings = model.config.get_text_config()  # the vision tower's attention fits both: it brings its own lengths
    attention, defaults = settings._attn_implementation, model.generation_config
    modes = [(module, module.training) for module in model.modules()]
    try:
        settings._attn_implementation = "sdpa"
        # `generate` fills what its caller leaves open from here: a checkpoint's sampling settings, for example.
        model.generation_config = GenerationConfig()
        model.eval()  # gradient checkpointing, too, only happens in training mode
        with torch.no_grad(), uncompiled():
            yield
    finally:
        settings._attn_implementation = attention
        model.generation_config = defaults
        for module, mode in modes:
            module.training = mode
