"""Reads the processed images that vLLM's image processor sends to the engine's vision tower (R45).

In: vLLM's renderer, and prompts. Out: `ProcessedImages` (digests and some values of the pixels). `EngineImages.look` is
for the server's engine, `EngineImages.looking` for the learner's engine.

Invariants: the engine's input stays the same. Digests are made once per image, on threads, during the generation. vLLM
drops a processed image once it has been sent to the engine, and keeps only its hash. If a dropped image has no digest
yet, it is processed once more, outside of vLLM's cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shared.generation import Prompt
from shared.pixels import LEVELS, seen_image, settings_of
from shared.wire import ProcessedImage, ProcessedImages

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.renderers import BaseRenderer

_KEPT = 1024  # max images whose digests are kept, 2 KB each

# one digest per image of a prompt; None: vLLM has already sent the image and dropped its pixels
Seen = Sequence[Future[ProcessedImage] | None]


class EngineImages:
    """Digests of one engine's processed images. `renderer`: the engine's vLLM renderer. `threads` compute the
    digests."""

    def __init__(self, renderer: BaseRenderer, threads: Executor) -> None:
        self.renderer, self._threads = renderer, threads
        self._known: OrderedDict[str, Future[ProcessedImage]] = OrderedDict()  # digests, by vLLM's hash of the image
        self._lock = threading.Lock()
        # The settings are read once, with the first prompt, because all prompts have the same overrides.
        self._settings: dict[str, str] = {}
        self._dtype = ""

    def look(self, prompt: Prompt) -> Look:
        return Look(self, prompt)

    async def render(self, prompt: Prompt, **options: bool) -> EngineInput:
        """Return the prompt as an `AsyncLLM`'s engine takes it, with processed images. Send the prompt at once, because
        vLLM's cache assumes that its images were sent. For another try, render again."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        parsed = parse_model_prompt(self.renderer.model_config, prompt.for_engine())
        (rendered,) = await self.renderer.render_cmpl_async([parsed], **options)
        return rendered

    @contextmanager
    def looking(self, prompts: Sequence[Prompt], wanted: Sequence[bool]) -> Iterator[list[Seen]]:
        """Yield a list that one `LLM.generate` of `prompts` fills with the digests of each prompt's images; [] if the
        prompt is not `wanted`. `LLM` renders prompts itself, one by one, in order, so its renderer is wrapped.

        If a prompt is a prefix of a rendered prompt, with the same images, it is not rendered again."""
        if not any(prompt.images for prompt in prompts):
            yield [[] for _ in prompts]
            return
        render, found = self.renderer.process_for_engine, list[Seen]()
        # id of a prompt's list of images -> (prompt, rendered prompt). Ids stay unique, as `prompts` keeps the lists.
        known: dict[int, tuple[Prompt, EngineInput]] = {}

        def process(asked: object, arrival_time: float, **kwargs: object) -> EngineInput:
            prompt, looks = prompts[len(found)], wanted[len(found)]
            # Images that were processed once are reused, because processing and hashing take milliseconds in which the
            # device waits. `grpo` sends a prompt several times. A weight check scores an answer and also prefixes of
            # it.
            whole, before = known.get(id(prompt.images), (prompt, None))
            rendered = None if before is None else beginning(whole, before, prompt)
            if rendered is None:
                rendered = render(asked, arrival_time, **kwargs)
                if prompt.images:
                    known[id(prompt.images)] = prompt, rendered
            # The rendered prompt is copied, because it is kept for other prompts.
            rendered = {**rendered, "arrival_time": arrival_time}
            seen = self.seen(rendered) if looks else []
            if None in seen:
                seen = self.seen(render(asked, arrival_time, **{**kwargs, "skip_mm_cache": True}))
            found.append(seen)
            return rendered

        self.renderer.process_for_engine = process
        try:
            yield found
        finally:
            # The wrapper is an attribute of the instance. Deleting the wrapper makes the class's method visible again.
            del self.renderer.process_for_engine

    def seen(self, rendered: EngineInput) -> list[Future[ProcessedImage] | None]:
        """Start to compute the digests of a rendered prompt's images. Return the digests' futures in order; None for an
        image whose pixels are not known."""
        hashes, items = (rendered.get(field, {}).get("image", ()) for field in ("mm_hashes", "mm_kwargs"))
        with self._lock:
            return [self._of(key, item) for key, item in zip(hashes, items, strict=True)]

    def _of(self, key: str, item: MultiModalKwargsItem | None) -> Future[ProcessedImage] | None:
        if key not in self._known:
            values = {} if item is None else item.get_data()
            if "pixel_values" not in values:
                return None
            grid = values["image_grid_thw"].flatten().tolist()
            pixels, self._dtype = values["pixel_values"], str(values["pixel_values"].dtype).removeprefix("torch.")
            self._known[key] = self._threads.submit(seen_image, [pixels], size=pixels.numel(), grid=grid)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def result(self, prompt: Prompt, seen: Seen) -> ProcessedImages | None:
        """Wait for the digests, and return the processed images; None without images."""
        return self.processed(prompt, [one.result() for one in seen if one is not None])

    def processed(self, prompt: Prompt, images: Sequence[ProcessedImage]) -> ProcessedImages | None:
        """Return the processed images of a request; None if it has none."""
        if not images:
            return None
        if not self._settings:
            self._settings = self._read_settings(prompt)
        said = {"images": images, "dtype": self._dtype, "settings": self._settings}
        return ProcessedImages.model_validate(said)

    def _read_settings(self, prompt: Prompt) -> dict[str, str]:
        info = self.renderer.get_mm_processor().info
        asked: Any = prompt.for_engine().get("mm_processor_kwargs", {})
        overrides = dict(info.ctx.get_merged_mm_kwargs(asked))
        # The engine's processor gives levels (0 to 255) if vLLM scales and normalizes on the device.
        if self._dtype == LEVELS:
            overrides |= {"do_rescale": True, "do_normalize": True}
        # With the same arguments as the model's code, vLLM returns its cached processor. With other arguments vLLM
        # would read the files again and copy the tokenizer several times: 4 s for a vocabulary of 152,000.
        return settings_of(info.get_hf_processor(**asked).image_processor, overrides)


