"""Evaluation by rollouts: the current policy answers held-out samples greedily, and the task scores the answers.

In: a backend that serves the current weights, samples, a task. Out: metrics over all samples, one record per sample
(kept as JSONL for the report), pictures for trackers, and a calibration of the scores. Every rank rolls out one
contiguous part of the samples, and all ranks get the whole result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from learner.config.sections.training import ESTIMATED
from learner.data.drawing import draw_object, side_by_side
from learner.data.splits import category_ids_of
from learner.data.views import shown_sizes
from learner.extensions import Task
from learner.journal.journal import Journal
from learner.journal.retained import RETAIN
from learner.policy.parallel import Ranks
from learner.records import GeometryKind, Rollout, Sample
from learner.rollout.backend import RolloutBackend
from learner.run.files import write_atomically
from learner.run.stopping import StopRequest
from learner.steps.basis import Basis
from learner.steps.source import StepSource
from learner.steps.syncs import StepSyncs
from learner.tasks.detection.appearance import Open
from learner.tasks.detection.audit import AuditedFind
from learner.tasks.detection.bins import to_pixels
from learner.tasks.detection.coco_results import FoundBox, coco_rows, coco_text, image_id
from learner.tasks.detection.ranking import GapJudge, drawn_places, has_gaps
from learner.tasks.rewards import Rewards
from shared.errors import MediaError
from shared.images import ImageRules, Images

_OBJECTS = ("truth", "ignored", "predictions")
NUM_PICTURES, MAX_SIDE = 4, 640  # max pictures per evaluation for trackers, and max pixels of a picture's side
TRUTH, PREDICTED = (0, 150, 60), (230, 90, 0)
_NAME_CHARS = 200  # max characters of an image string in which a file name is looked for: it may be a base64 image


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of one evaluation. `rollouts` and the task's `assignments` are in the order of the samples.
    `counts[i]`: the counts that assignment i adds to the metrics. `scenes[i]`: the task's description of assignment
    i."""

    metrics: Mapping[str, float]
    rollouts: tuple[Rollout, ...]
    assignments: tuple[Any, ...]
    counts: tuple[Mapping[str, float], ...]
    scenes: tuple[Mapping[str, Any], ...]


