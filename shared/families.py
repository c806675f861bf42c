"""Model families that learner and server agree on, and why other families are refused.

In: a checkpoint's `config.json`. Out: nothing, or a ConfigError. A family is the value of `model_type`. The families in
`TESTED` were tried with real vLLM: both sides gave the same prompt token ids, and after a weight sync the same
log-probabilities (`bench.families`, `tests/integration/test_backends.py`). Imports neither torch nor transformers, so
checks stay fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError
from shared.reading import json_in

TESTED: Mapping[str, str] = {
    "qwen3_vl": "images and text",
    "qwen2_5_vl": "images and text",
    "qwen2_vl": "images and text",
    "qwen3": "text",
    "qwen2": "text",
    "llama": "text",
}

_NO_GRID = "its processor gives no image_grid_thw, which packed rows are made from"
_NO_GRID_MODELS = (
    "aya_vision",
    "fuyu",
    "gemma3",
    "gemma4",
    "idefics2",
    "idefics3",
    "internvl",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "mllama",
    "paligemma",
    "pixtral",
    "smolvlm",
)
_SOFT_CAPS = "it caps its logits or its attention, which the packed loss does not do"
KNOWN_NOT_TO_WORK: Mapping[str, str] = {
    **dict.fromkeys(_NO_GRID_MODELS, _NO_GRID),
    **dict.fromkeys(("gemma2", "cohere", "cohere2", "granite"), _SOFT_CAPS),
    "gpt_oss": "its attention has sinks, which packed rows do not have",
}


def check_family(config: Mapping[str, object], *, key: str, allow_untested: bool) -> None:
    """Check the family of a model. `key` is the model's key in the configuration. Raises ConfigError for a family that
    is known not to work, and without `allow_untested` for an untested family."""
    family = str(config.get("model_type", ""))
    why = KNOWN_NOT_TO_WORK.get(family)
    if family in TESTED or (why is None and allow_untested):
        return
    remedy = "choose a model of one of these families (docs/models.md)"
    if why is None:
        remedy += ", or set allow_untested_family: true beside it and watch the canary"
    raise ConfigError(
        f"{key}: this family of models {'does not work' if why else 'is not tested'}",
        found=f"model_type {family!r}" + (f": {why}" if why else ""),
        wanted=f"one of {', '.join(TESTED)}",
        remedy=remedy,
    )


_MODELS_OWN = ("config.json", "adapter_config.json")


def check_path(path: str, *, key: str) -> None:
    """Raises ConfigError for a folder without a model, and for a missing folder whose path cannot be a hub name
    either."""
    if Path(path).is_dir():
        _require_model(Path(path), key)
        return
    # Hub names are `name` or `owner/name`, so any other text can only be a path.
    if not (path.startswith(("/", "./", "../", "~")) or path.count("/") > 1):
        return
    found = "a file" if Path(path).is_file() else "no such folder"
    remedy = "correct the path; relative ones start at the working directory"
    raise ConfigError(
        f"{key}: there is no model",
        found=f"{path} ({found})",
        wanted="a checkpoint's folder, or a name on the Hugging Face hub",
        remedy=f"{remedy}, and ~ is not expanded" if path.startswith("~") else remedy,
    )


def _require_model(folder: Path, key: str) -> None:
    if any((folder / name).is_file() for name in _MODELS_OWN):
        return
    inside = sorted(path.parent.name for path in folder.glob("*/*config.json") if path.name in _MODELS_OWN)
    raise ConfigError(
        f"{key}: there is no model",
        found=f"{folder} (a folder without config.json)",
        wanted="a checkpoint's folder, or a name on the Hugging Face hub",
        remedy=f"name one inside it: {', '.join(inside[:5])}" if inside else "correct the path",
    )


def check_folder(path: str, *, key: str, allow_untested: bool) -> None:
    """Apply `check_path` and `check_family` to a checkpoint's folder, or to an adapter's base model. A hub name is not
    looked up. Raises ConfigError."""
    check_path(path, key=key)
    adapter = _read(Path(path) / "adapter_config.json")
    base = str(adapter.get("base_model_name_or_path", "")) if adapter else path
    config = _read(Path(base) / "config.json")
    if config is not None:
        check_family(config, key=key, allow_untested=allow_untested)


def text_only(path: str) -> str:
    """Return the family of the model in a folder, or of an adapter's base, if it takes no images. Return "" for other
    models and for models that are not on this machine."""
    adapter = _read(Path(path) / "adapter_config.json")
    config = _read(Path(str(adapter.get("base_model_name_or_path", "")) if adapter else path) / "config.json")
    if config is None:
        return ""
    family = str(config.get("model_type", ""))
    sees = any(word in name for name in config for word in ("vision", "image", "visual", "mm_"))
    return family if family and (TESTED.get(family) == "text" or not (sees or family in TESTED)) else ""


def _read(path: Path) -> dict[str, object] | None:
    try:
        found = json_in(path)
    except (OSError, ValueError):  # loading the model reports the error
        return None
    return found if isinstance(found, dict) else None
