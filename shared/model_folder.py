"""A model's name to its checkpoint's folder.

In: a folder, or a name on the Hugging Face hub. Out: a folder on this machine. vLLM would find the model by its name,
but the account of a weight load reads the tensors' names in the folder. Called before an engine is started.
"""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError


def model_folder(model: str, key: str) -> str:
    """Raises ConfigError, which names the configuration's `key`, where the model is neither here nor on the hub."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{key}: {model!r} is not to be had",
            found=f"no such folder, and from the hub: {type(error).__name__}",
            wanted="a checkpoint's folder, or a name on the Hugging Face hub",
            remedy="check the path (relative to the working directory), or download the model first",
        ) from error