class Evaluations:
    """The evaluations of a run. Methods are collective; `step` is the number of updates in the present weights.

    `backend` None: the run has no evaluations. `gaps`: metrics for labels with gaps (objects without a label); None: no
    such metrics."""

    def __init__(
        self,
        basis: Basis,
        backend: RolloutBackend | None,
        source: StepSource,
        syncs: StepSyncs,
        stop: StopRequest,
        journal: Journal,
        gaps: GapMetrics | None = None,
    ) -> None:
        self.step: int | None = None  # number of the step that was evaluated last
        self._basis, self.backend, self._source, self._syncs = basis, backend, source, syncs
        self._stop, self._journal, self._gaps = stop, journal, gaps
        self._last: Evaluation | None = None  # result of the evaluation of `step`
        self._calibration: tuple[int, str | None] | None = None  # (step, the calibration fitted on its evaluation)

    def evaluate(self, step: int) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Score the evaluation samples and the samples of `data.retain`. Return two mappings: the metrics of the
        evaluation samples, and the metrics of all samples."""
        basis, data = self._basis, self._basis.config.data
        self._journal.note(f"evaluating {len(basis.data.evaluation)} samples at step {step}")
        evaluation = self.score(
            basis.data.evaluation,
            f"step_{step:06d}.jsonl",
            "test" if data.val is None else "val",
            step=step,
            # Without `data.val` these are test samples, whose labels must not decide their scores.
            calibrated=basis.task.calibrated if data.val is not None else None,
        )
        self.step, self._last = step, evaluation
        own = dict(evaluation.metrics)
        if self._gaps is not None:
            own |= self._gaps.of(evaluation)
            if self._gaps.note:
                self._journal.note(self._gaps.note)
                self._gaps.note = ""
        metrics = {**own, **self._retained(step)}
        self._journal.evaluation(metrics, step=step, reason=basis.task.reason(evaluation.assignments, metrics))
        self._journal.pictures(partial(draw_scenes, evaluation, data.image_rules), step=step)
        return own, metrics

    def _retained(self, step: int) -> dict[str, float]:
        """Return metrics of `data.retain` as `retain/NAME/METRIC`."""
        found = {}
        for one in self._basis.data.retained:
            file = f"retain_{one.name}_{step:06d}.jsonl"
            scored = self.score(one.samples, file, None, step=step, task=one.task, calibrated=one.task.calibrated)
            found.update({f"{RETAIN}{one.name}/{metric}": value for metric, value in scored.metrics.items()})
        return found

    def test(self, step: int) -> None:
        """Evaluate the samples of `data.test`, if there are any. The scores of their boxes are calibrated on
        `data.val`."""
        task = self._basis.task
        if self._basis.data.test:
            fitted = self.calibration(step)
            calibrated = partial(task.calibrated, calibration=fitted) if fitted is not None else None
            evaluation = self.score(self._basis.data.test, "test.jsonl", "test", step=step, calibrated=calibrated)
            reason = task.reason(evaluation.assignments, evaluation.metrics)
            self._journal.test(evaluation.metrics, step=step, reason=reason)

    def score(
        self,
        samples: Sequence[Sample],
        file: str,
        split: str | None,
        *,
        step: int,
        task: Task | None = None,
        calibrated: Callable[[Sequence[object]], Sequence[object]] | None = None,
    ) -> Evaluation:
        """Roll out `samples` of the split `data.SPLIT`. Write their scenes to `eval/FILE`, and COCO results next to it.
        `task`: the samples' task if it differs from the run's; then the run's rewards are not computed. `calibrated`:
        see the function `evaluate` of this module."""
        basis = self._basis
        assert self.backend is not None
        # An evaluation takes minutes, so a request to stop is noticed before it begins.
        self._stop.check()
        # The fence, in which no call for training may start, lasts until the evaluation's rollouts have ended. So the
        # servers never have requests of the evaluation and of training at the same time.
        with self._source.fence() as fence:
            self._syncs.behind(fence, step)
            with self._journal.clock.phase("eval"):
                evaluation = evaluate(
                    self.backend,
                    samples,
                    task or basis.task,
                    basis.ranks,
                    global_step=step,
                    rewards=basis.rewards if task is None else None,
                    calibrated=calibrated,
                )
        if basis.ranks.is_main:
            path = Path(basis.config.training.output_dir) / "eval" / file
            write_evaluation(evaluation, path, category_ids_of(basis.config.data, split))
        return evaluation

    def calibration(self, step: int) -> str | None:
        """Return the calibration of the scores that the weights of `step` give, fitted on `data.val`. None: these
        weights were not evaluated on `data.val`, or there are too few answers for a fit."""
        if self._basis.config.data.val is None or self._last is None or self.step != step:
            return None
        if self._calibration is None or self._calibration[0] != step:
            self._calibration = step, self._basis.task.calibration(self._last.assignments)
        return self._calibration[1]


def evaluate(
    backend: RolloutBackend,
    samples: Sequence[Sample],
    task: Task,
    ranks: Ranks,
    *,
    global_step: int,
    rewards: Rewards | None = None,
    calibrated: Callable[[Sequence[object]], Sequence[object]] | None = None,
) -> Evaluation:
    """Roll out `samples` greedily, each rank a part of them, and score all together. `calibrated` returns all
    assignments with calibrated scores of their predictions; None: scores are computed from the probabilities of the
    tokens. Raises RewardError if a reward function fails."""
    share = -(-len(samples) // ranks.world_size)
    mine = samples[ranks.rank * share : (ranks.rank + 1) * share]
    rollouts = backend.generate(
        mine, global_step=global_step, micro_step_idx=0, first_req_idx=ranks.rank * share, greedy=True
    )
    scored = [(rollout, task.match(task.parse(rollout))) for rollout in rollouts]
    # Every rank gets all answers, so that all ranks decide alike whether an evaluation is the best.
    everything = [pair for part in ranks.all_gather_object(scored) for pair in part]
    answers, matched = tuple(rollout for rollout, _ in everything), tuple(found for _, found in everything)
    assignments = tuple(calibrated(matched) if calibrated is not None else matched)
    means = rewards.means(answers, assignments) if rewards else {}
    return Evaluation(
        metrics={**task.evaluate(assignments), **means},
        rollouts=answers,
        assignments=assignments,
        counts=tuple(task.counts(assignments)),
        scenes=tuple(task.scene(assignment) for assignment in assignments),
    )


class GapMetrics:
    """F1 of evaluations whose labels have gaps (objects without a label; R49, D22): the estimate `ESTIMATED`, and F1
    for the fewest and for the most objects that are plausible. The first evaluation of a run decides whether the labels
    have gaps and how many objects there may be. The first evaluation also estimates how often boxes are right. Later
    evaluations start from this estimate. `file` keeps the first evaluation's decisions for a resume, so that all values
    of a run are comparable."""

    def __init__(
        self, samples: Sequence[Sample], open_image: Open, ranks: Ranks, file: Path, audited: Sequence[AuditedFind]
    ) -> None:
        self._places = drawn_places(len(samples))
        self._judge = GapJudge([samples[i] for i in self._places], open_image, audited)
        self._ranks, self._file, self._objects = ranks, file, list[float]()
        self._is_known = False
        self.note = ""  # a sentence about gaps in the labels, written by the first evaluation; "": nothing to print

    def of(self, evaluation: Evaluation) -> dict[str, float]:
        """Return the metrics by name; {} if the labels have no gaps, or if it cannot be estimated which boxes are
        right. Collective. Raises MediaError."""
        return self._ranks.all_succeed(lambda: self._of(evaluation) if self._ranks.is_main else {})[0]

    def _of(self, evaluation: Evaluation) -> dict[str, float]:
        # A resumed run keeps the first evaluation's decisions, so that all values of the run are comparable.
        if not self._is_known and self._file.is_file():
            known = json.loads(self._file.read_text())
            self._objects, self._is_known = known["objects"], True
            self._judge.shares = {(name, border): own for name, border, own in known.get("shares", ())}
        if self._is_known and not self._objects:
            return {}
        answers = [[one.object for one in evaluation.assignments[i].parsed.objects] for i in self._places]
        score = self._judge.score(answers)
        if not self._is_known:
            self._is_known = True
            if score is None:
                self.note = f"if the labels of data.val have gaps, they cannot rank models: {self._judge.why}"
            elif has_gaps(score, self._judge.num_labels):
                self._objects = list(self._judge.objects([score], [answers]))
                self.note = (
                    f"the labels of data.val have gaps: {score.unlabelled.sum():.0f} boxes without one are probably "
                    f"right. {ESTIMATED} is estimated for {self._objects[0]:.0f} to {self._objects[1]:.0f} objects"
                )
            shares = [[*key, own] for key, own in self._judge.shares.items()]
            write_atomically(self._file, json.dumps({"objects": self._objects, "shares": shares}) + "\n")
        if score is None or not self._objects:
            return {}
        least, most = self._objects
        return {
            # The middle of a range between two factors is their geometric mean.
            ESTIMATED: score.f1((least * most) ** 0.5),
            "estimated_f1_low@0.5": score.f1(most),
            "estimated_f1_high@0.5": score.f1(least),
        }


def write_evaluation(evaluation: Evaluation, path: Path, categories: Mapping[str, int] | None = None) -> None:
    """Write one JSON line per sample: images, sizes, the task's description of the answer, version, and counts. An
    object's coordinates are given in bins, and as `pixels` of its image. If the answers have objects, a file next to
    `path` (`.coco.json`) has the predictions as COCO results. `categories`: the annotations' category ids by class
    name.

    In COCO results an image has the id of its sample. If a sample has several images, `#1`, `#2` and so on are added to
    the sample's id."""
    lines = map(json.dumps, map(_line, evaluation.rollouts, evaluation.scenes, evaluation.counts))
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    if any("predictions" in scene for scene in evaluation.scenes):
        rows = coco_rows(_found(evaluation), categories or _numbered(evaluation))
        write_atomically(path.with_suffix(".coco.json"), coco_text(rows))


