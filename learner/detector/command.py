"""`rollout-learner predict --model DIR INPUT... --out DIR`: finds objects in photographs, and writes them to files.

Prints to stderr a progress bar, a line per unreadable image, and at the end the path of the results. The exit code is 1
if an image was skipped. If a command was interrupted, the same command continues where it stopped.
"""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from learner.config.sections.data import DataConfig
from learner.config.split import as_read_for
from learner.detector.answers import AnswerSettings
from learner.detector.boxes import Prediction
from learner.detector.detector import Detector
from learner.detector.inputs import InputImage, Inputs, find_inputs
from learner.detector.model import ModelFiles, find_model, name_of
from learner.detector.pictures import draw, picture_name, save_picture, write_page
from learner.detector.results import Store, write_results
from learner.extensions import Reader, reader_of
from shared.images import ImageRules, Images

LEAST_SCORE = 0.001  # min score of a box in COCO results, if --conf is not given


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options. `conf`: min score of a box; None: pictures and CSV have the boxes that reach the
    calibration's threshold, and COCO results have all boxes."""

    model: Path
    inputs: Sequence[str]
    out: Path
    asked: AnswerSettings
    config: str | None = None
    prompt: str | None = None
    conf: float | None = None
    classes: Sequence[str] = ()
    tile: int | None = None
    overwrite: bool = False


def predict(options: Options) -> int:
    """Predict, write the results, and return the exit code. Raises ConfigError, DataError, ServerError, RolloutError,
    OutputError."""
    quiet()
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    model = find_model(options.model, config=options.config, prompt=options.prompt, classes=options.classes)
    tell_warnings(model, console)
    inputs = find_inputs(options.inputs, *reading(model, options.inputs, named=options.config is not None))
    for wrong in inputs.bad:
        console.print(f"skipped: {wrong}")
    line = dict(enumerate(inputs.images))
    store = Store.open(options.out, _request(model, options, line), overwrite=options.overwrite)
    store.done = {place: one for place, one in store.done.items() if place in line}
    try:
        detector = Detector(
            model, asked=options.asked, classes=options.classes, conf=options.conf or LEAST_SCORE, tile=options.tile
        )
        todo = {place: image for place, image in line.items() if place not in store.done}
        work = _work(detector, todo, store, options, console)
        skipped = [*inputs.bad, *work.skipped]
    finally:
        store.close()
    page = _finish(detector, store, inputs, options, skipped)
    console.print(_summary(store, work, skipped))
    print(page)
    return 1 if skipped else 0


def quiet() -> None:
    """Silence the log lines of libraries, so that only the command's own lines are printed."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()


def tell_warnings(model: ModelFiles, console: Console) -> None:
    """Print the model's warnings: reasons why its answers may not be what the user expects."""
    for warning in model.warnings:
        console.print(f"warning: {warning}")


@dataclass(kw_only=True)
class Work:
    """What one `predict` command has done. `num_images`: images to answer. `num_before`: images that earlier,
    interrupted commands answered. `skipped`: a line for each image that was skipped. `seconds`: duration, without the
    start of the backend."""

    num_images: int
    num_before: int = 0
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _work(detector: Detector, todo: Mapping[int, InputImage], store: Store, options: Options, console: Console) -> Work:
    """Detect the objects in the images of `todo`, add the results to `store`, draw the pictures, and return the
    counts."""
    work = Work(num_images=len(todo), num_before=len(store.done))
    if not todo:
        return work
    if store.done:
        console.print(f"going on: {len(store.done)} of {len(store.done) + len(todo)} images are done")
    images, classes = Images(ImageRules()), detector.model.settings.classes
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with console.status("starting"):
        detector.__enter__()
    began = time.monotonic()
    with detector, Progress(*columns, console=console) as bar:
        task = bar.add_task("photographs", total=len(todo))
        for place, found in detector.predictions(todo):
            if isinstance(found, Prediction):
                boxes = [box for box in found.boxes if box.score >= shown_from(detector, options)]
                # The picture is saved first, because the line marks its image as done.
                save_picture(options.out, picture_name(place, found), draw(images.load(found.source), boxes, classes))
                store.add(place, found)
            else:
                work.skipped.append(str(found))
                bar.console.print(f"skipped: {found}")
            bar.advance(task)
        work.seconds = time.monotonic() - began
    return work


