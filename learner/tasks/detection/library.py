"""What a program needs around `DetectionTask` if it is not the learner: records from a model's folder, boxes in pixels
and an answer's text, and targets packed into rows.

Pure but for `load_task`, which reads a tokenizer's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from learner.config.schema import TaskConfig
from learner.records import DetectionObject, EncodedPrompt, GeometryKind, PackedRow, Rollout, Sample, Segment, Target
from learner.steps.packing import pack_all
from learner.target.target import build_segment
from learner.tasks.detection.bins import canonical_order, to_bins
from learner.tasks.detection.task import DetectionTask
from learner.tasks.task import Tokenizer
from shared.errors import ConfigError


def load_task(model: str | Tokenizer, **keys: Any) -> DetectionTask:
    """The task for a Hugging Face folder or name, or for a tokenizer. `keys` are those of the section `task`:
    `container`, `coordinates`, `iou_threshold`.

    Raises ConfigError if the tokenizer cannot be loaded, or lacks the tokens that `coordinates: tokens` needs, and
    pydantic's ValidationError for a wrong key.
    """
    config = TaskConfig.model_validate(keys)
    if not isinstance(model, str):
        return DetectionTask(config, model)
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the tokenizer cannot be loaded",
            found=f"{model}; {str(error).splitlines()[0]}",
            wanted="a Hugging Face folder or name",
            remedy="correct the path",
        ) from error
    return DetectionTask(config, tokenizer)


def sample_of(
    objects: Iterable[tuple[str, Sequence[float]]], *, width: int, height: int, sample_id: str = "sample"
) -> Sample:
    """A sample with this ground truth, in canonical order. Each object is its description and x1, y1, x2, y2 in pixels
    of an image of `width` x `height`; six or more numbers are a polygon's x1, y1, x2, y2, ...

    It has no prompt and no image. `DetectionTask.validate` checks it.
    """
    detected = [DetectionObject(desc, _kind(coords), to_bins(coords, width, height)) for desc, coords in objects]
    return Sample(
        sample_id=sample_id, messages=(), images=(), objects=canonical_order(detected), width=width, height=height
    )


def _kind(coords: Sequence[float]) -> GeometryKind:
    return "bbox_2d" if len(coords) == 4 else "poly"


def rollout_of(
    sample: Sample, answer: str | Sequence[int], task: DetectionTask, *, finish_reason: str = "stop"
) -> Rollout:
    """An answer to the sample, as text or as token ids [T] (better: a text may be split in other tokens than those that
    the model wrote). `finish_reason`: "stop", or "length" if the answer reached the token limit."""
    ids = task.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
    return Rollout(
        sample=sample,
        prompt_token_ids=(),
        response_token_ids=tuple(ids),
        finish_reason=finish_reason,
        ver=0,
        seed=None,
    )


def segment_of(prompt_token_ids: Sequence[int], target: Target, *, sample_id: str = "sample") -> Segment:
    """Prompt [P] and target [Y] as one training sequence [P + Y] without pixels: ids, labels (-100: ignored), weights.

    Raises LossError if the prompt is empty, or if a label is outside the target.
    """
    prompt = EncodedPrompt(token_ids=tuple(prompt_token_ids), vision=None)
    return build_segment(prompt, target, sample_id=sample_id)


def pack(segments: Sequence[Segment], row_tokens: int) -> list[PackedRow]:
    """All segments in few rows of at most `row_tokens` tokens, without padding. No segment is cut or left out.

    Raises DataError if a segment is longer than a row.
    """
    return pack_all(segments, row_tokens)
