"""Encodes the prompt of a sample for the model, and checks that an engine has read the same prompt (R03, R45).

In: a `Sample`, whose images are strings (`shared/images.py`). Out: an `EncodedPrompt`: pixels, and token ids with image
placeholders expanded. Chat template and processor come from the checkpoint, so the ids equal the server's.

`PromptEncoder` can be pickled, because data workers need it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from learner.data.views import open_images
from learner.records import EncodedPrompt, Rollout, Sample, VisionInputs
from shared.errors import ConfigError, DataError, MediaError, PromptMismatchError, RequestError
from shared.generation import Prompt, limit_pixels, render_messages
from shared.images import ImageRules, Images
from shared.packages import missing_package
from shared.pixels import ImageProcessing, check_pixels
from shared.wire import ProcessedImages

log = logging.getLogger(__name__)

CONTEXT = 8  # tokens shown on each side of a difference


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts with a checkpoint's processor, or with its tokenizer if the model is text-only."""

    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None
    images: Images = field(default_factory=lambda: Images(ImageRules()))
    pixels: Mapping[str, int] | None = None  # the result of `limit_pixels`; None: the checkpoint's limits

    @classmethod
    def load(
        cls, path: str, *, rules: ImageRules | None = None, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> PromptEncoder:
        """Load the checkpoint's tokenizer or processor. Raises ConfigError if a file or the chat template is missing,
        or if a limit of pixels is given and the processor has no such limits."""
        try:
            processor = AutoProcessor.from_pretrained(path) if _has_vision(path) else None
            tokenizer = processor.tokenizer if processor else AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            # A torchaudio that does not fit torch fails here, because transformers imports it.
            raise missing_package(error) or _load_error(path, str(error).strip().partition("\n")[0]) from error
        if not (processor or tokenizer).chat_template:
            raise _load_error(path, "no chat template")
        pixels = limit_pixels(processor, min_pixels=min_pixels, max_pixels=max_pixels, keys="model.")
        return cls(tokenizer, processor, Images(rules or ImageRules()), pixels)

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Return the prompt up to the assistant's answer. Raises DataError for a bad image or wrong turns."""
        text = self._text(sample)
        if self.processor is None:
            return EncodedPrompt(token_ids=tuple(self._token_ids(text)), vision=None)
        images = self._open_images(sample)
        with _shape_errors(sample, [image.size for image in images]):
            inputs = self.processor(text=[text], images=images or None, return_tensors="pt")
        vision = None
        if images:
            vision = VisionInputs(pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"])
        return EncodedPrompt(token_ids=tuple(inputs["input_ids"][0].tolist()), vision=vision)

    def for_engine(self, sample: Sample) -> Prompt:
        """Return the prompt for a vLLM engine in this process. The engine expands image placeholders itself, so the
        prompt has one placeholder per image, and the images. Raises the errors of `encode`."""
        return Prompt(
            token_ids=self._token_ids(self._text(sample)),
            images=self._open_images(sample),
            pixels=self.pixels,
        )

    @property
    def image_processing(self) -> ImageProcessing | None:
        """Return how images are resized and scaled; None for a text-only model."""
        return None if self.processor is None else ImageProcessing.of(self.processor.image_processor)

    def num_tokens(self, sample: Sample) -> int:
        """Return the number of tokens of `encode(sample)`, computed from the sizes of the images. Raises the errors of
        `encode`."""
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if sample.images and count is None:  # the model's processor cannot count image tokens
            return len(self.encode(sample).token_ids)
        text = len(self._token_ids(self._text(sample)))  # here each image counts as one placeholder token
        if count is None or not sample.images:
            return text
        one = len(sample.images) == 1  # the size of a single image was already checked
        sizes = [(sample.width, sample.height)] if one else [self.images.size(image) for image in sample.images]
        with _shape_errors(sample, sizes):
            # transformers takes the height first.
            tokens = count(image_sizes=[(height, width) for width, height in sizes]).num_image_tokens
        return text - len(sizes) + sum(tokens)

    def _open_images(self, sample: Sample) -> list[Image.Image]:
        try:
            return open_images(sample, self.images)
        except MediaError as error:
            raise _data_error(sample, error.what, error.found, error.wanted, error.remedy) from error

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
        # The chat template has written the special tokens.
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids


class PromptCheck:
    """Checks that a rollout's engine read the learner's prompt: the same token ids (R03) and the same pixels (R45).

    `decode`: the tokenizer's method. `image_processing`: how the encoder processes images; None: images are not
    compared.
    Several threads may call a `PromptCheck`. The digest of a prompt's images is made once for all rollouts of its
    sample.
    """

    def __init__(
        self, *, decode: Callable[[list[int]], str] | None = None, image_processing: ImageProcessing | None = None
    ) -> None:
        self._decode, self._processing = decode, image_processing
        # The digest of a prompt's images is forgotten when its pixels are freed.
        self._processed: WeakKeyDictionary[VisionInputs, ProcessedImages] = WeakKeyDictionary()
        self._threads = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="pixels")
        self._has_told = False

    def prepare(self, prompts: Iterable[EncodedPrompt], rollouts: Iterable[Rollout]) -> None:
        """Make the digests of these prompts' images on threads, before the prompts are checked. An image of half a
        megapixel takes 9 to 12 ms on one thread."""
        if self._processing is None:
            return
        both = zip(prompts, rollouts, strict=True)
        asked = {(one.vision, made.pixels.dtype) for one, made in both if one.vision is not None and made.pixels}
        list(self._threads.map(lambda one: self._seen(*one), asked))

    def __call__(self, prompt: EncodedPrompt, rollout: Rollout) -> None:
        """Compare the prompt with the prompt that the rollout's engine read. Raises PromptMismatchError for other token
        ids, ServerMismatchError for other pixels."""
        sample_id = rollout.sample.sample_id
        check_prompt_prefix(prompt.token_ids, rollout.prompt_token_ids, sample_id, decode=self._decode)
        if prompt.vision is not None and rollout.pixels is not None:
            self.pixels(prompt.vision, rollout.pixels, sample_id=sample_id, name=rollout.server_id)

    def pixels(self, mine: VisionInputs, theirs: ProcessedImages, *, sample_id: str, name: str) -> None:
        """Compare the pixels of the learner and of the engine `name`. Raises ServerMismatchError."""
        if self._processing is None:
            return
        gap = check_pixels(self._seen(mine, theirs.dtype), theirs, sample_id=sample_id, name=name)
        if gap and not self._has_told:
            self._has_told = True
            log.warning(
                "%s: pixels of sample %s differ from the learner's by up to %.4f, as another library's rounding does",
                name,
                sample_id,
                gap,
            )

    def _seen(self, mine: VisionInputs, dtype: str) -> ProcessedImages:
        """Return the digests of these images, whose pixels the engine has in type `dtype`."""
        assert self._processing is not None, "no images are compared"
        seen = self._processed.get(mine)
        if seen is None or seen.dtype != dtype:
            seen = self._processing.processed(mine.pixel_values, mine.image_grid_thw, dtype)
            self._processed[mine] = seen
        return seen


def check_prompt_prefix(
    expected: Sequence[int],
    served: Sequence[int],
    sample_id: str,
    *,
    decode: Callable[[list[int]], str] | None = None,
) -> None:
    """R03: check that the server's prompt token ids equal the learner's. Raises PromptMismatchError.

    With `decode`, a tokenizer's method, the error shows both texts around the first difference.
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
        f"learner and server tokenize the prompt of sample {sample_id!r} differently, starting at token {index}",
        found=f"served {describe(served)} ({len(served)} tokens)",
        wanted=f"as the learner has it: {describe(expected)} ({len(expected)} tokens)",
        remedy="serve the same checkpoint folder (tokenizer, chat template, processor) that the learner loads, and set "
        "the server's min_pixels and max_pixels to model.min_pixels and model.max_pixels",
    )


def _has_vision(path: str) -> bool:
    """Return True if the model takes images. An adapter's folder has no model configuration, but it has the processor
    of its base model."""
    folder = Path(path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    return hasattr(AutoConfig.from_pretrained(path), "vision_config")


@contextmanager
def _shape_errors(sample: Sample, sizes: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Raises DataError for images of a shape that the processor does not take."""
    try:
        yield
    except ValueError as error:
        shown = ", ".join(f"{width} x {height}" for width, height in sizes)
        found, wanted = f"{shown} pixels: {error}", "a shape that the model's processor takes"
        raise _data_error(sample, "the model cannot see the image", found, wanted, "crop the image") from error


def _data_error(sample: Sample, what: str, found: str, wanted: str, remedy: str = "") -> DataError:
    fix = f"fix or remove sample {sample.sample_id!r} of the dataset"
    remedy = f"{remedy}, or {fix}" if remedy else fix
    return DataError(f"sample {sample.sample_id!r}: {what}", found=found, wanted=wanted, remedy=remedy)


def _load_error(path: str, found: str) -> ConfigError:
    return ConfigError(
        "the model's processor cannot be loaded",
        found=f"model.path: {path}; {found}",
        wanted="a checkpoint folder with tokenizer, chat template and, for images, processor",
        remedy="correct model.path, or copy these files from the model that the checkpoint was made from",
    )
