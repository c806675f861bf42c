"""Suggests missing labels: `rollout-learner find-missing suggest`.

In: a model, annotations, and K answers to each image. Out: a folder with `suggestions.json`, the suspected objects.
Suggestions are sorted by the probability that they are right, estimated from pixels and votes
(`learner.tasks.detection.gaps`), times the root of the answers' agreement. If pixels give no estimate, suggestions are
sorted by the agreement, times the score if the model has a calibration (`calibration.json`). A folder that has
suggestions is not overwritten.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.data.tiles import Tile, tiled
from learner.detector.boxes import ScoredBox, in_pixels, is_cut, merge
from learner.detector.model import ModelFiles, require_boxes
from learner.records import DetectionObject, ParsedRollout, Sample
from learner.run.additions import addition_of, writable_annotations
from learner.run.files import require_writable, write_atomically
from learner.tasks.detection.agreement import SAME_IOU
from learner.tasks.detection.appearance import share_of
from learner.tasks.detection.bins import encloses_something, to_bins
from learner.tasks.detection.completion import LabelCandidate, candidates
from learner.tasks.detection.gaps import cluster_crops, estimate_gaps
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.scores import ScoredObject, read_calibration, scored_objects
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of
from shared.errors import DataError, OutputError
from shared.images import Images
from shared.reading import json_in
from shared.validation import first_wrong

if TYPE_CHECKING:
    from learner.detector.answers import AnswerSettings  # imports torch, and a review starts without it

SUGGESTIONS, DECISIONS, AUDIT = "suggestions.json", "decisions.json", "audit.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A suspected object. `box` is x1, y1, x2, y2 in pixels. `votes` of the image's `answers` answers have the object.
    `names` are the object's names in the answers, the most frequent first. `labels` are the annotated boxes of the
    image, which are shown too. Two values estimate the probability that box and name are right: `score` by the model's
    calibration, `probability` by pixels and votes. None: not known."""

    sample_id: str
    image: str
    width: int
    height: int
    name: str
    box: tuple[float, float, float, float]
    votes: int
    answers: int
    agreement: float
    names: tuple[str, ...]
    labels: tuple[tuple[str, tuple[float, float, float, float]], ...]
    score: float | None = None
    probability: float | None = None

    @property
    def rank(self) -> float:
        """Return the value by which suggestions are sorted: the largest is reviewed first."""
        if self.probability is not None:
            return float(self.probability * self.agreement**0.5)
        return self.agreement if self.score is None else self.agreement * self.score


def annotations_of(
    model: ModelFiles, annotations: str, *, image_root: str | None = None, named: bool = False
) -> DataConfig:
    """Return the settings for reading `annotations`. If the user named the run's configuration (`named`), the run's
    settings are returned. If the user named no configuration, boxes that extend beyond their images are clipped."""
    from learner.detector.command import reading

    data, _ = reading(model, [annotations], named=named)
    data = data or DataConfig(train=annotations, on_bad_record="clip")
    own_paths = {"train": annotations, "val": None, "test": None}
    return data.model_copy(update=own_paths | ({"image_root": image_root} if image_root is not None else {}))


