"""Packages that only some runs need: which one an ImportError misses, as an error that names the line to install it."""

from __future__ import annotations

from shared.errors import ConfigError

PROJECT = "rollout-matching"

# Top-level module -> how to get it.
INSTALL = {
    "vllm": f"pip install '{PROJECT}[cuda]', or '{PROJECT}[cpu]' on a machine without a GPU (in a clone: make setup)",
    "torchvision": "pip install torchvision, of the release that fits torch (in a clone: make setup)",
}


def missing_package(error: ImportError) -> ConfigError | None:
    """The user's error if `error` is about a package of `INSTALL`, else None.

    transformers names a missing torchvision only in the text of its error, below an empty first line.
    """
    text = " ".join(str(error).split())
    named = (error.name or "").partition(".")[0]
    missing = named if isinstance(error, ModuleNotFoundError) else ""
    if missing not in INSTALL:
        missing = next((name for name in INSTALL if f"requires the {name} library" in text.lower()), "")
    if not missing:
        return None
    return ConfigError(f"the package {missing} is missing", found=text, wanted=missing, remedy=INSTALL[missing])
