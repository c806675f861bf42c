"""A sample's prompt as the model sees it, on the learner's side, and the check that the server saw the same (R03).

In: a `Sample`, whose images are local paths, data URLs or base64. Out: an `EncodedPrompt`: token ids with image
placeholders expanded, and pixels. Chat template and processor are the checkpoint's own, so ids equal the server's.

`PromptEncoder` pickles, for DataLoader workers.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from learner.records import EncodedPrompt, Sample, VisionInputs
from shared.errors import ConfigError, DataError, PromptMismatchError, RequestError
from shared.generation import Prompt
from shared.prompt import render_messages

CONTEXT = 8  # tokens shown around a difference


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts by a checkpoint's processor, or by its tokenizer where the model is text-only."""

    tokenizer: Any
    processor: Any | None

    @classmethod
    def load(cls, path: str) -> PromptEncoder:
        """Raises ConfigError where the checkpoint has no tokenizer, processor or chat template."""
        try:
            processor = AutoProcessor.from_pretrained(path) if _has_vision(path) else None
            tokenizer = processor.tokenizer if processor else AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            raise _load_error(path, str(error).splitlines()[0]) from error
        if not (processor or tokenizer).chat_template:
            raise _load_error(path, "no chat template")
        return cls(tokenizer, processor)

    def encode(self, sample: Sample) -> EncodedPrompt:
        """The prompt up to where the assistant begins. Raises DataError for a bad image or wrong turns."""
        text = self._text(sample)
        if self.processor is None:
            return EncodedPrompt(token_ids=tuple(self._token_ids(text)), vision=None)
        images = [open_image(sample, image) for image in sample.images]
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt")
        vision = None
        if images:
            vision = VisionInputs(pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"])
        return EncodedPrompt(token_ids=tuple(inputs["input_ids"][0].tolist()), vision=vision)

    def for_engine(self, sample: Sample) -> Prompt:
        """The same prompt for a vLLM engine in this process, which does by itself what the processor does to images:
        one placeholder each, and the pictures. Raises as `encode`."""
        return Prompt(
            token_ids=self._token_ids(self._text(sample)),
            images=[open_image(sample, image) for image in sample.images],
        )

    def _text(self, sample: Sample) -> str:
        if sample.images and self.processor is None:
            raise _data_error(sample, "a text-only model got images", f"{len(sample.images)} images", "none")
        try:
            turns = render_messages(sample.messages, len(sample.images))
        except RequestError as error:
            raise _data_error(sample, error.what, error.found, error.wanted) from error
        template = self.processor or self.tokenizer
        text: str = template.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return text

    def _token_ids(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids


def open_image(sample: Sample, image: str) -> Image.Image:
    """One of the sample's images as RGB. Raises DataError, naming sample and image."""
    try:
        with Image.open(_image_file(sample, image)) as opened:
            return opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise _data_error(sample, "an image can't be read", f"{_short(image)}: {error}", "an image file") from error


def check_prompt_prefix(
    expected: Sequence[int],
    served: Sequence[int],
    sample_id: str,
    *,
    decode: Callable[[list[int]], str] | None = None,
) -> None:
    """R03: the server's prompt token ids must be the learner's. Raises PromptMismatchError at the first difference.

    With `decode` (a tokenizer's) the message shows both neighbourhoods as text.
    """
    if tuple(expected) == tuple(served):
        return
    shorter = min(len(expected), len(served))
    index = next((i for i in range(shorter) if expected[i] != served[i]), shorter)

    def describe(ids: Sequence[int]) -> str:
        near = list(ids[max(0, index - CONTEXT) : index + CONTEXT])
        token = str(ids[index]) if index < len(ids) else "nothing"
        return f"{token} in {decode(near)!r}" if decode else f"{token} in {near}"

    raise PromptMismatchError(
        f"learner and server tokenize the prompt of sample {sample_id!r} differently, from token {index} on",
        found=f"served {describe(served)} ({len(served)} tokens)",
        wanted=f"as the learner has it: {describe(expected)} ({len(expected)} tokens)",
        remedy="serve the same checkpoint folder (tokenizer, chat template, processor) that the learner loads",
    )


def _has_vision(path: str) -> bool:
    return hasattr(AutoConfig.from_pretrained(path), "vision_config")


def _image_file(sample: Sample, image: str) -> Path | io.BytesIO:
    if image.startswith(("http://", "https://")):
        raise _data_error(sample, "the learner fetches no images", _short(image), "a local path, a data URL or base64")
    if not image.startswith("data:") and (len(image) < 4096 and Path(image).exists()):
        return Path(image)
    try:
        return io.BytesIO(
            base64.b64decode(image.partition(",")[2] if image.startswith("data:") else image, validate=True)
        )
    except binascii.Error as error:
        wanted = "an existing file, a data URL or base64"
        raise _data_error(sample, "an image is missing", _short(image), wanted) from error


def _short(image: str) -> str:
    return image if len(image) <= 200 else f"{image[:60]}... ({len(image)} characters)"


def _data_error(sample: Sample, what: str, found: str, wanted: str) -> DataError:
    remedy = f"fix or remove sample {sample.sample_id!r} of the dataset"
    return DataError(f"{what} (sample {sample.sample_id!r})", found=found, wanted=wanted, remedy=remedy)


def _load_error(path: str, found: str) -> ConfigError:
    return ConfigError(
        "the model's processor can't be loaded",
        found=f"model.path: {path}; {found}",
        wanted="a checkpoint folder with tokenizer, chat template and, for images, processor",
        remedy="correct model.path, or copy these files from the model that the checkpoint was made of",
    )
