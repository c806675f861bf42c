"""Compares a configuration with the files in the folder of its model. Imports no torch.

In: the configuration. Out: what the model cannot do, and what it was not trained for. A model that is not on this
machine is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.config.modes import ROLLOUT, needs_rollouts
from learner.config.schema import RunConfig
from learner.records import Sample
from shared.config.model import Mistake
from shared.errors import ConfigError
from shared.families import text_only
from shared.reading import json_in

_CONFIG, _SETTINGS = "config.json", "inference.json"
_TIED, _PATHS = ("lm_head", "embed_tokens"), ("", "model.", "model.language_model.")


def no_room_for_prompts(config: RunConfig) -> list[Mistake]:
    """Return a mistake if the longest answer leaves no room for a prompt, with `rollout_backend: hf`."""
    rollout = config.rollout_matching
    if rollout.rollout_backend != "hf" or not needs_rollouts(config):
        return []
    most = _positions(Path(config.model.path))
    if most is None or rollout.decoding.max_new_tokens < most:
        return []
    return [
        Mistake(
            path=f"{ROLLOUT}.decoding.max_new_tokens",
            found=f"{rollout.decoding.max_new_tokens} of the model's {most} tokens (max_position_embeddings)",
            wanted="fewer new tokens, so that a prompt fits before them",
            remedy="lower max_new_tokens",
        )
    ]


def limits_of_images(config: RunConfig) -> list[Mistake]:
    """Return a mistake for each limit of pixels that is set for a model without images."""
    kind = text_only(config.model.path)
    given = {name: getattr(config.model, name) for name in ("min_pixels", "max_pixels")}
    return [
        Mistake(
            path=f"model.{name}",
            found=f"{value}, and model.path is a model of text ({kind})",
            wanted="a model that takes images, or null",
            remedy="remove it, or name a vision-language model",
        )
        for name, value in given.items()
        if kind and value is not None
    ]


def images_without_eyes(config: RunConfig, read: Mapping[str, Sequence[Sample]]) -> list[Mistake]:
    """Return a mistake for each split with images, if the model takes no images. `read`: the samples of each split, by
    the split's key."""
    kind = text_only(config.model.path)
    return [
        Mistake(
            path=key,
            found=f"images (sample {first.sample_id}), and model.path is a model of text ({kind})",
            wanted="a model that takes images",
            remedy="name a vision-language model (model.path), or annotations without images",
        )
        for key, samples in read.items()
        if kind and (first := next((sample for sample in samples if sample.images), None)) is not None
    ]


def _positions(folder: Path) -> int | None:
    try:
        found = json_in(folder / _CONFIG)
        return int((found.get("text_config") or found)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # loading the model reports the error
        return None


def adapter_on_tied(config: RunConfig) -> list[Mistake]:
    """Return a mistake if LoRA is asked for on the embedding or the head of a model in which both are one tensor."""
    named = config.model.lora.target_modules if config.model.lora is not None else []
    if isinstance(named, str):
        layers = [name for name in _TIED for path in _PATHS if re.fullmatch(named, f"{path}{name}")]
    else:
        layers = [name for name in _TIED if any(one.rpartition(".")[2] == name for one in named)]
    # A run with an adapter on a tied layer would train to its end, but its model cannot be exported, served or synced.
    if not layers or not _is_tied(Path(config.model.path)):
        return []
    remedy = 'leave lm_head and embed_tokens out, or use "all-linear"'
    found = f"{layers[0]}, and the model's tie_word_embeddings"
    return [Mistake(path="model.lora.target_modules", found=found, wanted="layers that are not tied", remedy=remedy)]


def _is_tied(folder: Path) -> bool:
    try:
        found = json_in(folder / _CONFIG)
        text = found.get("text_config") or {}
        return bool(found.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    except (OSError, ValueError, AttributeError):  # loading the model reports the error
        return False


def other_than_trained(config: RunConfig) -> str | None:
    """Return a warning if prompt, form of answers or limits of pixels differ from the model's training."""
    if not (Path(config.model.path) / _SETTINGS).is_file():
        return None
    # imported here, because a check of keys should not load numpy
    from learner.config.inference import prompt_messages, read_settings

    try:
        trained = read_settings(Path(config.model.path))
    except ConfigError:  # a damaged file is an error of `predict` and `evaluate` only
        return None
    if trained is None:
        return None
    # The settings below are compared because a run whose `max_pixels` differed from its model's training had only
    # scores of 0, and nothing said why.
    pairs: Mapping[str, tuple[object, object]] = {
        "task.type": (trained.task.type, config.task.type),
        "task.container": (trained.task.container, config.task.container),
        "task.coordinates": (trained.task.coordinates, config.task.coordinates),
        "model.min_pixels": (trained.min_pixels, config.model.min_pixels),
        "model.max_pixels": (trained.max_pixels, config.model.max_pixels),
    }
    other = [f"{key} ({_shown(then)}, here {_shown(now)})" for key, (then, now) in pairs.items() if then != now]
    asked = prompt_messages(config.data.prompt)
    if config.data.prompt is not None and [dict(turn) for turn in asked] != trained.messages:
        other.append(f"data.prompt ({str(trained.messages[-1].get('content')) if trained.messages else ''!r:.100})")
    if not other:
        return None
    differs = ", ".join(other)
    return f"model.path was trained with other settings, and may find little before it has learned these: {differs}"


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
