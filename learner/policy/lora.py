"""LoRA and DoRA by peft, and which parameters are trained.

In: a transformers model and `model.lora` / `model.freeze`. Out: a peft model around it (or nothing, without adapters),
with `requires_grad` set. Called by `load.py` and, for the adapter's files, by `learner/checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import peft
from transformers import PreTrainedModel

from learner.config.schema import LoraConfig
from shared.errors import ConfigError

ADAPTER = "default"


def add_adapter(model: PreTrainedModel, config: LoraConfig) -> peft.PeftModel:
    """Adapters in the layers that `target_modules` names; everything else frozen.

    Raises ConfigError where no layer has such a name.
    """
    options = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_dora=config.type == "dora",
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, options, adapter_name=ADAPTER)
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