def suggest(
    model: ModelFiles,
    data: DataConfig,
    out: Path,
    asked: AnswerSettings,
    *,
    tiles: Sequence[int] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> list[Suggestion]:
    """Write the suggestions into `out`, and return them. The model gets its own prompt, as in `predict`. `tiles`:
    longer sides of tiles, in pixels. For each side, the model also answers the photograph's tiles, which adds as many
    answers again.

    Raises OutputError if `out` has suggestions, DataError for annotations to which nothing can be added, and the errors
    of the model and of the annotations."""
    from learner.detector.answers import Answers
    from learner.detector.calibration import asked_as

    require_boxes(model)
    # The folder is checked before the model answers: if the file could not be written, hours of answers would be lost.
    _require_new(out)
    # Annotations whose format this project cannot write are refused before the model is asked.
    writable_annotations(data, data.train)
    tell(f"reading {data.train}")
    answers = Answers(model, asked)
    task = DetectionTask(model.settings.task, answers.encoder.tokenizer)
    samples = load_samples(data, data.train, task, geometry=model.settings.task.geometry)
    require_one_image(samples)
    calibration, pieces = read_calibration(model.folder, samples=asked.samples), pieces_of(task.tokenizer)
    agreed, crops, scores = [], [], []
    load, share = Images(data.image_rules).load, share_of(sum(len(sample.objects) for sample in samples))
    tell(f"loading {model.folder} for {len(samples)} images")
    parts = [[[sample], *(list(tiled(sample, side))[1:] for side in tiles)] for sample in samples]
    line = [asked_as(model, list(chain.from_iterable(own))) for own in parts]
    with answers:
        answered = zip(samples, parts, answers.each(line), strict=True)
        for number, (sample, (_, *sides), said) in enumerate(answered, start=1):
            parsed, *others = ([task.parse(rollout) for rollout in rollouts] for rollouts in said)
            # Answer 0 is greedy, not sampled, so it has no vote.
            drawn = [[one.object for one in answer.objects] for answer in parsed[1:]]
            left = iter(others)
            for side in sides:  # If a photograph is no larger than a tile, its own answers count again.
                drawn += by_tiles(sample, [(tile, next(left)) for tile in side]) or drawn[: asked.samples]
            scores.append(scored_objects(parsed, pieces, calibration) if calibration is not None else None)
            agreed.append(candidates(sample, drawn))
            crops.append(cluster_crops(sample, agreed[-1], load, share))
            if number % answers.images_at_once == 0 or number == len(samples):
                tell(f"{number} of {len(samples)} images")
    known, judged = estimate_gaps(samples, agreed, crops, asked.samples * (1 + len(tiles)))
    tell(known.in_words(known.free_right()).removeprefix("; ") or known.why)
    # Probabilities that were estimated from votes have no information beyond `agreement`.
    own = judged if known.source != "votes" else agreed
    found = [one for parts in zip(samples, own, scores, strict=True) for one in of_sample(*parts)]
    found.sort(key=lambda one: (-one.rank, -one.agreement, one.sample_id, one.box))
    told = {"data": data.model_dump(mode="json"), "key": _key_of(model, data.train)}
    content = {**told, "suggestions": [asdict(one) for one in found]}
    write_atomically(out / SUGGESTIONS, json.dumps(content) + "\n")
    return found


def _require_new(out: Path) -> None:
    """Raises OutputError if `out` has suggestions, or cannot be written."""
    if (out / SUGGESTIONS).exists():
        raise OutputError(
            "the folder has suggestions already",
            found=str(out / SUGGESTIONS),
            wanted="a new folder, so that no decision is lost",
            remedy="choose another --out, or review these: "
            f"rollout-learner find-missing review {shlex.quote(str(out))}",
        )
    require_writable(out)


def by_tiles(sample: Sample, parts: Sequence[tuple[Sample, Sequence[ParsedRollout]]]) -> list[list[DetectionObject]]:
    """Return the sampled answers to a photograph, each of them made of one answer to each of its tiles. `parts` has
    each tile and the answers to it, the greedy one first. Boxes that a tile's edge cuts are left out: another tile, or
    the whole photograph, shows the object whole."""
    found = []
    for answers in zip(*(parsed[1:] for _, parsed in parts), strict=True):
        boxes = []
        for (part, _), answer in zip(parts, answers, strict=True):
            assert part.view is not None
            tile = Tile(*part.view.window)
            own = [ScoredBox(one.object.desc, 1.0, *in_pixels(one.object, tile)) for one in answer.objects]
            boxes.append((tile, [box for box in own if not is_cut(box, tile, sample.width, sample.height)]))
        found.append([_in_bins(box, sample) for box in merge(boxes, sample.width, sample.height)])
    return [[obj for obj in own if encloses_something(obj.kind, obj.bins)] for own in found]


def _in_bins(box: ScoredBox, sample: Sample) -> DetectionObject:
    bins = to_bins(box.outline or box.box, sample.width, sample.height)
    return DetectionObject(box.name, "poly" if box.outline else "bbox_2d", bins)


def _key_of(model: ModelFiles, path: str) -> str:
    """Return the key of the run's `data` section that has `path`: `val` or `test`. Return `train` if neither key has
    it, or if `data.train` has it too."""
    held_out = ("val", "test") if model.run is not None and model.run.data.train != path else ()
    return next((key for key in held_out if model.run is not None and model.run.data.path_of(key) == path), "train")


def require_one_image(samples: Sequence[Sample]) -> None:
    """Raises DataError if a sample has several images."""
    several = next((sample for sample in samples if len(sample.images) > 1), None)
    if several is not None:
        raise DataError(
            "find-missing looks at photographs one by one",
            found=f"sample {several.sample_id} with {len(several.images)} images",
            wanted="annotations with one image a record",
            remedy="make one record of each image; a run itself evaluates records of several (training.eval_steps)",
        )


def of_sample(
    sample: Sample, found: Sequence[LabelCandidate], scored: Sequence[ScoredObject] | None = None
) -> Iterator[Suggestion]:
    """Yield a suggestion for each found object that has no label. `scored`: the scored objects of all answers to the
    sample; None: no scores."""
    labels = tuple((obj.desc, addition_of(obj, sample).box) for obj in sample.objects)
    for one in found:
        if one.relation in ("free", "repeats"):
            new = addition_of(one.object, sample)
            yield Suggestion(
                sample_id=sample.sample_id,
                image=sample.images[0],
                width=sample.width,
                height=sample.height,
                name=new.desc,
                box=new.box,
                votes=new.votes,
                answers=new.answers,
                agreement=round(one.agreement, 4),
                names=tuple(one.names),
                labels=labels,
                score=None if scored is None else round(_score(one.object, scored), 4),
                probability=None if one.probability is None else round(one.probability, 4),
            )


def _score(obj: DetectionObject, scored: Sequence[ScoredObject]) -> float:
    """Return the score of the scored object that overlaps `obj` most, among objects with an IoU of at least SAME_IOU;
    objects of the same name go first. 0 if there is none."""
    overlaps = iou_matrix([obj], [one.object for one in scored])[0] if scored else []
    same = [
        (one.object.desc == obj.desc, float(overlap), one.score)
        for one, overlap in zip(scored, overlaps, strict=True)
        # The suggested and the scored box differ a little, because only the scored box depends on the greedy answer
        # too.
        if overlap >= SAME_IOU
    ]
    return max(same, default=(False, 0.0, 0.0))[-1]


def key_of(folder: Path) -> str:
    """Return the key of the section `data` for which `find-missing write` makes annotations: `train`, `val` or `test`.
    Raises DataError."""
    key = _content(folder).get("key")
    return key if key in ("val", "test") else "train"


def read_folder(folder: Path) -> tuple[DataConfig, list[dict[str, Any]]]:
    """Return the settings for reading the annotations, and the suggestions, best first. Raises DataError."""
    content = _content(folder)
    try:
        data = DataConfig.model_validate(content["data"])
        suggestions = _SUGGESTIONS.validate_python(content["suggestions"])
    except (KeyError, ValidationError) as error:
        raise _unreadable(folder, error) from error
    return data, [asdict(one) for one in suggestions]


_SUGGESTIONS: TypeAdapter[list[Suggestion]] = TypeAdapter(list[Suggestion])


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = json_in(folder / SUGGESTIONS)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    return content


def _unreadable(folder: Path, error: Exception) -> DataError:
    if isinstance(error, ValidationError):
        found, wanted = first_wrong(error, "the file")
        reason = f"{found} (wanted: {wanted})"
    else:
        told = error.strerror if isinstance(error, OSError) else None
        reason = told or f"{type(error).__name__}: {error}"
    return DataError(
        "no suggestions can be read",
        found=f"{folder / SUGGESTIONS}: {reason}",
        wanted="a folder that find-missing suggest wrote",
        remedy="correct the folder, or make suggestions: rollout-learner find-missing suggest --help",
    )
