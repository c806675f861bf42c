"""Test images as data URIs, so that the page needs nothing beside itself.

In: an image as a dataset names it: a path, a data URI, or bare base64. Out: PNG for small images, shown with hard
pixels; JPEG of at most MAX_SIDE pixels for others. Every image is decoded and written anew: nothing of the source's
bytes reaches the page. Addresses are not fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

MAX_SIDE, SMALL_SIDE = 720, 256  # pixels
MAX_PIXELS = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    uri: str
    small: bool  # few pixels: enlarge without smoothing


def load_picture(image: str, roots: Sequence[Path]) -> Picture | None:
    """The image, or None where it can't be had. A relative path is looked for under each root in turn."""
    try:
        with Image.open(_source(image, roots)) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                return None
            picture = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None  # the caller draws the scene without it and says so
    small = max(picture.size) <= SMALL_SIDE
    buffer = io.BytesIO()
    if small:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        picture.save(buffer, "JPEG", quality=85)
    kind = "png" if small else "jpeg"
    return Picture(uri=f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", small=small)


def _source(image: str, roots: Sequence[Path]) -> Path | io.BytesIO:
    if image.startswith("data:"):
        return io.BytesIO(base64.b64decode(image.partition(",")[2]))
    for root in roots:
        if len(image) < 4096 and (root / image).is_file():
            return root / image
    try:
        return io.BytesIO(base64.b64decode(image, validate=True))
    except binascii.Error as error:
        raise FileNotFoundError(image[:200]) from error
