"""Images that a request may name: strings in, decoded RGB images out (R13).

A string is a local path (only below configured folders, symlinks resolved), a `data:` URL, plain base64, or an http(s)
URL (only of configured hosts, no redirects to elsewhere). Size in bytes is checked before an image is read, size in
pixels before it is decoded. Every error names the image. Blocking: `engine.py` calls `load_images` on a thread.

A request's messages and images to what the engine takes: prompt token ids, and decoded images (R03, R13).

Trailing assistant turns are the learner's to drop: what comes is what is rendered. Blocking; `engine.py` calls it on
threads.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import httpx
from PIL import Image, UnidentifiedImageError

from rollout_server.config import ServerConfig
from shared.errors import MediaError, RequestError
from shared.generation import Prompt
from shared.prompt import render_messages
from shared.wire import RolloutInferRequest

_FETCH_CHUNK_BYTES = 1 << 16
_MAX_REDIRECTS = 3
_NAME_CHARS = 80
# No image is shorter; a path has a dot before its suffix.
_BASE64 = re.compile(r"[A-Za-z0-9+/]{64,}={0,2}")


def load_images(sources: Sequence[str], config: ServerConfig) -> list[Image.Image]:
    """The images of one request, in order. Raises MediaError."""
    if len(sources) > config.max_images_per_request:
        raise MediaError(
            "a request has too many images",
            found=str(len(sources)),
            wanted=f"at most {config.max_images_per_request}",
            remedy="raise the server's max_images_per_request",
        )
    return [load_image(source, config) for source in sources]


def load_image(source: str, config: ServerConfig) -> Image.Image:
    """One image, RGB, fully decoded. Raises MediaError."""
    return _decode(_read(source, config), source, config)


def _read(source: str, config: ServerConfig) -> bytes:
    scheme = source[:8].lower()
    if scheme.startswith(("http://", "https://")):
        return _fetch(source, config)
    if scheme.startswith("data:"):
        return _from_data_url(source, config)
    if scheme.startswith("file://"):
        return _from_path(source[len("file://") :], source, config)
    if _BASE64.fullmatch(source) and len(source) % 4 == 0:
        return _from_base64(source, source, config)
    return _from_path(source, source, config)


def _from_path(path: str, source: str, config: ServerConfig) -> bytes:
    if not config.allowed_image_roots:
        raise _error(
            source, "local paths are not allowed", "base64 or a data URL", "set allowed_image_roots on the server"
        )
    try:
        resolved = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        # Also what lies outside: whether a file exists there is nobody's business.
        raise _not_there(source, config) from error
    if not any(resolved.is_relative_to(root.resolve()) for root in config.allowed_image_roots):
        raise _not_there(source, config)
    if not resolved.is_file():
        raise _not_there(source, config)
    with resolved.open("rb") as file:
        data = file.read(config.max_image_bytes + 1)
    _check_bytes(len(data), source, config)
    return data


def _not_there(source: str, config: ServerConfig) -> MediaError:
    roots = ", ".join(str(root) for root in config.allowed_image_roots)
    return _error(source, "no such file in an allowed folder", f"a file below {roots}", "check the dataset's paths")


def _from_data_url(source: str, config: ServerConfig) -> bytes:
    header, comma, body = source.partition(",")
    if not comma:
        raise _error(source, "a data URL without a comma", "data:image/png;base64,...", "encode the image again")
    if header.lower().endswith(";base64"):
        return _from_base64(body, source, config)
    _check_bytes(len(body) // 3, source, config)
    return unquote_to_bytes(body)


def _from_base64(text: str, source: str, config: ServerConfig) -> bytes:
    _check_bytes(len(text) * 3 // 4 - 2, source, config)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _error(source, f"text that is not base64 ({error})", "base64", "encode the image again") from error


def _fetch(source: str, config: ServerConfig) -> bytes:
    url = source
    try:
        with httpx.Client(timeout=config.image_timeout_s, follow_redirects=False, trust_env=False) as http:
            for _ in range(_MAX_REDIRECTS + 1):
                _check_host(url, source, config)
                with http.stream("GET", url) as response:
                    if response.is_redirect:
                        url = urljoin(url, response.headers.get("location", ""))
                        continue
                    if response.status_code != httpx.codes.OK:
                        raise _error(source, f"HTTP {response.status_code}", "HTTP 200", "check the URL")
                    return _read_body(response, source, config)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        found = f"{type(error).__name__}: {error}"
        raise _error(source, found, "an answer in time", "check the URL, or image_timeout_s") from error
    raise _error(source, f"more than {_MAX_REDIRECTS} redirects", "the image itself", "use the final URL")


def _check_host(url: str, source: str, config: ServerConfig) -> None:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or parts.hostname not in config.allowed_image_hosts:
        allowed = ", ".join(config.allowed_image_hosts) or "none"
        found = f"host {parts.hostname!r} over {parts.scheme or 'nothing'}"
        raise _error(source, found, f"http(s) to one of: {allowed}", "set allowed_image_hosts on the server")


def _read_body(response: httpx.Response, source: str, config: ServerConfig) -> bytes:
    data = bytearray()
    for chunk in response.iter_bytes(_FETCH_CHUNK_BYTES):
        data += chunk
        _check_bytes(len(data), source, config)
    return bytes(data)


def _decode(data: bytes, source: str, config: ServerConfig) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit follows
            image = Image.open(io.BytesIO(data))  # reads the header only
        num_pixels = image.width * image.height
        if num_pixels > config.max_image_pixels:
            raise _error(
                source,
                f"{image.width}x{image.height} = {num_pixels} pixels",
                f"at most {config.max_image_pixels}",
                "shrink the image, or raise the server's max_image_pixels",
            )
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _error(source, f"{len(data)} bytes that are no image ({error})", "PNG, JPEG, ...", "mend it") from error


def _check_bytes(num_bytes: int, source: str, config: ServerConfig) -> None:
    if num_bytes > config.max_image_bytes:
        raise _error(
            source,
            f"more than {config.max_image_bytes} bytes",
            f"at most {config.max_image_bytes} bytes",
            "shrink the image, or raise the server's max_image_bytes",
        )


def _error(source: str, found: str, wanted: str, remedy: str) -> MediaError:
    name = source if len(source) <= _NAME_CHARS else f"{source[:_NAME_CHARS]}... ({len(source)} characters)"
    return MediaError(f"image {name!r} can't be used", found=found, wanted=wanted, remedy=remedy)


class Renderer:
    """Holds the model's processor, or its tokenizer where it has no processor."""

    def __init__(self, model_path: str, config: ServerConfig) -> None:
        from transformers import AutoProcessor, PreTrainedTokenizerBase

        self._config = config
        self._processor: Any = AutoProcessor.from_pretrained(model_path, trust_remote_code=config.trust_remote_code)
        is_tokenizer = isinstance(self._processor, PreTrainedTokenizerBase)
        self.tokenizer: Any = self._processor if is_tokenizer else self._processor.tokenizer
        self._takes_images = not is_tokenizer

    def render(self, request: RolloutInferRequest) -> Prompt:
        """Raises MediaError, or RequestError where messages and images do not fit or the template refuses them."""
        sources = [*request.images, *_inline_images(request)]
        if sources and not self._takes_images:
            raise RequestError(
                "this model takes no images",
                found=f"{len(sources)} images",
                wanted="text only",
                remedy="serve a vision-language model",
            )
        turns = render_messages([message.model_dump() for message in request.messages], len(sources))
        try:
            text = self._processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise RequestError(
                "the model's chat template refuses the messages",
                found=f"{type(error).__name__}: {error}",
                wanted="messages that the template takes",
                remedy="check the roles and their order",
            ) from error
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(token_ids=token_ids, images=load_images(sources, self._config))

    def text_of(self, token_ids: list[int]) -> str:
        """What the tokens say, special ones included."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert isinstance(text, str)
        return text


def _inline_images(request: RolloutInferRequest) -> list[str]:
    parts = [part for message in request.messages if not isinstance(message.content, str) for part in message.content]
    return [part.image for part in parts if part.type == "image" and part.image is not None]
