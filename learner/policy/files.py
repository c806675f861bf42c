"""The policy's files: the trained weights in a checkpoint, and a merged model to serve.

In: a policy and a folder. Out: Hugging Face files that any program loads, or a policy with the weights of such files.
Invariant: a sharded model has the same files as a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import peft
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from learner.policy.load import Policy
from learner.policy.sharding import part_of, whole_on_host
from shared.errors import CheckpointError


def gathered_weights(policy: Policy, *, keep: bool) -> Mapping[str, torch.Tensor] | None:
    """Return a sharded model's trained tensors (all, or only the adapter), gathered in host memory on ranks with
    `keep`. None for a model that is not sharded. Collective."""
    if not policy.is_sharded:
        return None
    if policy.adapter is None:
        return whole_on_host(policy.model.state_dict(keep_vars=True), keep=keep)
    state = policy.adapter.state_dict(keep_vars=True)
    return whole_on_host({name: tensor for name, tensor in state.items() if ".lora_" in name}, keep=keep)


def save_model(policy: Policy, path: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Save the trained model as Hugging Face files (with an adapter only the adapter), with tokenizer and processor.

    `weights`: the result of `gathered_weights`."""
    if policy.adapter is not None:
        policy.adapter.save_pretrained(path, save_embedding_layers=False, state_dict=weights)
    else:
        policy.model.save_pretrained(path, state_dict=weights)
    (policy.encoder.processor or policy.tokenizer).save_pretrained(path)


def export_model(policy: Policy, path: Path, *, dtype: torch.dtype) -> None:
    """Write the merged model in `dtype`, ready to be served or fine-tuned. Training cannot be resumed from it."""
    path.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(contiguous(dict(policy.named_weights(dtype))), path)
    settings = policy.model.config.to_dict() | {
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [type(policy.model).__name__],
    }
    type(policy.model.config).from_dict(settings).save_pretrained(path)
    policy.model.generation_config.save_pretrained(path)
    (policy.encoder.processor or policy.tokenizer).save_pretrained(path)


def load_weights(path: Path, policy: Policy) -> None:
    """Load a checkpoint's weights into the policy; with an adapter, only the adapter's.

    Raises CheckpointError if they do not fit the model."""
    try:
        if policy.adapter is not None:
            own = peft.get_peft_model_state_dict(policy.adapter, save_embedding_layers=False)
            stored = peft.load_peft_weights(str(path), device="cpu")
            peft.set_peft_model_state_dict(policy.adapter, _parts(stored, own))
            return
        model = policy.model
        # The model's own configuration is used: a checkpoint of another model must not decide how much memory is
        # allocated.
        loaded, info = type(model).from_pretrained(
            path, config=model.config, dtype=model.dtype, attn_implementation="sdpa", output_loading_info=True
        )
        if foreign := sorted([*info["missing_keys"], *info["unexpected_keys"]]):
            raise ValueError(f"{len(foreign)} names differ: {foreign[:3]}")
        model.load_state_dict(_parts(loaded.state_dict(), model.state_dict()))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            "the checkpoint's weights do not fit the model",
            found=f"{path}: {(str(error) or type(error).__name__).splitlines()[0]}",
            wanted=f"weights of this {type(policy.model).__name__}{' and its adapter' if policy.adapter else ''}",
            remedy="resume with the model.path and model.lora that the checkpoint was written with",
        ) from error


def contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors detached and contiguous, as safetensors needs them."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _parts(stored: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of each stored tensor."""
    return {name: part_of(tensor, own[name]) if name in own else tensor for name, tensor in stored.items()}
