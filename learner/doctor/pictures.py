"""`check --draw N`: draws training photographs with their labels, each next to the picture that `data.augment` makes of
it.

In: a configuration and training samples. Out: one JPEG per sample, for people, with the augmentation of the
first epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from learner.config.schema import RunConfig
from learner.data.augment import Augmenter
from learner.data.drawing import draw_object, side_by_side
from learner.data.views import open_images
from learner.records import Sample
from learner.run.files import writing
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ProjectError
from shared.images import Images

OPTION = "--draw"
LABEL, IGNORED = (0, 170, 70), (240, 130, 0)
_SIDE = 640  # max length of a picture's longer side, in pixels
_QUALITY = 90


def draw_pictures(config: RunConfig, samples: Sequence[Sample], number: int, out: Path) -> list[Path]:
    """Draw `number` samples, evenly spread over `samples`, into the folder `out`. Raises OutputError, and ConfigErrors
    if samples of this task cannot be drawn."""
    if config.task.type != "detection":
        raise ConfigErrors.one(OPTION, f"task.type: {config.task.type}", "detection", f"leave {OPTION} out")
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
            picture = side_by_side([picture for sample in seen for picture in _labelled(sample, images)])
            readable = "".join(c if c.isalnum() or c in "-_." else "-" for c in samples[index].sample_id)[:80]
            paths.append(out / f"{place + 1:03d}-{readable}.jpg")
            with writing(paths[-1]):
                picture.save(paths[-1], format="JPEG", quality=_QUALITY)
    except ProjectError as error:
        raise ConfigErrors(mistakes=[Mistake.of(error, OPTION)]) from error
    return paths


def _labelled(sample: Sample, images: Images) -> list[Image.Image]:
    """Return the sample's images as the model sees them, with labels in green and ignore regions in orange."""
    pictures = open_images(sample, images)
    for number, picture in enumerate(pictures, start=1):
        picture.thumbnail((_SIDE, _SIDE))
        for objects, color in ((sample.ignored, IGNORED), (sample.objects, LABEL)):
            for obj in objects:
                if obj.image in (None, number):
                    draw_object(picture, obj.desc, obj.kind, obj.bins, color)
    return pictures