def shown_from(detector: Detector, options: Options) -> float:
    """Return the least score that a box needs to be in pictures and CSV."""
    if options.conf is not None:
        return options.conf
    return detector.calibration.threshold if detector.calibration is not None else 0.0


def _finish(detector: Detector, store: Store, inputs: Inputs, options: Options, skipped: Sequence[str]) -> Path:
    predictions, conf, known = store.predictions(), shown_from(detector, options), detector.calibration
    classes = detector.model.settings.classes
    # Category ids are the annotation file's. If the file has no ids, the model's classes are numbered from 1, in their
    # order.
    write_results(options.out, predictions, inputs.categories or {name: i for i, name in enumerate(classes, 1)}, conf)
    score_note = (
        f"A score is the probability that the box is right, calibrated on {known.num_images} validation images."
        if known is not None
        else "The model has no calibration: a score only ranks boxes, by how sure the model was of their tokens: no "
        "probability (rollout-learner calibrate makes it one)."
    )
    asked, boxes = options.asked, [box for one in predictions for box in one.boxes]
    shown = sum(box.score >= conf for box in boxes)
    return write_page(
        options.out,
        store.done,
        title=name_of(options.model, detector.model.folder),
        facts=f"{_number(len(predictions), 'photograph')}, "
        f"{_number(len(boxes), 'box', 'boxes')}{f', {shown} of them shown' if shown < len(boxes) else ''}"
        + (f", {_number(asked.samples, 'drawn answer')} each" if asked.samples else "")
        + (f", tiles of {options.tile} pixels" if options.tile else ""),
        conf=conf,
        score_note=score_note,
        skipped=skipped,
        classes=classes,
    )


def reading(model: ModelFiles, paths: Sequence[str], *, named: bool) -> tuple[DataConfig | None, Reader | None]:
    """Return the settings and the user's reader for annotation files. If the user named the run's configuration
    (`named`), these are the run's settings and reader. If the user did not name it, return (None, None)."""
    run = model.run
    # A configuration that the user did not name is not used here, because its reader is code that would be run (D24).
    if run is None or not named:
        return None, None
    own = {path: split for split in ("test", "val", "train") if (path := run.data.path_of(split)) is not None}
    splits = {own.get(path, "train") for path in paths}
    split = splits.pop() if len(splits) == 1 else "train"
    return as_read_for(run.data, split).model_copy(update={"tile": None}), reader_of(run, split)


def _request(model: ModelFiles, options: Options, line: Mapping[int, InputImage]) -> dict[str, object]:
    """Return the values that must be equal if a command continues an earlier command."""
    sources = hashlib.sha256("\n".join(image.source for image in line.values()).encode()).hexdigest()[:16]
    # The request is written to a file, so the token, a secret, is left out.
    asked = {key: value for key, value in asdict(options.asked).items() if key != "token"}
    return {
        "model": str(model.folder.resolve()),
        "settings": model.settings.model_dump(mode="json"),
        "images": f"{len(line)} images, {sources}",
        "asked": asked,
        "conf": options.conf,
        "classes": list(options.classes),
        "tile": options.tile,
    }


def _summary(store: Store, work: Work, skipped: Sequence[str]) -> str:
    pace = f", {work.seconds / work.num_images:.2f} s each" if work.num_images else ""
    cut = sum(one.truncated for one in store.done.values())
    boxes = _number(sum(len(one.boxes) for one in store.done.values()), "box", "boxes")
    before = f"{_number(work.num_before, 'photograph')} done before" if work.num_before else ""
    new = f"{_number(work.num_images, 'photograph')}{pace}" if work.num_images or not before else "nothing left to do"
    return (
        f"{', '.join(filter(None, (new, before)))}; {boxes} in all"
        + (f"; {len(skipped)} skipped" if skipped else "")
        + (f"; {_number(cut, 'answer')} reached --max-new-tokens" if cut else "")
    )


def _number(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
