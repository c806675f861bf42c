"""FP8 rollouts: what the engine is told, and where that works (`quantization: fp8`, `kv_cache_dtype: fp8`).

Weights travel as they do without it, and vLLM's loader quantises them on the way, by its `fp8_per_channel`. Each row of
a linear layer of the language model becomes float8_e4m3fn with a scale of its own, and so does each token's input while
the model runs. Rows know nothing of each other, so a layer that vLLM fuses (q, k and v) is quantised like its parts.
The vision tower, embeddings, norms and the output head stay as they are. `shared/sync/fp8.py` has the values.

The KV cache has a key of its own. vLLM then keeps keys and values as float8_e4m3fn with a scale of 1.0, and its
FlashAttention 3 also takes the queries so. Weights have no part in that: a sync changes nothing but what is cached.

Imports no torch, so a check can use it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Protocol

from shared.errors import ConfigError
from shared.families import TESTED
from shared.reading import json_in

Quantization = Literal["none", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]  # vLLM's names; auto: as the engine computes
_OFF = {"quantization": "none", "kv_cache_dtype": "auto"}  # keys of both configurations, and their values without FP8
LEAST_CAPABILITY = (8, 9)
_QUANTISED = re.compile(r"(^|\.)layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj$")
_KEPT = "re:.*visual.*"  # vLLM's name of the vision tower, in every family that docs/models.md lists


class EngineKeys(Protocol):
    """The server's configuration, or the learner's section `vllm`."""

    @property
    def quantization(self) -> Quantization: ...
    @property
    def kv_cache_dtype(self) -> KvCacheDtype: ...


def keys_in_fp8(keys: EngineKeys) -> list[str]:
    """Return the names of the keys that ask for FP8."""
    values = {"quantization": keys.quantization, "kv_cache_dtype": keys.kv_cache_dtype}
    return [name for name, value in values.items() if value == "fp8"]


def vllm_arguments(keys: EngineKeys) -> dict[str, Any]:
    """Return further arguments of vLLM's `EngineArgs`."""
    arguments: dict[str, Any] = {}
    if keys.quantization == "fp8":
        arguments |= {"quantization": "fp8_per_channel", "quantization_config": {"ignore": [_KEPT]}}
    if keys.kv_cache_dtype == "fp8":
        arguments |= {"kv_cache_dtype": "fp8"}
    return arguments


def without_fp8(key: str) -> str:
    """Return `key` with the value that it has without FP8, as a remedy says it. `key` may have a section before it."""
    return f"{key}: {_OFF[key.rpartition('.')[2]]}"


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
        remedy=f"set {without_fp8(key)}",
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
