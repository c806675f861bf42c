"""`check --draw N`: training photographs with their labels, and beside each what `data.augment` makes of it.

In: a configuration and training samples. Out: one JPEG per sample, for people. Pictures are those of the first epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from learner.config.schema import RunConfig
from learner.data.augment import Augmenter
from learner.data.drawing import draw_object
from learner.data.views import open_images
from learner.records import Sample
from learner.run.files import writing
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ProjectError
from shared.images import Images

OPTION = "--draw"
LABEL, IGNORED = (0, 170, 70), (240, 130, 0)
_SIDE = 640  # pixels, of each of the two
_GAP = 12
_QUALITY = 90


def draw_pictures(config: RunConfig, samples: Sequence[Sample], number: int, out: Path) -> list[Path]:
    """Draw `number` samples, evenly spread over `samples`, into the folder `out`. Raises ConfigErrors if they can't be
    drawn, OutputError."""
    if config.task.type != "detection":
        remedy = f"leave {OPTION} out"
        mistake = Mistake(path=OPTION, found=f"task.type: {config.task.type}", wanted="detection", remedy=remedy)
        raise ConfigErrors(mistakes=[mistake])
    augment, images = config.data.augment, Images(config.data.image_rules)
    number = min(number, len(samples))
    paths = []
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        augmenter = Augmenter(samples, augment, seed=config.training.seed) if augment is not None else None
        for place in range(number):
            index = place * len(samples) // number
            seen = [samples[index]] if augmenter is None else [samples[index], augmenter(index, 0)]
            picture = _side_by_side([_labelled(sample, images) for sample in seen if sample.images])
            paths.append(out / _name(place, samples[index]))
            with writing(paths[-1]):
                picture.save(paths[-1], format="JPEG", quality=_QUALITY)
    except ProjectError as error:
        raise ConfigErrors(mistakes=[Mistake.of(error, OPTION)]) from error
    return paths


def _name(place: int, sample: Sample) -> str:
    readable = "".join(c if c.isalnum() or c in "-_." else "-" for c in sample.sample_id)[:80]
    return f"{place + 1:03d}-{readable}.jpg"


def _labelled(sample: Sample, images: Images) -> Image.Image:
    """Return what the model sees of the sample, with labels in green and ignore regions in orange."""
    picture = open_images(sample, images)[0]
    picture.thumbnail((_SIDE, _SIDE))
    for objects, color in ((sample.ignored, IGNORED), (sample.objects, LABEL)):
        for obj in objects:
            draw_object(picture, obj.desc, obj.kind, obj.bins, color)
    return picture


def _side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    made = Image.new("RGB", (max(1, width), max([1, *(picture.height for picture in pictures)])), "white")
    left = 0
    for picture in pictures:
        made.paste(picture, (left, 0))
        left += picture.width + _GAP
    return made
