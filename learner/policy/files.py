"""The policy's files: the trained weights in a checkpoint, and a merged model to serve.

In: a policy and a folder. Out: files in Hugging Face's format, which other programs load too, or a policy with the
weights of such files. Invariant: a sharded model writes the same files as one that is not sharded.
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
    """Return a sharded model's tensors for `save_model` by name, in host memory: the adapter's tensors if there is an
    adapter, else all. A rank without `keep` takes part and returns {}. None for a model that is not sharded.
    Collective."""
    if not policy.is_sharded:
        return None
    if policy.adapter is None:
        return whole_on_host(policy.model.state_dict(keep_vars=True), keep=keep)
    state = policy.adapter.state_dict(keep_vars=True)
    return whole_on_host({name: tensor for name, tensor in state.items() if ".lora_" in name}, keep=keep)


def save_model(policy: Policy, path: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Save the trained model, tokenizer and processor as Hugging Face files. With an adapter only the adapter's weights
    are saved.

    `weights`: the result of `gathered_weights`."""
    if policy.adapter is not None:
        policy.adapter.save_pretrained(path, save_embedding_layers=False, state_dict=weights)
    else:
        policy.model.save_pretrained(path, state_dict=weights)
    (policy.encoder.processor or policy.tokenizer).save_pretrained(path)


def export_model(policy: Policy, path: Path, *, dtype: torch.dtype) -> None:
    """Write the model with its adapter merged, in `dtype`, for serving or as the start of another training. The run
    cannot be resumed from these files."""
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
    """Load the weights that `save_model` wrote at `path` into the policy. With an adapter only its weights are loaded.

    Raises CheckpointError if the weights do not fit the model."""
    try:
        if policy.adapter is not None:
            own = peft.get_peft_model_state_dict(policy.adapter, save_embedding_layers=False)
            stored = peft.load_peft_weights(str(path), device="cpu")
            peft.set_peft_model_state_dict(policy.adapter, _parts(stored, own))
            return
        model = policy.model
        # The checkpoint is read with the configuration of the running model. With the configuration of a wrong
        # checkpoint, the model could be larger than the memory.
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
    """Return the tensors detached and contiguous, because safetensors writes no others."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _parts(stored: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the stored tensors, each cut to this rank's part if the model's tensor `own` is sharded."""
    return {name: part_of(tensor, own[name]) if name in own else tensor for name, tensor in stored.items()}
