"""Checks that learner and engine feed the vision tower the same pixels (R45).

In: an image processor's output for a request's images, before it is copied to the device. Out: `ProcessedImages`, small
enough to be sent with every answer. `check_pixels` compares the results of the two sides.

Equal digests mean equal pixels. A digest is taken of the values in the type that the engine's processor returns: the
model's type, or levels from 0 to 255 if vLLM normalizes on the device. The learner converts its own values to that type
(`ImageProcessing.as_type`). If digests differ, sample values are compared. The settings of both sides help to explain a
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from shared.errors import ServerMismatchError
from shared.wire import ProcessedImage, ProcessedImages

if TYPE_CHECKING:
    import torch
    from transformers.image_processing_utils import BaseImageProcessor

LEVELS = "uint8"  # the type of pixels that are not normalized yet
NUM_VALUES = 256
TOLERANCE = 0.02  # max difference of normalized values: two or three of 256 levels
LEVELS_TOLERANCE = 2.0
# The stride is a prime, so that the sampled values cover all channels and all positions within a patch.
_STRIDE = 7919
# Number of patches converted at a time. With few patches at a time, temporary values stay in the processor's cache.
_ROWS = 512
_SETTINGS = (
    "size",
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "resample",
    "do_resize",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
)
_NORMALIZING = {"do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"}
_VERSIONS = {"transformers", "torchvision", "pillow"}  # both sides may have different versions of these libraries


@dataclass(frozen=True, kw_only=True)
class ImageProcessing:
    """The learner's conversion of levels to pixel values: level * scale + shift, per channel."""

    settings: Mapping[str, str]
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @classmethod
    def of(cls, image_processor: BaseImageProcessor) -> ImageProcessing:
        factor = image_processor.rescale_factor if image_processor.do_rescale else 1.0
        means, stds = image_processor.image_mean, image_processor.image_std
        if not image_processor.do_normalize:
            means, stds = [0.0] * len(means), [1.0] * len(stds)
        return cls(
            settings=settings_of(image_processor),
            scale=tuple(factor / std for std in stds),
            shift=tuple(-mean / std for mean, std in zip(means, stds, strict=True)),
        )

    def processed(self, pixel_values: torch.Tensor, grids: torch.Tensor, dtype: str) -> ProcessedImages:
        """Return digests and sample values of one request's images. `pixel_values` `[P, patch_dim]`: the patches of all
        images, one image after another; `grids` `[I, 3]`; `dtype`: the engine's type of pixel values."""
        parts = pixel_values.split(grids.prod(dim=1).tolist())
        return ProcessedImages(
            images=[
                seen_image(self.as_type(part, dtype), size=part.numel(), grid=grid)
                for part, grid in zip(parts, grids.tolist(), strict=True)
            ],
            dtype=dtype,
            settings=dict(self.settings),
        )

    def as_type(self, pixel_values: torch.Tensor, dtype: str) -> Iterator[torch.Tensor]:
        """Yield the values converted to the engine's `dtype`, in parts."""
        import torch

        channels = len(self.scale)
        scale, shift = (torch.tensor(values, dtype=torch.float64)[:, None] for values in (self.scale, self.shift))
        # 0.5 is added, because the cast to uint8 rounds down.
        times, plus = (1 / scale).float(), (0.5 - shift / scale).float()
        for rows in pixel_values.split(_ROWS):
            if dtype == LEVELS:
                yield (rows.view(len(rows), channels, -1) * times).add_(plus).clamp_(0, 255).to(torch.uint8)
            else:
                yield rows.to(getattr(torch, dtype))


