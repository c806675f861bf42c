"""Makes the pixels of an augmented picture from the photograph and its `View`, with torchvision's transforms (v2).

In: a view, and `Images` to read with. Out: a picture, with the same bytes in every process. Data workers, rollout
backends and pictures for people (`check --draw`, logs) use it.
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from PIL import Image

from learner.records import Sample, View
from shared.errors import MediaError
from shared.image_rules import media_error
from shared.images import ImageRules, Images

_SHOWN_SIDE = 640  # max side in pixels of a picture in a log
_QUALITY = 85


@cache
def _transforms() -> Any:
    """Return torchvision's functions. The transforms are imported here because importing torch takes seconds, and most
    of `learner.data` does not need torch."""
    from torchvision.transforms.v2 import functional

    return functional


def render(view: View, image: str, images: Images) -> Image.Image:
    """Return the picture in RGB. Raises MediaError if the photograph cannot be read or does not have its annotated
    size."""
    transforms, photograph = _transforms(), images.load(image)
    if photograph.size != view.photograph:
        found = f"{photograph.width} x {photograph.height} pixels"
        wanted = f"{view.photograph[0]} x {view.photograph[1]}, as its annotation says"
        raise media_error(image, found, wanted, "correct the annotation, or set data.augment: null")
    left, top, right, bottom = view.window
    made = transforms.resized_crop(
        photograph,
        top,
        left,
        bottom - top,
        right - left,
        # torchvision takes the height first, and a quarter turn swaps the sides later.
        size=list(view.size if view.quarter_turn else view.size[::-1]),
        interpolation=transforms.InterpolationMode.BICUBIC,
    )
    if view.quarter_turn:
        made = transforms.rotate(made, 90, expand=True)
    if view.flip_horizontal:
        made = transforms.horizontal_flip(made)
    if view.flip_vertical:
        made = transforms.vertical_flip(made)
    for name in ("brightness", "contrast", "saturation"):
        if (factor := getattr(view, name)) != 1.0:
            made = getattr(transforms, f"adjust_{name}")(made, factor)
    assert isinstance(made, Image.Image)
    return made


def open_images(sample: Sample, images: Images) -> list[Image.Image]:
    """Return the sample's images as the model sees them. Raises MediaError."""
    if sample.view is not None:
        return [render(sample.view, sample.images[0], images)]
    return [images.load(image) for image in sample.images]


def sent_images(sample: Sample, images: Images) -> list[str]:
    """Return the sample's images as strings for a server. An augmented picture becomes a lossless PNG. Raises
    MediaError."""
    if sample.view is None:
        return list(sample.images)
    return [data_url(render(sample.view, sample.images[0], images))]


def with_small_images(sample: Sample, images: Images, side: int) -> Sample:
    """Return the sample with images of at most `side` pixels a side, stored in the sample. Raises MediaError."""
    pictures = [one.resize((min(one.width, side), min(one.height, side))) for one in open_images(sample, images)]
    if not pictures:
        return sample
    urls = tuple(data_url(picture) for picture in pictures)
    sizes = tuple(picture.size for picture in pictures) if sample.sizes else ()
    return replace(sample, images=urls, width=pictures[0].width, height=pictures[0].height, view=None, sizes=sizes)


def shown_images(sample: Sample) -> list[str]:
    """Return the sample's images as strings for a log. An augmented picture becomes a small JPEG. Return [] if the
    sample's photograph cannot be read."""
    if sample.view is None:
        return list(sample.images)
    try:
        picture = render(sample.view, sample.images[0], Images(ImageRules()))
    except MediaError:
        return []
    picture.thumbnail((_SHOWN_SIDE, _SHOWN_SIDE))
    return [data_url(picture, "JPEG")]


def shown_sizes(sample: Sample) -> dict[str, object]:
    """Return width and height of the images of `shown_images`, as JSON; for several images also `sizes`."""
    sizes = {"sizes": [list(size) for size in sample.sizes]} if sample.sizes else {}
    return {"width": sample.width, "height": sample.height, **sizes}


def data_url(picture: Image.Image, kind: Literal["PNG", "JPEG"] = "PNG") -> str:
    """Return a picture as a string. A PNG is stored without loss."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"compress_level": 1} if kind == "PNG" else {"quality": _QUALITY}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
