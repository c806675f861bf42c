"""One rendering of chat messages for both programs, so that their prompts tokenize alike (R03).

In: turns whose text may hold `<image>` placeholders, and the number of images. Out: the content-part form that chat
templates of Hugging Face processors take. A turn's placeholders become image parts in place. If a request has images
but no placeholder, the images go before the text of the first user turn (as in ms-swift).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import RequestError

IMAGE_PLACEHOLDER = "<image>"


def render_messages(messages: Sequence[Mapping[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Turns as `{"role", "content": [{"type": "image"} | {"type": "text", "text"}]}`; content stays a plain string
    if there are no images, for text-only templates.

    Raises RequestError if the numbers of placeholders and images differ.
    """
    if num_images == 0 and all(isinstance(m["content"], str) for m in messages):
        if any(IMAGE_PLACEHOLDER in m["content"] for m in messages):
            raise _count_error(messages, num_images)
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    turns = [{"role": m["role"], "content": _parts(m["content"])} for m in messages]
    if num_images and not any(part["type"] == "image" for turn in turns for part in turn["content"]):
        first_user = next((turn for turn in turns if turn["role"] == "user"), None)
        if first_user is not None:
            first_user["content"] = [{"type": "image"}] * num_images + first_user["content"]
    if sum(part["type"] == "image" for turn in turns for part in turn["content"]) != num_images:
        raise _count_error(messages, num_images)
    return turns


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [
            {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in content
        ]
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(content.split(IMAGE_PLACEHOLDER)):
        if i:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _count_error(messages: Sequence[Mapping[str, Any]], num_images: int) -> RequestError:
    return RequestError(
        "image placeholders and images differ in number",
        found=f"{num_images} images for {len(messages)} turns: {[m['content'] for m in messages]!r}"[:300],
        wanted=f"one {IMAGE_PLACEHOLDER} per image, or none at all",
        remedy="fix the sample's messages or images",
    )