def seen_image(parts: Iterable[torch.Tensor], *, size: int, grid: Iterable[int]) -> ProcessedImage:
    """Return digest and sample values of one image. `parts`: tensors `[P, patch_dim]` that together hold all patches of
    the image. `size`: the number of all values. `grid`: the numbers of patches in time, height and width."""
    import torch

    digest, values, begin = hashlib.sha256(), list[float](), 0
    number = torch.arange(min(NUM_VALUES, size))
    # One value is taken from each of equally long spans.
    places = number * size // max(1, len(number))
    places += number * _STRIDE % max(1, size // max(1, len(number)))
    for part in parts:
        flat = part.contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
        inside = places[(places >= begin) & (places < begin + len(flat))] - begin
        values += flat[inside].float().tolist()
        begin += len(flat)
    return ProcessedImage(
        digest=digest.hexdigest()[:32],
        grid=[int(count) for count in grid],
        values=[round(value, 4) for value in values],
    )


def settings_of(image_processor: BaseImageProcessor, overrides: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the settings that decide how images are resized and scaled, as text. `overrides`: settings that a call of
    the processor replaces."""
    own = {name: getattr(image_processor, name, None) for name in _SETTINGS} | dict(overrides or {})
    found = {name: _in_words(own[name]) for name in _SETTINGS if own[name] is not None}
    return {"processor": type(image_processor).__name__, **found, **_versions()}


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping) or hasattr(value, "shortest_edge"):  # different classes of mappings are shown alike
        return " ".join(f"{name}={number}" for name, number in sorted(dict(value).items()))
    return str(list(value) if isinstance(value, tuple | list) else getattr(value, "value", value))


def _versions() -> dict[str, str]:
    found = {}
    for name in sorted(_VERSIONS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_pixels(mine: ProcessedImages, theirs: ProcessedImages, *, sample_id: str, name: str) -> float:
    """Return the largest difference of pixel values: 0.0, or a difference as small as rounding errors. `name`: the
    other side in messages. Raises ServerMismatchError if the other side's vision tower sees other pixels than the
    learner's."""
    settings = {**mine.settings, **theirs.settings}
    others = [key for key in settings if mine.settings.get(key) != theirs.settings.get(key)]
    # If the two sides normalize differently, equal levels become different values.
    normalized_alike = mine.dtype != LEVELS or not set(others) & _NORMALIZING
    if mine.images == theirs.images and normalized_alike:
        return 0.0
    # Libraries may round a resized pixel to the next level on another processor, which is not an error.
    gap = max(_gaps(mine, theirs), default=0.0)
    if _grids(mine) == _grids(theirs) and gap <= _tolerance(mine.dtype) and set(others) <= _VERSIONS:
        return gap
    raise ServerMismatchError(
        f"{name}: the vision tower is fed other pixels of sample {sample_id!r} than the learner's. "
        f"{_likely_cause(mine, theirs, others)}",
        found=f"grids {_grids(theirs)}, values off by up to {gap:.3f}; {_told(theirs.settings)}",
        wanted=f"grids {_grids(mine)}, and the same values; {_told(mine.settings)}",
        remedy="serve the same checkpoint folder with the same versions of the libraries, set the server's min_pixels "
        "and max_pixels to model.min_pixels and model.max_pixels, and let both sides read the same files",
    )


def _grids(seen: ProcessedImages) -> list[list[int]]:
    return [image.grid for image in seen.images]


def _gaps(mine: ProcessedImages, theirs: ProcessedImages) -> list[float]:
    """Return the differences between the sampled values, for all images one after another."""
    pairs = zip(mine.images, theirs.images, strict=False)
    return [abs(a - b) for one, other in pairs for a, b in zip(one.values, other.values, strict=False)]


def _told(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "settings not known"


def _likely_cause(mine: ProcessedImages, theirs: ProcessedImages, others: Sequence[str]) -> str:
    """Return a guess of the cause, as one sentence."""
    if others and mine.settings:
        differences = [f"{name} {theirs.settings.get(name)}, not {mine.settings.get(name)}" for name in others]
        return f"Likely cause: settings of the image processor or versions differ: {'; '.join(differences)}."
    if len(mine.images) != len(theirs.images):
        return f"Likely cause: another number of images, {len(theirs.images)}, not {len(mine.images)}."
    if _grids(theirs) != _grids(mine):
        turned = [[time, width, height] for time, height, width in _grids(mine)]
        how = "is turned: one side ignores its EXIF orientation" if _grids(theirs) == turned else "has another size"
        return f"Likely cause: the same settings, but the image {how}."
    where = _where(_gaps(mine, theirs), _tolerance(mine.dtype))
    return f"Likely cause: the same settings and sizes, so other bytes: {where}."


def _tolerance(dtype: str) -> float:
    return LEVELS_TOLERANCE if dtype == LEVELS else TOLERANCE


def _where(gaps: Sequence[float], tolerance: float) -> str:
    wrong = [i for i, gap in enumerate(gaps) if gap > tolerance]
    if wrong and wrong[0] > 0.1 * len(gaps) and len(wrong) > 0.5 * (len(gaps) - wrong[0]):
        return "only the end of the image differs, as of a file that was cut off on its way"
    return "swapped colour channels, an EXIF orientation that one side ignores, or a file that has changed"
