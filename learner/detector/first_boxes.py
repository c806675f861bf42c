"""Detects objects with a vision-language model that this project did not train (R50). In: class names. Out: boxes.

The prompt asks for the classes, in words that the model's family was trained on. The answer is read in the forms that
such models write: JSON objects with `bbox_2d` and `label`, or names and boxes between tags. Other text is skipped.
Coordinates are thousandths, or pixels of the resized image that the model gets (Qwen2.5-VL).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from learner.config.inference import InferenceSettings, prompt_messages
from learner.config.sections.model import ModelConfig
from learner.config.sections.task import TaskConfig
from learner.data.formats.chat import boxes_in
from learner.data.survey import pixel_limits
from learner.data.units import resized, sides_in
from learner.records import DetectionObject, Rollout, Size, Unit
from learner.tasks.detection.grammar import NUM_BINS
from learner.tasks.tokens import TokenPieces
from shared.errors import ConfigError
from shared.reading import json_in

# Each family of docs/models.md that takes images, and the unit of its boxes.
FAMILIES: dict[str, Unit] = {"qwen3_vl": "thousandths", "qwen2_5_vl": "resized", "qwen2_vl": "thousandths"}
_PROMPT = (
    "<image>Locate every instance that belongs to the following categories: {}. Report bbox coordinates in JSON "
    'format, as [{{"bbox_2d": [x1, y1, x2, y2], "label": "{}"}}, ...], and [] if there is none.'
)
_NEW_TOKENS = 2048
_HALF_NATS = 1.0  # the score is 0.5 if the tokens' mean log-probability is -1 nat
_OBJECT = re.compile(
    rb"\{[^{}]*\}|(?:<ref>|<\|object_ref_start\|>).*?(?:</box>|<\|box_end\|>)(?:\s*(?:<box>|<\|box_start\|>).*?"
    rb"(?:</box>|<\|box_end\|>))*",
    re.DOTALL,
)


class FirstBox(NamedTuple):
    """A box in an answer. `object`: the object, with bins that are not rounded. `score` only ranks boxes: it rises with
    the probability of the box's tokens."""

    object: DetectionObject
    score: float


def first_settings(folder: Path, classes: Sequence[str]) -> tuple[InferenceSettings, Unit]:
    """Return how a model is asked for these classes, and the unit of its boxes. Raises ConfigError for a family of
    models that is not in `FAMILIES`."""
    try:
        family = str(json_in(folder / "config.json").get("model_type", ""))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: the model's config.json cannot be read",
            found=str(error),
            wanted="a Hugging Face checkpoint",
            remedy="correct --model",
        ) from error
    if family not in FAMILIES:
        raise ConfigError(
            f"{folder}: it is not known how this family of models writes boxes",
            found=f"model_type {family!r}",
            wanted=f"one of {', '.join(FAMILIES)}",
            remedy="choose one of these, or name a run's configuration: --config run.yaml",
        )
    messages = [dict(turn) for turn in prompt_messages(_PROMPT.format(", ".join(classes), classes[0]))]
    task = TaskConfig.model_validate({"container": "array", "coordinates": "digits"})
    settings = InferenceSettings(task=task, messages=messages, classes=list(classes), max_new_tokens=_NEW_TOKENS)
    return settings, FAMILIES[family]


class FirstReader:
    """Reads boxes from the answers of a model that this project did not train. `unit`: the unit in which the model
    writes coordinates."""

    def __init__(self, folder: Path, settings: InferenceSettings, unit: Unit, pieces: TokenPieces) -> None:
        self._unit, self._pieces, self._classes = unit, pieces, settings.classes
        limits = ModelConfig(path=str(folder), min_pixels=settings.min_pixels, max_pixels=settings.max_pixels)
        self._limits = pixel_limits(limits)

    def objects(self, answer: Rollout, size: Size) -> list[FirstBox]:
        """Return the boxes of the requested classes in an answer to an image of `size`."""
        across, down = self._sides(size)
        scale = (NUM_BINS - 1) / across, (NUM_BINS - 1) / down
        found = []
        for name, box, score in self._written(answer):
            bins = tuple(min(max(value * scale[i % 2], 0.0), NUM_BINS - 1.0) for i, value in enumerate(box))
            if (desc := self._class_of(name)) and len(bins) == 4 and bins[0] < bins[2] and bins[1] < bins[3]:
                found.append(FirstBox(DetectionObject(desc, "bbox_2d", bins), score))  # type: ignore[arg-type]
        return found

    def _sides(self, size: Size) -> tuple[float, float]:
        if self._unit == "resized" and self._limits is not None:
            return resized(size, self._limits)
        return sides_in(self._unit, size)

    def _written(self, answer: Rollout) -> Iterator[tuple[str, list[float], float]]:
        """Yield each object's name, its numbers, and its score."""
        text = self._pieces.text(answer.response_token_ids)
        for match in _OBJECT.finditer(text.data):
            try:
                objects, _ = boxes_in(match[0].decode(errors="replace"))
            except ValueError:
                continue
            score = 1.0
            if answer.logprobs is not None:
                first, last = text.token_at(match.start()), text.tokens_until(match.end())
                nats = float(np.mean(answer.logprobs[first:last])) if last > first else 0.0
                score = 1 / (1 - nats / _HALF_NATS)
            for one in objects:
                values = one["bbox_2d"]
                if isinstance(values, list) and all(type(value) in (int, float) for value in values):
                    yield one["desc"], values, score

    def _class_of(self, name: str) -> str | None:
        """Return the class of a name that may be in capitals or in the plural; None if no class fits."""
        folded = name.strip().casefold()
        same = (one for one in self._classes if one.casefold() in (folded, folded.removesuffix("s")))
        return next(same, None)
