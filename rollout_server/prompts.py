"""Turns a request's messages and images into the engine's input: prompt token ids and decoded images (R03, R13).

All messages are rendered: the learner, not the server, drops a trailing assistant turn. `shared/images.py` decides
which image strings are allowed. All functions block; `engine.py` calls them on threads.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Hashable, Mapping, Sequence

from PIL import Image

from rollout_server.config import ServerConfig
from rollout_server.decoding import Decoders, PixelShare, check_open
from shared.errors import PromptTooLongError, RequestError
from shared.generation import IMAGE_PLACEHOLDER, Prompt, limit_pixels, render_messages
from shared.wire import Message, RolloutInferRequest

_PIECE_CHARS = 1 << 16
# A text in pieces may have more tokens than the whole text, so the limit for pieces is this many times higher.
_PIECES_MARGIN = 2


class Renderer:
    """Renders requests with the model's processor, or with its tokenizer if it has no processor."""

    def __init__(self, model_path: str, config: ServerConfig) -> None:
        from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

        self.decoders = Decoders(config)
        self._processor: ProcessorMixin | PreTrainedTokenizerBase = AutoProcessor.from_pretrained(
            model_path, trust_remote_code=config.trust_remote_code
        )
        is_tokenizer = isinstance(self._processor, PreTrainedTokenizerBase)
        self.tokenizer: PreTrainedTokenizerBase = self._processor if is_tokenizer else self._processor.tokenizer
        self._takes_images = not is_tokenizer
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        self.max_model_len: int | None = None  # the model's context length; set once the engine knows it
        renders = (self._processor.apply_chat_template, self.tokenizer.apply_chat_template)
        self._template_arguments = {name for method in renders for name in inspect.signature(method).parameters}
        self.pixels = limit_pixels(
            self._processor, min_pixels=config.min_pixels, max_pixels=config.max_pixels, keys="the server's "
        )

    def render(self, request: RolloutInferRequest, share: PixelShare) -> Prompt:
        """Return the prompt. `share` counts the pixels of its images against the server's limit. Raises MediaError,
        ServerBusyError, PromptTooLongError. Raises RequestError if the messages have more or fewer image placeholders
        than images, if the model takes no images, or if the template refuses the messages."""
        sources = image_sources(request)
        self.check_length(text_in(request.messages), share)
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
        except Exception as error:  # a chat template is code of the checkpoint, and can raise anything
            raise RequestError(
                "the model's chat template refuses the messages",
                found=f"{type(error).__name__}: {error}",
                wanted="messages that the template takes",
                remedy="check the roles and their order",
            ) from error
        # The chat template has already written the special tokens.
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        images = self.decoders.load(sources, share)
        # vLLM would digest the images of each request again, all on one thread: 5 ms for 1.65 megapixels.
        ids = tuple(_content_id(image) for image in images)
        return Prompt(token_ids=token_ids, images=images, pixels=self.pixels, image_ids=ids)

    def check_length(self, text: str, share: PixelShare) -> None:
        """Raises PromptTooLongError for a text that cannot fit, usually before all of it is tokenized. Raises
        RequestError if `share` (the request's pixels) is closed."""
        most = self.max_model_len
        # Tokenizing one long text took 25 s of CPU. So a text is tokenized in pieces, and refused once it cannot fit.
        if most is None or len(text) <= _PIECE_CHARS:
            return
        if len(text) > most * self._longest_token:
            raise too_long(f"{len(text)} characters", most)
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            check_open(share.closed)
            piece = text[begin : begin + _PIECE_CHARS]
            num_tokens += len(self.tokenizer(piece, add_special_tokens=False)["input_ids"])
            if num_tokens > _PIECES_MARGIN * most:
                raise too_long(f"more than {num_tokens} tokens in {len(text)} characters", most)

    def text_of(self, token_ids: list[int]) -> str:
        """Return the text of the tokens, special tokens included."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert isinstance(text, str)
        return text

    def check_template_kwargs(self, kwargs: Mapping[str, object]) -> None:
        """Raises RequestError for names that are arguments of the rendering function instead of template variables: an
        argument could replace the template."""
        arguments = sorted(self._template_arguments & kwargs.keys())
        if arguments:
            raise RequestError(
                "chat_template_kwargs: not variables of the chat template",
                found=", ".join(arguments),
                wanted="variables of the model's own template, such as enable_thinking",
                remedy="remove them",
            )


def _content_id(image: Image.Image) -> str:
    """Return a digest of the image's mode, size and pixels."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def too_long(found: str, max_model_len: int) -> PromptTooLongError:
    return PromptTooLongError(
        "the request is longer than the model's context",
        found=found,
        wanted=f"at most {max_model_len} tokens together",
        remedy="raise the server's max_model_len, or lower max_new_tokens or the images' size",
    )


def text_in(messages: Sequence[Message]) -> str:
    """Return all text of the messages that has to be tokenized, without the text that the template adds."""
    contents = [message.content for message in messages]
    return "".join(
        content if isinstance(content, str) else "".join(part.text or "" for part in content) for content in contents
    )


def prompt_key(request: RolloutInferRequest) -> Hashable:
    """Return a key that is equal for requests with the same prompt: the same messages, images and template variables.
    The images' strings are not copied."""
    turns = tuple(message.model_dump_json() for message in request.messages)
    return turns, tuple(request.images), repr(sorted(request.chat_template_kwargs.items()))


def image_sources(request: RolloutInferRequest) -> list[str]:
    """Return the request's images in the order in which its messages show them. An image part without a source gets the
    next of the request's `images`; the remaining `images` come last."""
    left, sources = iter(request.images), []
    for message in request.messages:
        if isinstance(message.content, str):
            own: list[str | None] = [None] * message.content.count(IMAGE_PLACEHOLDER)
        else:
            own = [part.source for part in message.content if part.type != "text"]
        found = [next(left, None) if source is None else source for source in own]
        sources += [source for source in found if source is not None]
    return [*sources, *left]
