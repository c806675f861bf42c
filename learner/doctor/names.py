"""Checks the section `model` against the model itself: `freeze`, `lora.target_modules`, and limits of pixels.

The model is built from the checkpoint's configuration, without memory for its weights (device `meta`). No weights are
read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from learner.config.sections.model import ModelConfig
from learner.data.prompt import PromptEncoder
from learner.policy import lora
from shared.config.checks import mistakes_of
from shared.config.model import Mistake
from shared.errors import ConfigError


def names_that_are_wrong(config: ModelConfig) -> list[Mistake]:
    """Return a mistake for each key of the section `model` that does not fit the model. A checkpoint that cannot be
    read is one mistake, of `model.path`."""
    try:
        base = lora.base_model_path(config) or config.path
        model = _without_weights(base)
    except ConfigError as error:
        return [Mistake.of(error, "model.path")]
    except (OSError, ValueError) as error:
        found, wanted = str(error).partition("\n")[0], "a Hugging Face checkpoint"
        return [Mistake(path="model.path", found=found, wanted=wanted, remedy="correct model.path")]
    least, most = config.min_pixels, config.max_pixels
    limit = "model.min_pixels" if least is not None else "model.max_pixels" if most is not None else "model.path"
    checks: dict[str, Callable[[], object]] = {
        # These names are checked, because peft silently skips a name that matches no layer if another name matches.
        "model.lora.target_modules": partial(_attach, model, config),
        "model.freeze": partial(lora.freeze, model, config.freeze),
        limit: partial(PromptEncoder.load, base, min_pixels=least, max_pixels=most),
    }
    return [mistake for key, check in checks.items() for mistake in mistakes_of(check, key)]


def _without_weights(path: str) -> PreTrainedModel:
    settings = AutoConfig.from_pretrained(path)
    loader = AutoModelForImageTextToText if hasattr(settings, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = loader.from_config(settings)
    return model


def _attach(model: PreTrainedModel, config: ModelConfig) -> None:
    if config.lora is not None:
        lora.attach_adapter(model, config)
    # The model is itself an adapter. A new adapter with the same settings is checked instead, so no weights are read.
    elif lora.base_model_path(config) is not None:
        adapter = peft.PeftConfig.from_pretrained(config.path)
        adapter.inference_mode = False
        peft.get_peft_model(model, adapter)