def _numbered(evaluation: Evaluation) -> dict[str, int]:
    """Return a category id for each class name in the ground truth: numbers from 1, in alphabetical order."""
    names = {item["desc"] for scene in evaluation.scenes for item in scene.get("truth", ())}
    return {name: number for number, name in enumerate(sorted(names), 1)}


def _found(evaluation: Evaluation) -> Iterator[FoundBox]:
    for rollout, scene in zip(evaluation.rollouts, evaluation.scenes, strict=True):
        sample = rollout.sample
        for item, score in zip(scene.get("predictions", ()), scene.get("scores", ()), strict=True):
            pixels, image = _pixels(item, sample), item.get("image")
            x, y = pixels[0::2], pixels[1::2]
            own = sample.images[(image or 1) - 1] if sample.images else ""
            yield FoundBox(
                image_id(sample.sample_id if image is None else f"{sample.sample_id}#{image}"),
                Path(own[-_NAME_CHARS:]).name,
                item["desc"],
                score,
                (min(x), min(y), max(x), max(y)),
                tuple(pixels) if "poly" in item else (),
            )


def _pixels(item: Mapping[str, Any], sample: Sample) -> list[float]:
    """Return where an object is: x1, y1, x2, y2 of a box, or x1, y1, x2, y2, ... of a polygon."""
    bins = item["bbox_2d"] if "bbox_2d" in item else item["poly"]
    return [round(value, 2) for value in to_pixels(bins, *sample.size_of(item.get("image")))]


