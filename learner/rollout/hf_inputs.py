"""Prompts as one left-padded batch of `generate`, and its output as answers.

In: encoded prompts; the token ids that `generate` gave. Out: the model's keyword arguments; per prompt the stop-trimmed
response and why it ended. Pure but for tensors. Called by `hf.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from learner.records import EncodedPrompt


def pad_left(
    prompts: Sequence[EncodedPrompt], *, pad_token_id: int, image_token_id: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[B, P]`; with images also the pixels of all prompts one after another, their
    grids, and where the image tokens are (from which the model makes its multimodal positions, padding left out)."""
    length = max(len(prompt.token_ids) for prompt in prompts)
    input_ids = torch.full((len(prompts), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        start = length - len(prompt.token_ids)
        input_ids[row, start:] = torch.tensor(prompt.token_ids)
        attention_mask[row, start:] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    vision = [prompt.vision for prompt in prompts if prompt.vision is not None]
    if vision:
        inputs["mm_token_type_ids"] = ((input_ids == image_token_id) & (attention_mask == 1)).int()
        inputs["pixel_values"] = torch.cat([images.pixel_values for images in vision])
        inputs["image_grid_thw"] = torch.cat([images.image_grid_thw for images in vision])
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def read_answer(token_ids: Sequence[int], stop_token_ids: Collection[int]) -> tuple[tuple[int, ...], str]:
    """A new sequence up to (without) its first stop token, and the finish reason: "stop", or "length" without one."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids), None)
    if end is None:
        return tuple(token_ids), "length"
    return tuple(token_ids[:end]), "stop"


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends an answer, as for the rollout server: the checkpoint's generation settings and the tokenizer say it."""
    listed = model.generation_config.eos_token_id
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    return tuple(sorted(ids | {tokenizer.eos_token_id}))
