"""The Python API: parse, match, target, pack and evaluate, without a server and without a GPU.

    from learner.api import load_task, rollout_of, sample_of

    task = load_task("models/Qwen3-VL-2B-Instruct", coordinates="digits", container="array")
    sample = sample_of([("cat", (12, 40, 310, 277))], width=640, height=480)
    assignment = task.match(task.parse(rollout_of(sample, answer, task)))
    task.evaluate([assignment])["f1@0.5"]

`DetectionTask` has the stages (parse, match, ...) as methods. `LossConfig` has the loss weights of a target. The
functions here make records from a model's folder, boxes in pixels, or an answer's text. `docs/notebooks/library.ipynb`
shows examples of all functions.
`load_task` reads a tokenizer's files; every other function is pure. Nothing here loads torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from learner.config.sections.loss import LossConfig
from learner.config.sections.task import TaskConfig
from learner.extensions import Tokenizer
from learner.records import (
    Assignment,
    DetectionObject,
    EncodedPrompt,
    GeometryKind,
    PackedRow,
    ParsedRollout,
    Rollout,
    Sample,
    Segment,
    Target,
)
from learner.steps.packing import pack_all
from learner.tasks.detection.bins import canonical_order, encloses_something, to_bins, to_pixels
from learner.tasks.detection.metrics import bootstrap_difference, bootstrap_interval
from learner.tasks.detection.task import DetectionTask
from learner.tasks.supervision import build_segment
from shared.errors import ConfigError, DataError

__all__ = [
    "Assignment",
    "DetectionObject",
    "DetectionTask",
    "LossConfig",
    "PackedRow",
    "ParsedRollout",
    "Rollout",
    "Sample",
    "Segment",
    "Target",
    "TaskConfig",
    "bootstrap_difference",
    "bootstrap_interval",
    "canonical_order",
    "load_task",
    "pack",
    "rollout_of",
    "sample_of",
    "segment_of",
    "to_bins",
    "to_pixels",
]


class FolderTokenizer:
    """The tokenizer in a model's folder: `tokenizer.json`, and the end token that `tokenizer_config.json` names.

    The ids are those of transformers' AutoTokenizer, but neither transformers nor torch is loaded.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer. Raises OSError, ValueError or KeyError if the tokenizer's files are missing or
        damaged."""
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}")
        self.backend_tokenizer = Fast.from_file(str(folder / "tokenizer.json"))
        end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
        found = self.backend_tokenizer.token_to_id(end if isinstance(end, str) else end["content"])
        if found is None:
            raise ValueError(f"the end token {end} has no id")
        self.eos_token_id: int = found
        self.added_tokens_decoder: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab())


def load_task(model: str | Path | Tokenizer, **keys: object) -> DetectionTask:
    """Return the task for a model's folder, or for a tokenizer of transformers. `keys` are those of the section `task`:
    `container`, `coordinates`, `iou_threshold`.

    Raises ConfigError if the tokenizer cannot be loaded, or lacks the tokens that `coordinates: tokens` needs, and
    pydantic's ValidationError for a wrong key.
    """
    config = TaskConfig.model_validate(keys)
    if not isinstance(model, str | Path):
        return DetectionTask(config, model)
    try:
        tokenizer = FolderTokenizer(Path(model))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "the tokenizer cannot be loaded",
            found=f"{model}: {type(error).__name__}: {error}",
            wanted="a folder with tokenizer.json and tokenizer_config.json",
            remedy="correct the path, or pass a tokenizer of transformers",
        ) from error
    return DetectionTask(config, tokenizer)


def sample_of(
    objects: Iterable[tuple[str, Sequence[float]]], *, width: int, height: int, sample_id: str = "sample"
) -> Sample:
    """Return a sample with this ground truth, in canonical order. Each object is its description and x1, y1, x2, y2 in
    pixels of an image of `width` x `height`; six or more numbers are a polygon's x1, y1, x2, y2, ...

    The sample has no prompt and no image. `DetectionTask.validate` checks the class names of a sample.

    Raises DataError for an object that reaches out of the image, whose corners are in another order, or that has no
    area.
    """
    detected = [_detected(desc, coords, width, height) for desc, coords in objects]
    return Sample(
        sample_id=sample_id, messages=(), images=(), objects=canonical_order(detected), width=width, height=height
    )


def _detected(desc: str, coords: Sequence[float], width: int, height: int) -> DetectionObject:
    kind: GeometryKind = "bbox_2d" if len(coords) == 4 else "poly"
    place = f"{desc!r} at {', '.join(f'{value:g}' for value in coords)}"
    if kind == "poly" and (len(coords) < 6 or len(coords) % 2):
        wanted = "four numbers of a box, or x and y of three points or more"
        raise DataError("an object has no place", found=place, wanted=wanted, remedy="correct it")
    # The comparison is false for NaN, so NaN is refused too.
    if not all(0 <= value <= (width, height)[i % 2] for i, value in enumerate(coords)):
        wanted = f"pixels within {width} x {height}"
        remedy = "give pixels, not shares or bins, and cut what reaches out of the image"
        raise DataError("an object reaches out of its image", found=place, wanted=wanted, remedy=remedy)
    if not encloses_something(kind, coords):
        wanted = "x1 < x2 and y1 < y2" if kind == "bbox_2d" else "points that enclose an area"
        remedy = "give left, top, right, bottom; not width and height"
        raise DataError("an object has no area", found=place, wanted=wanted, remedy=remedy)
    return DetectionObject(desc, kind, to_bins(coords, width, height))


def rollout_of(
    sample: Sample, answer: str | Sequence[int], task: DetectionTask, *, finish_reason: str = "stop"
) -> Rollout:
    """Return a rollout with this answer, as if the model had written it for the sample. `answer` is a text or, better,
    token ids [T]: the tokenizer may split a text into other tokens than the model wrote. `finish_reason`: "stop", or
    "length" at the token limit."""
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
    """Return prompt [P] and target [Y] as one training sequence [P + Y] without pixels: ids, labels (-100: ignored),
    weights.

    Raises LossError if the prompt is empty, or if a label is outside the target.
    """
    prompt = EncodedPrompt(token_ids=tuple(prompt_token_ids), vision=None)
    return build_segment(prompt, target, sample_id=sample_id)


def pack(segments: Sequence[Segment], row_tokens: int) -> list[PackedRow]:
    """Pack all segments in few rows of at most `row_tokens` tokens, without padding. No segment is cut or left out.

    Raises DataError if a segment is longer than a row.
    """
    return pack_all(segments, row_tokens)
