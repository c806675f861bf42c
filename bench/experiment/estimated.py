"""In gaps of a known kind: is the estimate of what is right without a label correct, and which order finds most?

In: photographs with labels with gaps and with all, and `ANSWERS` answers of a model to each. Out: for each regime the
shares of right finds that are estimated and true, by the least number of votes; what is added; and the share of the
objects without a label that the first finds have at a precision of 0.9, in four orders (`ORDERS`). Also: how many of
some draws of random gaps are called not random.

Answers do not depend on labels, so they are drawn once. They are kept line by line, and a second command goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.experiment.gaps import Row, with_gaps
from bench.experiment.ranked import sample_of
from bench.experiment.results import found_of, objects_of, pairs, unlabelled
from bench.figures import markdown_table
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Answers, AnswerSettings
from learner.detector.calibration import asked_as
from learner.detector.model import find_model
from learner.missing.suggest import of_sample
from learner.records import DetectionObject, Sample
from learner.tasks.detection.appearance import share_of
from learner.tasks.detection.bins import to_bins
from learner.tasks.detection.completion import CompletionEstimate, LabelCandidate, candidates
from learner.tasks.detection.gaps import PROBABLE, cluster_crops, estimate_gaps
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.scores import ScoredObject, read_calibration, scored_objects
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of
from shared.images import ImageRules, Images

ANSWERS = 8
VOTES = (1, 2, 3, 4, 6)  # that the report has
Drawn = Mapping[str, Row]  # by sample: `answers`, the objects of each, and `scored`, boxes with calibrated scores


def by_loss(one: Row) -> float:
    """Return what loss inspection says of a find: its confidence times how unlike it the nearest label of its class is.
    The confidence is the calibrated score; where none is known, the share of the answers that have it.

    That is the idea of cleanlab's ranking of overlooked objects, written down here, because its license is the AGPL.
    """
    box, *labels = (
        DetectionObject(name, "bbox_2d", to_bins(corners, one["width"], one["height"]))
        for name, corners in ((one["name"], one["box"]), *one["labels"])
        if name == one["name"]
    )
    nearest = float(iou_matrix([box], labels).max()) if labels else 0.0
    return float((one["score"] or one["votes"] / one["answers"]) * (1 - nearest))


ORDERS: Mapping[str, Callable[[Row], float]] = {
    "votes": lambda one: one["votes"],
    "agreement and score": lambda one: one["agreement"] * (one["score"] or 1.0),
    "loss inspection": by_loss,
    "probability": lambda one: one["probability"],
}


# ---- answers --------------------------------------------------------------------------------------------------------


def drawn_answers(model: Path, rows: Path, kept: Path) -> Drawn:
    """Return the answers of a model to the photographs of a JSONL file. What is `kept` is not drawn again."""
    known = {one["id"]: one for one in map(json.loads, kept.read_text().splitlines())} if kept.is_file() else {}
    if all(json.loads(line)["id"] in known for line in rows.read_text().splitlines()):
        return known
    files = find_model(model)
    answers = Answers(files, AnswerSettings(samples=ANSWERS, backend="hf"))
    task = DetectionTask(files.settings.task, answers.encoder.tokenizer)
    calibration, pieces = read_calibration(files.folder, samples=ANSWERS), pieces_of(task.tokenizer)
    samples = load_samples(DataConfig(train=str(rows), on_bad_record="clip"), str(rows), task)
    left = {place: sample for place, sample in enumerate(samples) if sample.sample_id not in known}
    kept.parent.mkdir(parents=True, exist_ok=True)
    places, size = list(left), answers.images_at_once
    with answers, kept.open("a") as file:
        for start in range(0, len(places), size):
            own = places[start : start + size]
            asking = asked_as(files, [left[place] for place in own])
            for place, (said,) in answers.of({i: [one] for i, one in zip(own, asking, strict=True)}).items():
                parsed = [task.parse(rollout) for rollout in said]
                line = {
                    "id": left[place].sample_id,
                    "answers": [[_told(one.object) for one in answer.objects] for answer in parsed[1:]],
                    "scored": [
                        [*_told(one.object), round(one.score, 4)] for one in scored_objects(parsed, pieces, calibration)
                    ],
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                known[line["id"]] = line
            file.flush()
    return known


def _told(obj: DetectionObject) -> list[Any]:
    return [obj.desc, *obj.bins]


def _object(told: Sequence[Any]) -> DetectionObject:
    return DetectionObject(told[0], "bbox_2d", tuple(told[1:5]))


# ---- estimates ------------------------------------------------------------------------------------------------------


def judged(given: Sequence[Row], drawn: Drawn) -> tuple[list[Sample], CompletionEstimate, list[list[LabelCandidate]]]:
    """Return the samples, what a run would estimate of their labels, and the finds with their probabilities."""
    samples, load = [sample_of(row) for row in given], Images(ImageRules()).load
    answers = [[[_object(told) for told in answer] for answer in drawn[one.sample_id]["answers"]] for one in samples]
    found = [candidates(*parts) for parts in zip(samples, answers, strict=True)]
    share = share_of(sum(len(sample.objects) for sample in samples))
    crops = [cluster_crops(*parts, load, share) for parts in zip(samples, found, strict=True)]
    return samples, *estimate_gaps(samples, found, crops, ANSWERS)


def estimated(given: Sequence[Row], everything: Sequence[Row], drawn: Drawn) -> Row:
    """Return what is estimated and what is true, for labels with gaps. `net`: right labels minus wrong ones that are
    added by `auto` votes, by probability, and by the best number of votes in hindsight."""
    samples, known, found = judged(given, drawn)
    truth = {row["id"]: objects_of(row) for row in everything}
    labels = {sample.sample_id: sample.objects for sample in samples}
    right: list[bool] = []
    free = [[one for one in own if one.relation == "free"] for own in found]
    for sample, own in zip(samples, free, strict=True):
        left = unlabelled(sample.objects, truth[sample.sample_id])
        hits = {i for i, _ in pairs([one.object for one in own], left)}
        right += [i in hits for i in range(len(own))]
    is_right = np.array(right)
    votes = np.array([one.votes for own in free for one in own])
    probable = np.array([one.probability for own in free for one in own], dtype=float)

    def net(added: Any) -> int:
        return int(2 * is_right[added].sum() - added.sum())

    by_votes = [net(votes >= least) for least in range(1, ANSWERS + 1)]
    return {
        "labels": sum(map(len, labels.values())),
        "objects": sum(map(len, truth.values())),
        "finds": [int((votes >= least).sum()) for least in VOTES],
        "right": [_share(is_right[votes >= least]) for least in VOTES],
        "estimated": [_share(probable[votes >= least]) for least in VOTES],
        "source": known.source,
        "auc": known.auc and round(known.auc, 3),
        "not_random": known.not_random,
        "completes": known.min_votes is not None,
        "net": {
            "auto": by_votes[known.min_votes - 1] if known.min_votes is not None else 0,
            "probability": net(probable >= PROBABLE) if known.min_votes is not None else 0,
            "best votes": max(0, *by_votes),
        },
        "found": _found(samples, found, drawn, labels, truth),
    }


def _share(of: Any) -> float | None:
    return round(float(of.mean()), 3) if len(of) else None


def _found(
    samples: Sequence[Sample],
    found: Sequence[Sequence[LabelCandidate]],
    drawn: Drawn,
    given: Mapping[str, Sequence[DetectionObject]],
    truth: Mapping[str, Sequence[DetectionObject]],
) -> Row:
    """Return which share of the missing objects the finds have in all, and the first ones in each order at 0.9."""
    suggestions: list[Row] = []
    for sample, own in zip(samples, found, strict=True):
        scored = [ScoredObject(_object(one), one[-1], None) for one in drawn[sample.sample_id]["scored"]]
        suggestions += [asdict(one) for one in of_sample(sample, own, scored)]
    result: Row = {}
    for name, worth in ORDERS.items():
        one = found_of(sorted(suggestions, key=lambda one: (-worth(one), -one["agreement"])), given, truth)
        result |= {"missing": one["missing"], "in all": one["recall"], name: one["recall_at_precision_0.9"]}
    return result


def alarm(everything: Sequence[Row], drawn: Drawn, number: int) -> Row:
    """Return whether labels that a draw removed at random, 10 to 70% of them, are called not random."""
    share = 0.1 + 0.6 * (number % 100) / 100
    _, known, _ = judged(with_gaps(everything, "missing", share, number), drawn)
    return {"draw": number, "share": share, "source": known.source, "not_random": known.not_random}


# ---- the report -----------------------------------------------------------------------------------------------------


def report(found: Mapping[str, Row]) -> str:
    head = ["regime", "labels", *(f"right / estimated, {votes}" for votes in VOTES), "not random"]
    head += ["net: probability, auto, best votes", "missing found in all", *ORDERS]
    rows = [
        [
            name,
            f"{one['labels']} of {one['objects']}",
            *(
                "no find" if true is None else f"{true:.2f} / {said:.2f}"
                for true, said in zip(one["right"], one["estimated"], strict=True)
            ),
            one["not_random"] or "no",
            ", ".join(str(one["net"][key]) for key in ("probability", "auto", "best votes")),
            *(f"{one['found'][key]:.2f}" for key in ("in all", *ORDERS)),
        ]
        for name, one in found.items()
    ]
    return "\n".join(markdown_table(head, rows))
