"""The section `model`: the trained model, its adapter, its images' sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from learner.config.modes import Rule
from shared.config.model import Mistake, Section, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class LoraConfig(Section):
    """Train a low-rank adapter instead of the whole model."""

    type: Literal["lora", "dora"] = key("`lora`: plain LoRA; `dora`: weight-decomposed LoRA", "lora", req="R09")
    r: int = key("rank of the adapter", 16, ge=1)
    alpha: int = key("scaling: the adapter's output is multiplied by `alpha / r`", 32, ge=1)
    dropout: float = key("dropout on the adapter's input", 0.0, unit="probability", ge=0.0, lt=1.0)
    target_modules: str | list[str] = key(
        "modules that get an adapter: peft's `target_modules`, names or a pattern", "all-linear"
    )


class ModelConfig(Section):
    """The trained model."""

    path: str = key("Hugging Face checkpoint with its processor: a folder, or a name on the hub", min_length=1)
    allow_untested_family: bool = key("try a family of models that docs/models.md does not list", False)
    dtype: Literal["float32", "bfloat16"] = key("dtype of the trained weights", "float32")
    lora: LoraConfig | None = key("train an adapter; null: train the weights themselves", None, req="R09")
    freeze: list[str] = key("parameters that are not trained: those whose name starts with one of these", [])
    min_pixels: int | None = key(
        "smaller images are enlarged to it; null: the checkpoint's limit. The servers' `min_pixels` must be the same",
        None,
        unit="pixels (width x height)",
        ge=1,
    )
    max_pixels: int | None = key(
        "larger images are shrunk to it: fewer tokens per image; null: the checkpoint's own limit. The servers' "
        "`max_pixels` must be the same",
        None,
        unit="pixels (width x height)",
        ge=1,
    )
    # Off by default: a 4B model on an H200 reached 0.655 of the rate of plain matrix products without gradient
    # checkpointing, and 0.501 with it.
    gradient_checkpointing: bool = key("save memory: recompute activations in the backward pass", False)
    # A 4B model on an H200 reached 0.655 of the rate of plain matrix products compiled, and 0.453 not compiled.
    compile: Literal["auto"] | bool = key(
        "compile the model's layers and the loss for learning, with torch.compile. The first row triggers compilation, "
        "later rows of any length reuse it. `auto`: compile on CUDA from 5e8 parameters on, if a compiler is installed "
        "and the model is not sharded",
        "auto",
    )
    # With `fsdp` a 0.6B model on two H200 held 1.75 GiB on each instead of 3.39, and a step took 0.736 s instead of
    # 0.571.
    sharding: Literal["none", "fsdp"] = key(
        "`none`: each rank holds the whole model. `fsdp`: each rank holds its part of weights, gradients and optimizer "
        "moments (FSDP2), for models that do not fit one GPU. A single rank always holds the whole model",
        "none",
    )


def pixel_limits(config: RunConfig) -> Iterator[Mistake]:
    """`model.min_pixels` is not above `model.max_pixels`."""
    least, most = config.model.min_pixels, config.model.max_pixels
    if least is not None and most is not None and least > most:
        wanted, remedy = f"at most model.max_pixels ({most})", "correct one of the two"
        yield Mistake(path="model.min_pixels", found=str(least), wanted=wanted, remedy=remedy)


def target_pattern(config: RunConfig) -> Iterator[Mistake]:
    """`model.lora.target_modules` is a list of names, or a pattern that Python's `re` can read."""
    pattern = config.model.lora.target_modules if config.model.lora else ""
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        # `re` raises OverflowError for huge repeat counts, and RecursionError for deep brackets.
        except (re.error, OverflowError, RecursionError) as error:
            found, wanted = f"{pattern!r:.80} ({error})", '"all-linear", a list of names, or a regular expression'
            remedy = "close its brackets, or list the names"
            yield Mistake(path="model.lora.target_modules", found=found, wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (pixel_limits, target_pattern)
