"""Names and limits of the section `model` that the model does not have, from the checkpoint's configuration.

In: the section `model`. Out: what is wrong with `freeze`, `lora.target_modules`, `min_pixels` and `max_pixels`. The
model is built without memory for its weights (device `meta`); none are read.
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
from shared.config.model import Mistake
from shared.errors import ConfigError


def names_that_are_wrong(config: ModelConfig) -> list[Mistake]:
    """Return all of them. A checkpoint that cannot be read is one mistake, of `model.path`."""
    mistakes: list[Mistake] = []

    def look(step: Callable[[], object], key: str) -> None:
        try:
            step()
        except ConfigError as error:
            mistakes.append(Mistake.of(error, key))

    try:
        base = lora.base_model_path(config) or config.path
        model = _without_weights(base)
    except ConfigError as error:
        return [Mistake.of(error, "model.path")]
    except (OSError, ValueError) as error:
        found, wanted = str(error).partition("\n")[0], "a Hugging Face checkpoint"
        return [Mistake(path="model.path", found=found, wanted=wanted, remedy="correct model.path")]
    look(partial(_attach, model, config), "model.lora.target_modules")
    look(partial(lora.freeze, model, config.freeze), "model.freeze")
    least, most = config.min_pixels, config.max_pixels
    key = "model.min_pixels" if least is not None else "model.max_pixels" if most is not None else "model.path"
    look(partial(PromptEncoder.load, base, min_pixels=least, max_pixels=most), key)
    return mistakes


def _without_weights(path: str) -> PreTrainedModel:
    settings = AutoConfig.from_pretrained(path)
    loader = AutoModelForImageTextToText if hasattr(settings, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = loader.from_config(settings)
    return model


def _attach(model: PreTrainedModel, config: ModelConfig) -> None:
    if config.lora is not None:
        lora.attach_adapter(model, config)
    elif lora.base_model_path(config) is not None:  # its weights are not read either
        adapter = peft.PeftConfig.from_pretrained(config.path)
        adapter.inference_mode = False
        peft.get_peft_model(model, adapter)
