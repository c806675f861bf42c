"""Photographs in, scored boxes out: `Detector(path).predict(images)`.

    from learner.detector import Detector

    with Detector("runs/cells") as detector:
        for prediction in detector.predict(["a.jpg", "b.jpg"]):
            print(prediction.name, prediction.boxes)

The model is asked as training asked it (`inference.json` beside its weights). Every box has a score. If the model has a
calibration, the score is the probability that the box is right. Without a calibration the score only ranks boxes: it
rises with the probability of their tokens.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from PIL import Image

from learner.data.tiles import Tile, tiles_of
from learner.data.views import data_url
from learner.detector.answers import Answers, AnswerSettings
from learner.detector.boxes import Prediction, ScoredBox, in_pixels, merge
from learner.detector.first_boxes import FirstReader
from learner.detector.inputs import InputImage
from learner.detector.model import ModelFiles, find_model, require_boxes, require_classes, require_one_image_prompt
from learner.records import ParsedRollout, PredictedObject, Rollout, Sample
from learner.tasks.detection.scores import Calibration, ScoredObject, read_calibration, scored_objects
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of
from shared.errors import ConfigError, DataError, MediaError, RequestError
from shared.generation import Turn, render_messages
from shared.images import ImageRules, Images

Photograph = str | Path | Image.Image
MOST_BYTES = 64 << 20  # max bytes of images in one call to a server
MOST_PATH = 4096  # max characters of an image's path


class Parts(NamedTuple):
    """An image's tiles, and the sample (prompt and picture) for each tile. For a record of several images, each image
    is one tile, and all tiles are in one sample."""

    tiles: list[Tile]
    samples: list[Sample]


class Ask(NamedTuple):
    """Images that are in one request to the model: one image, or the images of a record. `places` are their indexes
    among all images that the command or the call of `Detector.predict` got."""

    places: list[int]
    parts: Parts | MediaError


class Detector:
    """A model that predicts the objects in images. The first prediction opens the backend; `close`, or the end of a
    `with` block, closes it."""

    def __init__(
        self,
        path: str | Path | ModelFiles,
        *,
        asked: AnswerSettings | None = None,
        classes: Sequence[str] = (),
        conf: float = 0.0,
        tile: int | None = None,
        calibration: Calibration | None = None,
        **options: Any,
    ) -> None:
        """`options` are fields of `AnswerSettings`, such as `samples=4` or `backend="hf"`. Boxes with a score below
        `conf` are left out, and so are boxes of classes that are not in `classes`, unless `classes` is (). A model that
        this project did not train is asked for `classes`. `tile`: the longer side of tiles, in pixels.

        Raises ConfigError."""
        self.model = path if isinstance(path, ModelFiles) else find_model(path, classes=classes)
        require_boxes(self.model)
        require_classes(self.model, classes)
        self.asked = asked or AnswerSettings(**options)
        self.classes, self.conf, self.tile = frozenset(classes), conf, tile
        self.calibration = calibration or read_calibration(self.model.folder, samples=self.asked.samples)
        self.answers = Answers(self.model, self.asked)
        self.task = DetectionTask(self.model.settings.task, self.answers.encoder.tokenizer)
        self._pieces = pieces_of(self.task.tokenizer)
        settings, unit = self.model.settings, self.model.writes
        self._first = FirstReader(self.model.folder, settings, unit, self._pieces) if unit is not None else None
        self._images = Images(ImageRules())
        self._is_open = False
        self.heard: Callable[[ParsedRollout], object] | None = None  # is called with each parsed greedy answer

    def __enter__(self) -> Self:
        if not self._is_open:
            self.answers.__enter__()
            self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._is_open:
            self.answers.__exit__(None, None, None)
            self._is_open = False

    def predict(self, images: Photograph | Iterable[Photograph]) -> list[Prediction]:
        """Return one prediction per image, in order. Raises MediaError if an image cannot be used."""
        given = [images] if isinstance(images, str | Path | Image.Image) else list(images)
        found: list[Prediction] = []
        for _, one in self.predictions({place: _input(place + 1, image) for place, image in enumerate(given)}):
            if not isinstance(one, Prediction):
                raise one
            found.append(one)
        return found

    def predictions(self, line: Mapping[int, InputImage]) -> Iterator[tuple[int, Prediction | MediaError]]:
        """Yield the index and the prediction of each image, some images at a time. If an image cannot be used, its
        MediaError is yielded instead. `line` has images by their indexes among all images of the command or the call;
        the seeds of sampled answers depend on these indexes. Images of one record are neighbours. Raises ConfigError if
        the model cannot be asked about the images."""
        self._require_askable(line.values())
        self.__enter__()
        waiting: dict[int, Ask] = {}
        for first, places in _asks(line).items():
            waiting[first] = Ask(places, self._parts(line[places[0]]))
            if self._is_enough(waiting.values()):
                yield from self._answered(waiting, line)
                waiting = {}
        yield from self._answered(waiting, line)

    def _require_askable(self, images: Collection[InputImage]) -> None:
        if any(image.record is None for image in images):
            require_one_image_prompt(self.model)
        record = next((image.record for image in images if image.record is not None), None)
        if record is not None and self.tile is not None:
            raise ConfigError(
                "several images of a record are not cut into tiles",
                found=f"--tile {self.tile}, and sample {record.sample_id} with {len(record.images)} images",
                wanted="photographs, one by one",
                remedy="leave --tile out, or make one record of each image",
            )

    def _is_enough(self, waiting: Collection[Ask]) -> bool:
        """Return True if these images keep the backend busy, or have as many bytes as one call should send."""
        samples = [sample for one in waiting if isinstance(one.parts, Parts) for sample in one.parts.samples]
        sent = sum(len(image) for sample in samples for image in sample.images) * max(1, self.asked.samples)
        return len(samples) >= self.answers.images_at_once or sent >= MOST_BYTES

    def _answered(
        self, waiting: Mapping[int, Ask], line: Mapping[int, InputImage]
    ) -> Iterator[tuple[int, Prediction | MediaError]]:
        asked = {first: one.parts.samples for first, one in waiting.items() if isinstance(one.parts, Parts)}
        answers = self.answers.of(asked) if asked else {}
        for first, one in waiting.items():
            for place in one.places:
                if isinstance(one.parts, Parts):
                    yield place, self._prediction(line[place], one.parts.tiles, answers[first])
                else:
                    yield place, one.parts

    def _parts(self, image: InputImage) -> Parts | MediaError:
        try:
            if image.record is not None:
                tiles, samples = self._whole_record(image.record)
            else:
                picture = self._images.load(image.source)
                tiles = tiles_of(picture.width, picture.height, self.tile)
                sources = [self._sent(image.source), *(data_url(picture.crop(tile)) for tile in tiles[1:])]
                named = zip(sources, tiles, strict=True)
                samples = [self._sample(str(image.id), source, tile) for source, tile in named]
            # `num_tokens` raises an error if the model cannot take the shape of the image.
            self.answers.encoder.num_tokens(samples[0])
        except MediaError as error:
            return error
        except DataError as error:  # the sample that was made of the image is wrong
            return MediaError(
                f"image {image.source[-300:]!r} can't be used",
                found=error.found,
                wanted=error.wanted,
                remedy="crop the image, or make parts of it",
            )
        return Parts(tiles, samples)

    def _whole_record(self, record: Sample) -> Parts:
        """Return a record with the model's own prompt if that prompt is for this number of images, otherwise with the
        record's own prompt."""
        sizes = [self._images.load(source).size for source in record.images]
        messages: Sequence[Turn] = self.model.settings.messages
        try:
            render_messages(messages, len(record.images))
        except RequestError:
            messages = record.messages
        sample = Sample(
            sample_id=record.sample_id,
            messages=tuple(messages),
            images=tuple(map(self._sent, record.images)),
            objects=(),
            width=sizes[0][0],
            height=sizes[0][1],
            sizes=tuple(sizes),
        )
        return Parts([Tile(0, 0, *size) for size in sizes], [sample])

    def _sent(self, source: str) -> str:
        """Return an image as it is sent to the model: unchanged, except that a server gets the bytes of a file."""
        path = Path(source.removeprefix("file://")) if len(source) < MOST_PATH else None
        if self.asked.server is None or path is None or not path.is_file():
            return source
        # The server may be on another machine, or may not read this folder.
        kind = mimetypes.guess_type(path.name)[0] or "image/jpeg"
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"

    def _sample(self, name: str, source: str, tile: Tile) -> Sample:
        return Sample(
            sample_id=name,
            messages=tuple(self.model.settings.messages),
            images=(source,),
            objects=(),
            width=tile.right - tile.left,
            height=tile.bottom - tile.top,
        )

    def _prediction(self, image: InputImage, tiles: Sequence[Tile], answers: Sequence[Sequence[Rollout]]) -> Prediction:
        if image.record is not None:
            whole = tiles[image.number - 1]
            boxes = self._boxes(whole, answers[0], image.image)
        else:
            whole = tiles[0]
            found = [(tile, self._boxes(tile, own)) for tile, own in zip(tiles, answers, strict=True)]
            boxes = merge(found, whole.right, whole.bottom) if len(tiles) > 1 else found[0][1]
        return Prediction(
            id=image.id,
            name=image.name,
            source=image.source,
            width=whole.right,
            height=whole.bottom,
            boxes=tuple(box for box in boxes if box.score >= self.conf),
            truncated=any(own[0].finish_reason == "length" for own in answers),
        )

    def _boxes(self, tile: Tile, answers: Sequence[Rollout], number: int | None = None) -> list[ScoredBox]:
        """Return the boxes of one tile, best first. `number`: if the sample has several images, the number of the image
        whose boxes are returned."""
        parsed = [self.task.parse(answer) for answer in answers]
        # The model was not trained by this project, so its answer has another form.
        if self._first is not None:
            size = tile.right - tile.left, tile.bottom - tile.top
            found = [ScoredObject(obj, score, None) for obj, score in self._first.objects(answers[0], size)]
            own = tuple(PredictedObject(one.object, range(0)) for one in found)
            parsed[0] = replace(parsed[0], objects=own, usable=True, drops={})
        else:
            found = scored_objects(parsed, self._pieces, self.calibration)
        if self.heard is not None:
            self.heard(parsed[0])
        boxes = [
            ScoredBox(one.object.desc, one.score, *in_pixels(one.object, tile), one.votes)
            for one in found
            if one.object.image == number and (not self.classes or one.object.desc in self.classes)
        ]
        return sorted(boxes, key=lambda box: -box.score)


def _asks(line: Mapping[int, InputImage]) -> dict[int, list[int]]:
    """Return the indexes of the images of each request, by the index of the request's first image."""
    found: dict[int, list[int]] = {}
    for place, image in line.items():
        # The index of a record's first image is computed, because a resumed command may lack that image in `line`.
        found.setdefault(place - (image.number - 1), []).append(place)
    return found


def _input(number: int, image: Photograph) -> InputImage:
    if isinstance(image, Image.Image):
        return InputImage(id=number, source=data_url(image.convert("RGB")), name=f"image {number}")
    return InputImage(id=number, source=str(image), name=Path(str(image)[-200:]).name)
