"""A request's messages and images, made into what the engine takes: prompt token ids and decoded images (R03, R13).

Messages are rendered as they come: the learner drops a trailing assistant turn, not the server. Which image strings are
allowed is in `shared/images.py`. Everything here blocks; `engine.py` calls it on threads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout_server.config import ServerConfig
from shared.errors import MediaError, RequestError
from shared.generation import IMAGE_PLACEHOLDER, Prompt, limit_pixels, render_messages
from shared.images import Images
from shared.wire import RolloutInferRequest

if TYPE_CHECKING:
    from PIL import Image


class Renderer:
    """Holds the model's processor, or its tokenizer where it has no processor."""

    def __init__(self, model_path: str, config: ServerConfig) -> None:
        from transformers import AutoProcessor, PreTrainedTokenizerBase

        self._most_images, self._images = config.max_images_per_request, Images(config.image_rules)
        self._processor: Any = AutoProcessor.from_pretrained(model_path, trust_remote_code=config.trust_remote_code)
        is_tokenizer = isinstance(self._processor, PreTrainedTokenizerBase)
        self.tokenizer: Any = self._processor if is_tokenizer else self._processor.tokenizer
        self._takes_images = not is_tokenizer
        renders = (self._processor.apply_chat_template, self.tokenizer.apply_chat_template)
        self._template_arguments = {name for method in renders for name in inspect.signature(method).parameters}
        self.pixels = limit_pixels(
            self._processor, min_pixels=config.min_pixels, max_pixels=config.max_pixels, keys="the server's "
        )

    def render(self, request: RolloutInferRequest) -> Prompt:
        """Raises MediaError, or RequestError where messages and images do not fit or the template refuses them."""
        sources = image_sources(request)
        self._check_number(len(sources))
        self.check_template_kwargs(request.chat_template_kwargs)
        if sources and not self._takes_images:
            raise RequestError(
                "this model takes no images",
                found=f"{len(sources)} images",
                wanted="text only",
                remedy="serve a vision-language model",
            )
        turns = render_messages([message.model_dump() for message in request.messages], len(sources))
        try:
            text = self._processor.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False, **request.chat_template_kwargs
            )
        except Exception as error:  # templates raise what they like
            raise RequestError(
                "the model's chat template refuses the messages",
                found=f"{type(error).__name__}: {error}",
                wanted="messages that the template takes",
                remedy="check the roles and their order",
            ) from error
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(token_ids=token_ids, images=self._load(sources), pixels=self.pixels)

    def load_images(self, sources: Sequence[str]) -> list[Image.Image]:
        """The images of one request. Raises MediaError."""
        self._check_number(len(sources))
        return self._load(sources)

    def text_of(self, token_ids: list[int]) -> str:
        """What the tokens say, special ones included."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert isinstance(text, str)
        return text

    def check_template_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError for a name that is not a variable of the template but an argument of what renders it:
        one of these replaces the template."""
        arguments = sorted(self._template_arguments & kwargs.keys())
        if arguments:
            raise RequestError(
                "chat_template_kwargs: not variables of the chat template",
                found=", ".join(arguments),
                wanted="variables of the model's own template, such as enable_thinking",
                remedy="remove them",
            )

    def _load(self, sources: Sequence[str]) -> list[Image.Image]:
        return [self._images.load(source) for source in sources]

    def _check_number(self, num_images: int) -> None:
        if num_images > self._most_images:
            raise MediaError(
                "a request has too many images",
                found=str(num_images),
                wanted=f"at most {self._most_images}",
                remedy="raise the server's max_images_per_request",
            )


def image_sources(request: RolloutInferRequest) -> list[str]:
    """The request's images in the order of their places in the messages: a part's own, or the next of `images`. What is
    left of `images` has no place, and comes last."""
    left, sources = iter(request.images), []
    for message in request.messages:
        if isinstance(message.content, str):
            own: list[str | None] = [None] * message.content.count(IMAGE_PLACEHOLDER)
        else:
            own = [part.source for part in message.content if part.type != "text"]
        found = [next(left, None) if source is None else source for source in own]
        sources += [source for source in found if source is not None]
    return [*sources, *left]
