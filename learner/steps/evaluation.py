"""Evaluation by rollouts: the current policy answers held-out samples greedily, and the task scores the answers.

In: a backend that serves the current weights, samples, a task. Out: metrics over the set, and one record per sample
(kept as JSONL for the report). Every rank rolls out a contiguous share, and all ranks get the whole result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.config.sections.training import ESTIMATED
from learner.data.views import shown_sizes
from learner.extensions import Task
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample
from learner.rollout.backend import RolloutBackend
from learner.run.files import write_atomically
from learner.tasks.detection.appearance import Open
from learner.tasks.detection.audit import AuditedFind
from learner.tasks.detection.bins import to_pixels
from learner.tasks.detection.coco_results import FoundBox, coco_rows, coco_text, image_id
from learner.tasks.detection.ranking import GapJudge, drawn_places, has_gaps
from learner.tasks.rewards import Rewards

_OBJECTS = ("truth", "ignored", "predictions")
_NAME_CHARS = 200  # an image string is cut here: it may be a picture in base64


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`rollouts` and the task's `assignments` are in the order of the samples; `counts[i]` is what assignment i adds to
    the metrics, and `scenes[i]` what the task says of it."""

    metrics: Mapping[str, float]
    rollouts: tuple[Rollout, ...]
    assignments: tuple[Any, ...]
    counts: tuple[Mapping[str, float], ...]
    scenes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retained:
    """One entry of `data.retain`: samples that each evaluation scores too, with a task of their own."""

    name: str
    task: Task
    samples: list[Sample]


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
    """Roll out `samples` greedily, one share per rank, and score them together. `calibrated` gives all assignments the
    scores of their predictions; None: they rank by the probabilities of their tokens. Raises RewardError if a reward
    function fails."""
    share = -(-len(samples) // ranks.world_size)
    mine = samples[ranks.rank * share : (ranks.rank + 1) * share]
    rollouts = backend.generate(
        mine, global_step=global_step, micro_step_idx=0, first_req_idx=ranks.rank * share, greedy=True
    )
    scored = [(rollout, task.match(task.parse(rollout))) for rollout in rollouts]
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
    """F1 of evaluations whose labels have gaps, as `ESTIMATED` and at both ends of a range of objects (R49, D22). The
    first evaluation of a run decides whether they do, how many objects there may be, and towards which shares of right
    finds later ones are drawn; `file` keeps this for a resume. So all values of a run are comparable."""

    def __init__(
        self, samples: Sequence[Sample], open_image: Open, ranks: Ranks, file: Path, audited: Sequence[AuditedFind]
    ) -> None:
        self._places = drawn_places(len(samples))
        self._judge = GapJudge([samples[i] for i in self._places], open_image, audited)
        self._ranks, self._file, self._objects = ranks, file, list[float]()
        self._is_known = False
        self.note = ""  # what the first evaluation says about the labels

    def of(self, evaluation: Evaluation) -> dict[str, float]:
        """Return {} where labels show no gaps, or cannot rank models. Collective. Raises MediaError."""
        return self._ranks.all_succeed(lambda: self._of(evaluation) if self._ranks.is_main else {})[0]

    def _of(self, evaluation: Evaluation) -> dict[str, float]:
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
            ESTIMATED: score.f1((least * most) ** 0.5),
            "estimated_f1_low@0.5": score.f1(most),
            "estimated_f1_high@0.5": score.f1(least),
        }


def write_evaluation(evaluation: Evaluation, path: Path, categories: Mapping[str, int] | None = None) -> None:
    """Write one JSON line per sample: images, sizes, what the task says of the answer, version, and its counts. Objects
    have their place in bins, and as `pixels` of their image. Beside it, where the answers have objects, the predictions
    as COCO results: `step_N.coco.json`. `categories`: ids of class names, of annotations that have some.

    In COCO results an image's id is its sample's. If a sample has several images, `#2` follows for the second."""
    lines = map(json.dumps, map(_line, evaluation.rollouts, evaluation.scenes, evaluation.counts))
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    if any("predictions" in scene for scene in evaluation.scenes):
        rows = coco_rows(_found(evaluation), categories or _numbered(evaluation))
        write_atomically(path.with_suffix(".coco.json"), coco_text(rows))


def _numbered(evaluation: Evaluation) -> dict[str, int]:
    """The names of the ground truth, in alphabetical order from 1."""
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