def _with_pixels(name: str, value: object, sample: Sample) -> object:
    if name not in _OBJECTS or not isinstance(value, list):
        return value
    is_detected = all(isinstance(item, Mapping) and ("bbox_2d" in item or "poly" in item) for item in value)
    return [{**item, "pixels": _pixels(item, sample)} for item in value] if is_detected else value


def _line(rollout: Rollout, scene: Mapping[str, object], counts: Mapping[str, float]) -> dict[str, object]:
    sample = rollout.sample
    return {
        "id": sample.sample_id,
        "images": list(sample.images),
        **shown_sizes(sample),
        **{name: _with_pixels(name, value, sample) for name, value in scene.items()},
        "ver": rollout.ver,
        "counts": dict(counts),
    }


def draw_scenes(evaluation: Evaluation, rules: ImageRules) -> list[tuple[str, Image.Image]]:
    """Return (sample id, picture) of the first NUM_PICTURES scenes with a readable image, with the ground truth in
    green and predictions in orange. A picture has at most MAX_SIDE pixels a side; several images of a scene are put
    side by side. The report's own pictures also show which predictions are right."""
    images = Images(rules)
    drawn: list[tuple[str, Image.Image]] = []
    for rollout, scene in zip(evaluation.rollouts, evaluation.scenes, strict=True):
        sample = rollout.sample
        if len(drawn) == NUM_PICTURES or "predictions" not in scene or not sample.images:
            break
        try:
            pictures = [images.load(image).convert("RGB") for image in sample.images]
        except MediaError:
            continue
        for number, picture in enumerate(pictures, start=1):
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            _draw(picture, number, scene)
        drawn.append((sample.sample_id, side_by_side(pictures)))
    return drawn


def _draw(picture: Image.Image, number: int, scene: Mapping[str, Any]) -> None:
    """Draw the ground truth and the predictions of a scene's image `number` (from 1) into `picture`."""
    for objects, color in ((scene["truth"], TRUTH), (scene["predictions"], PREDICTED)):
        for item in objects:
            kind: GeometryKind = "bbox_2d" if "bbox_2d" in item else "poly"
            if item.get("image", number) == number:
                draw_object(picture, str(item["desc"]), kind, item[kind], color)
