"""Do labels with gaps rank models as all labels do, if F1 is estimated from the photographs (R49, D22)?

In: the answers that a study keeps, by run and step, and photographs with labels with gaps and with all. Out:
`ranked.json`: each checkpoint's F1 by all labels, by those with gaps, and estimated for one range of objects; how far
the orders agree; and what the best step by the estimate is worse than the best one, in each run. `ranked/` keeps each
checkpoint, so a second command goes on.

Kendall's tau of many checkpoints that hardly differ is bounded by chance. `limit` is what F1 by all labels itself has
on as many photographs, drawn with replacement. `all_judged` is what an order would have if a person judged every box
that overlaps no label. `by_seed` has tau of F1 by labels with gaps, estimated, and judged, for the runs of a seed. The
second number of each pair counts only checkpoints that differ by more than `DIFFERENT`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from bench.experiment.gaps import Row
from bench.experiment.results import objects_of, pairs
from bench.runs import say
from learner.records import DetectionObject, Sample
from learner.run.files import write_atomically
from learner.tasks.detection.bins import canonical_order, to_bins
from learner.tasks.detection.completion import candidates
from learner.tasks.detection.ranking import MOST_OBJECTS, GapJudge
from shared.images import ImageRules, Images

DIFFERENT = 0.01
_DRAWS = 200
Floats = NDArray[np.float64]


def rank_answers(answers: Iterable[Path], given: Sequence[Row], everything: Sequence[Row], out: Path) -> dict[str, Any]:
    """Judge all answers, and write `ranked.json`. The start is judged once. Raises MediaError."""
    samples = [sample_of(row) for row in given]
    truth = {row["id"]: objects_of(row) for row in everything}
    judge = GapJudge(samples, Images(ImageRules()).load)
    checkpoints: list[Row] = []
    has_start = False
    for path in answers:
        for step, boxes in json.loads(path.read_text()).items():
            if step == "0" and has_start:
                continue
            has_start |= step == "0"
            kept = out / "ranked" / f"{path.stem}-{step}.json"
            if not kept.is_file() or not judge.shares:  # the first one, always: later ones are drawn towards it
                kept.parent.mkdir(parents=True, exist_ok=True)
                found = _judged(judge, samples, truth, boxes)
                write_atomically(kept, json.dumps({"run": path.stem, "step": int(step), **found}) + "\n")
                say(f"{path.stem}, step {step}: {found['right']:.0f} right by looks, {sum(found['hits'])} truly")
            checkpoints.append(json.loads(kept.read_text()))
    objects = np.array([len(truth[sample.sample_id]) for sample in samples], dtype=float)
    summary = summarize(checkpoints, objects, judge.num_labels)
    write_atomically(out / "ranked.json", json.dumps(summary, indent=1) + "\n")
    return summary


def sample_of(row: Row) -> Sample:
    images, objects = tuple(row["images"]), canonical_order(objects_of(row))
    size = {"width": row["width"], "height": row["height"]}
    return Sample(sample_id=row["id"], messages=(), images=images, objects=objects, **size)


def _judged(
    judge: GapJudge,
    samples: Sequence[Sample],
    truth: Mapping[str, Sequence[DetectionObject]],
    boxes: Mapping[str, Sequence[Sequence[Any]]],
) -> Row:
    said = [
        [DetectionObject(name, "bbox_2d", to_bins(box, one.width, one.height)) for name, *box in boxes[one.sample_id]]
        for one in samples
    ]
    score = judge.score(said)
    assert score is not None, judge.why
    hits = [pairs(own, truth[sample.sample_id]) for own, sample in zip(said, samples, strict=True)]
    free = [
        [one.object[:3] for one in candidates(sample, [own]) if one.relation == "free"]
        for own, sample in zip(said, samples, strict=True)
    ]
    return {
        "right": round(float(score.right.sum()), 2),
        "unlabelled": round(float(score.unlabelled.sum()), 2),
        "boxes": [len(own) for own in said],
        "hits": [len(one) for one in hits],
        "free_hits": sum(said[n][i][:3] in free[n] for n, own in enumerate(hits) for i, _ in own),
        "labelled": sum(len(pairs(own, sample.objects)) for own, sample in zip(said, samples, strict=True)),
    }


def summarize(checkpoints: Sequence[Row], objects: Floats, num_labels: int) -> dict[str, Any]:
    """`objects` [scenes]: how many there are by all labels."""
    boxes, hits = (np.array([one[name] for one in checkpoints], dtype=float) for name in ("boxes", "hits"))
    number = boxes.sum(axis=1)
    true = 2 * hits.sum(axis=1) / (number + objects.sum())
    given = 2 * np.array([one["labelled"] for one in checkpoints]) / (number + num_labels)
    least = num_labels + max(one["unlabelled"] for one in checkpoints)
    middle = least * MOST_OBJECTS**0.5
    estimated = 2 * np.array([one["right"] for one in checkpoints]) / (number + middle)
    all_judged = 2 * np.array([one["labelled"] + one["free_hits"] for one in checkpoints]) / (number + middle)
    drawn = np.random.default_rng(0).multinomial(len(objects), np.full(len(objects), 1 / len(objects)), size=_DRAWS)
    by_draw = [2 * (hits @ one) / (boxes @ one + objects @ one) for one in drawn]
    names = [one["run"] for one in checkpoints]
    start = [i for i, one in enumerate(checkpoints) if one["step"] == 0]
    lost = {}
    for name in sorted(set(names)):
        own = sorted({*start, *(i for i, other in enumerate(names) if other == name)})
        lost[name] = round(float(true[own].max() - true[own][estimated[own].argmax()]), 4)
    rows = zip(checkpoints, true, given, estimated, strict=True)
    return {
        "objects": [round(float(least)), round(float(MOST_OBJECTS * least)), int(objects.sum())],
        "labels_with_gaps": _agrees(given, true),
        "estimated": _agrees(estimated, true),
        "all_judged": _agrees(all_judged, true),
        "by_seed": {
            seed: [_agrees(values[own], true[own])[0] for values in (given, estimated, all_judged)]
            for seed in sorted({name.rpartition("-")[2] for name in names})
            for own in [[i for i, name in enumerate(names) if i in start or name.endswith(f"-{seed}")]]
        },
        "limit": np.mean([_agrees(one, true) for one in by_draw], axis=0).round(3).tolist(),
        "keep_best_lost": lost,
        "checkpoints": [[one["run"], one["step"], *(round(float(f1), 4) for f1 in values)] for one, *values in rows],
    }


def _agrees(a: Floats, true: Floats) -> list[float]:
    """Return Kendall's tau, and the same of pairs that differ."""
    same_way = (a[:, None] - a)[true[:, None] - true > DIFFERENT] > 0
    return [round(float(kendalltau(a, true).statistic), 3), round(float(2 * same_way.mean() - 1), 3)]
