"""Whether two sides have the same kind of model: the sizes in a Hugging Face configuration that decide names and shapes
of the tensors.

In: a configuration as a mapping (`config.json`, or `PretrainedConfig.to_dict()`). Out: a flat signature, and the
differences between two. Only what both sides state is compared: versions of transformers write different defaults.
Called by the server for `/status/`, and by the learner and its doctor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SECTIONS = ("", "text_config", "vision_config")
_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "depth",
    "num_heads",
    "out_hidden_size",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
)


def signature(config: Mapping[str, Any]) -> dict[str, str]:
    """`{"model_type": "qwen3_vl", "text_config.hidden_size": "2560", ...}`."""
    found = {}
    for section in _SECTIONS:
        values = config.get(section) or {} if section else config
        for key in _KEYS:
            if isinstance(value := values.get(key), int | str):
                found[f"{section}.{key}" if section else key] = str(value)
    return found


def differences(learner: Mapping[str, str], server: Mapping[str, str]) -> list[str]:
    """One phrase per size that both state and that differs."""
    both = [key for key in learner if key in server]
    return [f"{key} {server[key]}, not {learner[key]}" for key in both if server[key] != learner[key]]
