"""FP8 rollouts: what the engine is told, and where that works (`quantization: fp8`).

Weights travel as they do without it, and vLLM's loader quantises them on the way, by its `fp8_per_channel`. Each row of
a linear layer of the language model becomes float8_e4m3fn with a scale of its own, and so does each token's input while
the model runs. Rows know nothing of each other, so a layer that vLLM fuses (q, k and v) is quantised like its parts.
The vision tower, embeddings, norms and the output head stay as they are. `shared/sync/fp8.py` has the values.

Imports no torch, so a check can use it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from shared.errors import ConfigError
from shared.families import TESTED
from shared.reading import json_in

Quantization = Literal["none", "fp8"]
LEAST_CAPABILITY = (8, 9)
_QUANTISED = re.compile(r"(^|\.)layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj$")
_KEPT = "re:.*visual.*"  # vLLM's name of the vision tower, in every family that docs/models.md lists


def vllm_arguments(quantization: Quantization) -> dict[str, Any]:
    """Return further arguments of vLLM's `EngineArgs`."""
    if quantization == "none":
        return {}
    return {"quantization": "fp8_per_channel", "quantization_config": {"ignore": [_KEPT]}}


def is_quantised(name: str) -> bool:
    """True if the engine quantises the linear layer of this name in the checkpoint."""
    return "visual" not in name and _QUANTISED.search(name) is not None


def check_device(key: str, *, kind: str, capability: tuple[int, int] | None = None) -> None:
    """Check that FP8 is possible, and of use, on this device. `kind`: `cuda`, `cpu`; `capability`: the GPU's compute
    capability. Raises ConfigError if not."""
    if kind == "cuda" and capability is not None and capability >= LEAST_CAPABILITY:
        return
    found = f"compute capability {'.'.join(map(str, capability))}" if capability else f"a {kind.upper()} without a GPU"
    raise ConfigError(
        f"{key}: fp8 does not work on this device",
        found=found,
        wanted=f"a CUDA GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or more (Ada, Hopper, newer)",
        remedy=f"set {key}: none",
    )


def check_model(key: str, folder: str) -> None:
    """Check that the checkpoint in `folder` is of a family of which it is known which layers the engine quantises.
    Raises ConfigError for others, such as mixtures of experts."""
    config = json_in(Path(folder) / "config.json")
    family = str(config.get("model_type", "")) if isinstance(config, dict) else ""
    if family not in TESTED:
        raise ConfigError(
            f"{key}: fp8 is not known to work with this family of models",
            found=f"model_type {family!r}",
            wanted=f"one of {', '.join(TESTED)}",
            remedy=f"set {key}: none",
        )
