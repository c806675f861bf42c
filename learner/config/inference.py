"""`inference.json` in a model folder lets `predict` and `evaluate` prompt the model as training did.

The learner writes the file into every checkpoint and export, and `learner.detector` reads it. The file has the task,
the prompt, the classes, the limits of images' sizes and the decoding. Older checkpoints have no such file. For older
checkpoints `settings_of` makes the same settings from the run's `config.yaml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from learner.config.schema import RunConfig
from learner.config.sections.task import TaskConfig
from learner.records import Sample
from shared.generation import Turn
from shared.validation import read_if_there

INFERENCE_NAME = "inference.json"
CALIBRATION_NAME = "calibration.json"  # file in a model's folder that calibrates scores (`tasks.detection.scores`)
IMAGE = "<image>"  # stands for the image in a prompt's text


def _turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` unchanged. Raises ValueError if a message is no turn of a chat, with a role and a content."""
    for turn in messages:
        content = turn.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(turn.get("role"), str) or not isinstance(content, str | list):
            raise ValueError("turns with a role and a content")
        if any(not isinstance(part, dict) or not isinstance(part.get("type"), str) for part in parts):
            raise ValueError("parts of a content with a type")
    return messages


class InferenceSettings(BaseModel):
    """The content of `inference.json`. `messages`: the prompt's turns, with one `<image>`. `classes`: the names in the
    training labels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    task: TaskConfig
    messages: Annotated[list[dict[str, Any]], AfterValidator(_turns)]
    classes: list[str] = Field(default_factory=list)
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_new_tokens: int = Field(default=512, ge=1)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    stop_repetitions: int | None = Field(default=None, ge=2, le=64)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def settings_of(config: RunConfig, samples: Iterable[Sample] = ()) -> InferenceSettings:
    """Return the settings of a run. `samples`: the run's training data, from which the most frequent prompt and the
    class names are taken. Without samples, the prompt is that of the configuration."""
    prompts: Counter[tuple[tuple[str, str], ...]] = Counter()
    classes: dict[str, None] = {}
    turns: dict[tuple[tuple[str, str], ...], Sequence[Turn]] = {}
    for sample in samples:
        key = tuple((str(turn["role"]), str(turn["content"])) for turn in sample.messages)
        prompts[key] += 1
        turns.setdefault(key, sample.messages)
        classes.update(dict.fromkeys(str(obj.desc) for obj in sample.objects if hasattr(obj, "desc")))
    messages = turns[prompts.most_common(1)[0][0]] if prompts else prompt_messages(config.data.prompt)
    decoding = config.rollout_matching.decoding
    return InferenceSettings(
        task=config.task,
        messages=[dict(turn) for turn in messages],
        classes=sorted(classes),
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
        max_new_tokens=decoding.max_new_tokens,
        repetition_penalty=decoding.repetition_penalty,
        stop_repetitions=decoding.stop_repetitions,
    )


def prompt_messages(prompt: str | None) -> list[Turn]:
    """Return the user's turn with this text; None: the default text. If the text has no `<image>`, the image comes
    first."""
    text = prompt if prompt is not None else "Detect every object."
    return [{"role": "user", "content": text if IMAGE in text else IMAGE + text}]


def read_settings(folder: Path) -> InferenceSettings | None:
    """Return the settings in the model folder's `inference.json`; None without this file. Raises ConfigError if the
    file cannot be read."""
    return read_if_there(
        InferenceSettings,
        folder / INFERENCE_NAME,
        what="it does not say how to ask the model",
        remedy="correct it, or name the run's configuration: --config run.yaml",
    )