def beginning(whole: Prompt, rendered: EngineInput, prompt: Prompt) -> EngineInput | None:
    """Return what vLLM would render for `prompt`, cut from `rendered`, which vLLM rendered for `whole`. `whole` and
    `prompt` have the same images. None if `whole` does not begin with `prompt` and all images."""
    number = len(prompt.token_ids)
    if whole.token_ids[:number] != prompt.token_ids or whole.pixels != prompt.pixels:
        return None
    places = [place for several in rendered.get("mm_placeholders", {}).values() for place in several]
    token_ids = rendered["prompt_token_ids"]
    end = len(token_ids) - (len(whole.token_ids) - number)
    if any(place.offset + place.length > end for place in places):
        return None  # `prompt` ends within an image
    return {**rendered, "prompt_token_ids": token_ids[:end]}


class Look:
    """Reads the processed images of one request to an `AsyncLLM`."""

    def __init__(self, images: EngineImages, prompt: Prompt) -> None:
        self._images, self._prompt = images, prompt
        self._seen: Seen = ()

    async def render(self, **options: bool) -> EngineInput:
        """Return what `EngineImages.render` returns, and begin to compute the images' digests."""
        rendered = await self._images.render(self._prompt, **options)
        self._seen = self._images.seen(rendered)
        return rendered

    async def result(self) -> ProcessedImages | None:
        """Return the images that `render` processed; None if the request has none."""
        if None in self._seen:
            await self.render(skip_mm_cache=True)
        images = [await asyncio.wrap_future(one) for one in self._seen if one is not None]
        return self._images.processed(self._prompt, images)
