"""The pixels of an augmented picture, made by torchvision's transforms (v2) from the photographs that a `View` names.

In: a view, and `Images` to read with. Out: a picture, the same bytes wherever it is made. Called by the prompt encoder
in data workers, by rollout backends, and for people (`check --draw`, logs).
"""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

from PIL import Image

from learner.records import Crop, Sample, View
from shared.errors import MediaError
from shared.image_rules import media_error
from shared.images import ImageRules, Images

_SHOWN_SIDE = 640  # pixels, of a picture in a log
_QUALITY = 85


@cache
def _transforms() -> Any:
    """Return torchvision's functions. They are imported here, because torch takes seconds and most of `learner.data`
    needs none."""
    from torchvision.transforms.v2 import functional

    return functional


def render(view: View, images: Images) -> Image.Image:
    """Return the picture in RGB. Raises MediaError for a photograph that can't be read or is not of the size that was
    annotated."""
    parts = [_cut(crop, images) for crop in view.crops]
    if len(parts) == 1:
        (picture,) = parts
    else:
        picture = Image.new("RGB", view.size)
        for crop, made in zip(view.crops, parts, strict=True):
            picture.paste(made, crop.place[:2])
    return _recolored(picture, view)


def _cut(crop: Crop, images: Images) -> Image.Image:
    transforms, photograph = _transforms(), images.load(crop.image)
    if photograph.size != crop.size:
        found = f"{photograph.width} x {photograph.height} pixels"
        wanted = f"{crop.size[0]} x {crop.size[1]}, as its annotation says"
        raise media_error(crop.image, found, wanted, "correct the annotation, or set data.augment: null")
    left, top, right, bottom = crop.window
    width, height = crop.place[2] - crop.place[0], crop.place[3] - crop.place[1]
    made = transforms.resized_crop(
        photograph,
        top,
        left,
        bottom - top,
        right - left,
        size=[width, height] if crop.quarter_turn else [height, width],
        interpolation=transforms.InterpolationMode.BICUBIC,
    )
    if crop.quarter_turn:
        made = transforms.rotate(made, 90, expand=True)
    if crop.flip_horizontal:
        made = transforms.horizontal_flip(made)
    if crop.flip_vertical:
        made = transforms.vertical_flip(made)
    assert isinstance(made, Image.Image)
    return made


def _recolored(picture: Image.Image, view: View) -> Image.Image:
    transforms = _transforms()
    for name in ("brightness", "contrast", "saturation"):
        if (factor := getattr(view, name)) != 1.0:
            picture = getattr(transforms, f"adjust_{name}")(picture, factor)
    return transforms.adjust_hue(picture, view.hue) if view.hue else picture


def open_images(sample: Sample, images: Images) -> list[Image.Image]:
    """Return what the model sees of the sample. Raises MediaError."""
    if sample.view is not None:
        return [render(sample.view, images)]
    return [images.load(image) for image in sample.images]


def sent_images(sample: Sample, images: Images) -> list[str]:
    """Return the sample's images as strings for a server: an augmented picture as PNG, which loses nothing. Raises
    MediaError."""
    return list(sample.images) if sample.view is None else [_data_url(render(sample.view, images), "PNG")]


def shown_images(sample: Sample) -> list[str]:
    """Return the sample's images as strings for a log that people look at: an augmented picture as a small JPEG. Empty
    if its photographs can't be read here."""
    if sample.view is None:
        return list(sample.images)
    try:
        picture = render(sample.view, Images(ImageRules()))
    except MediaError:
        return []
    picture.thumbnail((_SHOWN_SIDE, _SHOWN_SIDE))
    return [_data_url(picture, "JPEG")]


def shown_sizes(sample: Sample) -> dict[str, object]:
    """Return width and height of what `shown_images` shows, as JSON; of several images also each one's, as `sizes`."""
    sizes = {"sizes": [list(size) for size in sample.sizes]} if sample.sizes else {}
    return {"width": sample.width, "height": sample.height, **sizes}


def _data_url(picture: Image.Image, kind: str) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"compress_level": 1} if kind == "PNG" else {"quality": _QUALITY}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
