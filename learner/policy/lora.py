"""LoRA and DoRA by peft, and which parameters are trained.

In: a transformers model and the `model` section: `path` (maybe an adapter's folder), `lora`, `freeze`. Out: a peft
model around it (or nothing, without adapters), with `requires_grad` set. Called by `load.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import peft
from transformers import PreTrainedModel

from learner.config.schema import LoraConfig, ModelConfig
from shared.errors import ConfigError


def base_model_path(config: ModelConfig) -> str | None:
    """Where the base model lies, if `config.path` is an adapter's folder. Raises ConfigError with `lora` beside it."""
    if not (Path(config.path) / "adapter_config.json").is_file():
        return None
    if config.lora is not None:
        raise ConfigError(
            "model.path already holds an adapter",
            found=f"model.path: {config.path}, and model.lora",
            wanted="one of the two",
            remedy="remove model.lora to train that adapter on, or export the checkpoint first to add a new one",
        )
    return peft.PeftConfig.from_pretrained(config.path).base_model_name_or_path


def attach_adapter(model: PreTrainedModel, config: ModelConfig) -> peft.PeftModel | None:
    """The adapter of `config.path`, or a new one as `config.lora` says; everything else of the model is then frozen.

    Raises ConfigError where no layer has a name that `target_modules` gives.
    """
    if base_model_path(config) is not None:
        return peft.PeftModel.from_pretrained(model, config.path, is_trainable=True)
    return _new_adapter(model, config.lora) if config.lora else None


def _new_adapter(model: PreTrainedModel, config: LoraConfig) -> peft.PeftModel:
    options = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_dora=config.type == "dora",
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, options)
    except ValueError as error:
        raise ConfigError(
            "no adapter could be added",
            found=f"model.lora.target_modules: {config.target_modules}; peft says: {error}",
            wanted="names of linear layers of the model",
            remedy='use "all-linear", or names such as q_proj',
        ) from error


def freeze(model: PreTrainedModel, prefixes: Sequence[str]) -> None:
    """Stop training the parameters whose checkpoint name begins with one of `prefixes`, adapters included.

    Raises ConfigError where a prefix names nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise ConfigError(
                "model.freeze names no parameter",
                found=prefix,
                wanted=f"the beginning of a name such as {names[0]}",
                remedy="correct the prefix or remove it",
            )
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "every parameter is frozen",
            found=f"model.freeze: {list(prefixes)}",
            wanted="something to train",
            remedy="remove a prefix from model.freeze",
        )
