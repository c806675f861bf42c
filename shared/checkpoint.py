"""A Hugging Face checkpoint: where it is, and whether learner and server have the same kind of model.

`model_folder` turns a folder or a hub name into a folder on this machine.

`signature` takes a configuration as a mapping (`config.json`, or `PretrainedConfig.to_dict()`) and gives the sizes that
determine the tensors' names and shapes. `differences` compares only what both signatures state, because versions of
transformers write different defaults. `checkpoint_digest` is the same for two folders with the same weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.errors import ConfigError


def model_folder(model: str, key: str) -> str:
    """Return the model's folder on this machine. Raises ConfigError, which names `key`, if the model is neither
    a folder nor on the hub."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # vLLM would accept a hub name, but the check that all weights have arrived reads the tensors' names from the
        # folder's files.
        return str(snapshot_download(model))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{key}: {model!r} is not available",
            found=f"no such folder; the hub gives {type(error).__name__}",
            wanted="a checkpoint's folder, or a name on the Hugging Face hub",
            remedy="check the path (relative to the working directory), or download the model first",
        ) from error


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


def signature(config: Mapping[str, object]) -> dict[str, str]:
    """Return type and sizes of the model that a `config.json` describes, as text:
    `{"model_type": "qwen3_vl", "text_config.hidden_size": "2560", ...}`."""
    found = {}
    for section in _SECTIONS:
        values = config.get(section) if section else config
        if not isinstance(values, Mapping):
            continue
        for key in _KEYS:
            if isinstance(value := values.get(key), int | str):
                found[f"{section}.{key}" if section else key] = str(value)
    return found


def differences(learner: Mapping[str, str], server: Mapping[str, str]) -> list[str]:
    """Return one phrase for each size that differs between the signatures. Sizes that only one of them states are
    skipped."""
    both = [key for key in learner if key in server]
    return [f"{key} {server[key]}, not {learner[key]}" for key in both if server[key] != learner[key]]


_PART_BYTES = 64 << 20


def checkpoint_digest(path: str) -> str:
    """Return a digest of all bytes of the weights' files. Threads read several parts at a time."""
    files = [file for kind in ("*.safetensors", "*.bin", "*.pt") for file in sorted(Path(path).glob(kind))]
    sizes = [file.stat().st_size for file in files]
    places = [(file, start) for file, size in zip(files, sizes, strict=True) for start in range(0, size, _PART_BYTES)]

    def of_part(place: tuple[Path, int]) -> bytes:
        with place[0].open("rb") as stream:
            stream.seek(place[1])
            return hashlib.blake2b(stream.read(_PART_BYTES), digest_size=16).digest()

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        # The sizes are hashed too, because the parts alone do not show where one file ends and the next begins.
        return hashlib.blake2b(str(sizes).encode() + b"".join(threads.map(of_part, places)), digest_size=16).hexdigest()
