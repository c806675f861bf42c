"""Measure how good completed labels are, with the removed labels at hand: `python -m bench.completion --out DIR`.

In: the demo's scenes (256 of seed 3) and with `--bccd` its 205 training photographs; of each K answers of the shipped
model at temperature 1, with the log-probabilities of their coordinates (vLLM in this process; kept in `--work`). Out:
`completion.json` with two measurements.

`boxes`: the mean IoU with the true box of several boxes of a cluster, and by how much each is above the median
[95% interval over clusters]. All labels count as removed. A cluster is measured where its median has an IoU of at least
0.3 with a label.

`auto`: labels are removed, the estimate is made of what is left, and compared with what was removed. `gained`: labels
that the chosen number of votes adds, right ones minus wrong ones, per label that is left; `best`: with the best number.
`error`: mean |estimated - true| precision of free clusters. Of all samples, and means over 24 draws of 16 and of 48,
with the share of draws that complete nothing, and of those that add more wrong labels than right ones.

    missing-40    each label is missing with a chance of 0.4
    classes-40    half of the classes lack 80%
    small-40      the smaller half of the objects lacks 80%
    stops         labels stop after three
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bench.figures import circumstances
from bench.study import BCCD, DEMO, FAULTS, MODELS, Labels
from deploy.bccd.photographs import read_photographs, write_jsonl
from deploy.demo.build_data import Build, build
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Answers, AnswerSettings
from learner.detector.model import find_model
from learner.records import DetectionObject, Sample
from learner.run.files import write_atomically
from learner.tasks.detection.agreement import Cluster, cluster_objects
from learner.tasks.detection.completion import Tally, candidates, estimate, tally
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign
from learner.tasks.detection.task import DetectionTask

SCENES, MOST = 256, 8
NEAR, SAME = 0.3, 0.5
DRAWS, SEEDS = 8, 3
REGIMES = {f"missing-{share}": ("missing", share / 100) for share in (5, 20, 40, 60)} | {
    "classes-40": ("classes", 0.4),
    "small-40": ("small", 0.4),
    "stops": ("stops", 1.0),
}
Answer = list[tuple[DetectionObject, tuple[float, ...]]]  # each object has its coordinates' log-probabilities
Box = NDArray[np.float64]


def main(
    out: Annotated[Path, typer.Option(help="The result's folder.")],
    work: Annotated[Path, typer.Option(help="Answers; what is there is not made again.")] = Path("runs/completion"),
    bccd: Annotated[Path | None, typer.Option(help="A clone of github.com/Shenggan/BCCD_Dataset.")] = None,
) -> None:
    """Make the answers, measure, write."""
    before = circumstances()
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in (DEMO, *([BCCD] if bccd else ())):
        samples, answers = _answers(name, work, bccd)
        found[name] = {
            f"{number} answers": {"boxes": boxes(samples, own), "auto": autos(samples, own)}
            for number in (4, MOST)
            for own in [[one[:number] for one in answers]]
        }
    write_atomically(out / "completion.json", json.dumps({**before, "data": found}, indent=1) + "\n")


# ---- answers --------------------------------------------------------------------------------------------------------


def _answers(name: str, work: Path, bccd: Path | None) -> tuple[list[Sample], list[list[Answer]]]:
    kept = work / f"{name}.pkl"
    if kept.is_file():
        return pickle.loads(kept.read_bytes())  # written here
    path = work / f"{name}.jsonl"
    if name == BCCD:
        assert bccd is not None
        write_jsonl(read_photographs(bccd, "train"), path)
    else:
        build(Build(train=SCENES, val=1, test=1, seed=3), work / "data")
        path = work / "data" / "train.jsonl"
    files = find_model(MODELS[name])
    asking = Answers(files, AnswerSettings(samples=MOST))
    task = DetectionTask(files.settings.task, asking.encoder.tokenizer)
    samples = load_samples(DataConfig(train=str(path)), str(path), task)
    answers: list[list[Answer]] = []
    with asking:
        size = asking.images_at_once
        for start in range(0, len(samples), size):
            found = asking.of({i: [samples[i]] for i in range(start, min(start + size, len(samples)))})
            answers += [[_scored(task, rollout) for rollout in own[1:]] for (own,) in found.values()]
    kept.write_bytes(pickle.dumps((samples, answers)))
    return samples, answers


def _scored(task: DetectionTask, rollout: Any) -> Answer:
    parsed, logprobs = task.parse(rollout), np.array(rollout.logprobs)
    slots = parsed.slots
    return [
        (one.object, tuple(float(logprobs[slots.start[k] : slots.end[k]].sum()) for k in one.slots))
        for one in parsed.objects
    ]


# ---- which box ------------------------------------------------------------------------------------------------------


def boxes(samples: Sequence[Sample], answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Judge the boxes by the least number of votes."""
    found: list[tuple[int, dict[str, float]]] = []
    for sample, own in zip(samples, answers, strict=True):
        labels = [np.array(obj.bins, dtype=float) for obj in sample.objects]
        for cluster in cluster_objects([[obj for obj, _ in answer] for answer in own]):
            choices = _choices(cluster, own)
            near = max(labels, key=lambda label: _iou(choices["median"], label), default=None)
            if cluster.votes > 1 and near is not None and _iou(choices["median"], near) >= NEAR:
                found.append((cluster.votes, {name: _iou(box, near) for name, box in choices.items()}))
    number = len(answers[0])
    return {
        f"{least} votes or more": _compared([ious for votes, ious in found if votes >= least])
        for least in (2, number // 2 + 1)
    }


def _choices(cluster: Cluster, own: Sequence[Answer]) -> dict[str, Box]:
    corners = np.array([member.object.bins for member in cluster.members], dtype=float)  # [M, 4]
    logprobs = np.array([own[member.answer][member.place][1] for member in cluster.members])  # [M, 4]
    probable = np.exp(logprobs)
    score = np.exp(logprobs.mean(axis=1, keepdims=True))
    return {
        "median": np.array(cluster.object.bins, dtype=float),
        "mean, a vote each": corners.mean(axis=0),
        "mean, weighted by the box's score": (corners * score).sum(axis=0) / score.sum(axis=0),
        "mean, weighted by each coordinate's score": (corners * probable).sum(axis=0) / probable.sum(axis=0),
        "most probable": corners[logprobs.sum(axis=1).argmax()],
        "first": corners[0],
    }


def _iou(a: Box, b: Box) -> float:
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    both = float(sides.prod())
    return both / (float((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod()) - both)


def _compared(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    draws = np.random.default_rng(0).integers(0, len(found), (1000, len(found)))
    ious = {name: np.array([one[name] for one in found]) for name in found[0]}
    return {"clusters": len(found)} | {
        name: {
            "iou": round(float(values.mean()), 4),
            "above_median": [
                round(float(value), 4)
                for value in (
                    (values - ious["median"]).mean(),
                    *np.quantile((values - ious["median"])[draws].mean(axis=1), [0.025, 0.975]),
                )
            ],
            "iou_0.75": round(float((values >= 0.75).mean()), 3),
        }
        for name, values in ious.items()
    }


# ---- how many votes -------------------------------------------------------------------------------------------------


def autos(samples: Sequence[Sample], answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    objects = [[[obj for obj, _ in answer] for answer in own] for own in answers]
    found = {}
    for name, (fault, share) in REGIMES.items():
        counted = [_counted(samples, objects, fault, share, seed) for seed in range(SEEDS)]
        found[name] = {"all": _of(counted[0], range(len(samples)))} | {
            f"{size} scenes": _mean(
                [
                    _of(one, np.random.default_rng([seed, draw]).choice(len(samples), size, replace=False))
                    for seed, one in enumerate(counted)
                    for draw in range(DRAWS)
                ]
            )
            for size in (16, 48)
        }
    return found


Counted = list[tuple[Tally, NDArray[np.int64], int]]  # one for each sample: tally, right free clusters by votes, labels


def _counted(
    samples: Sequence[Sample],
    objects: Sequence[Sequence[Sequence[DetectionObject]]],
    fault: str,
    share: float,
    seed: int,
) -> Counted:
    found: Counted = []
    number = len(objects[0])
    rng = np.random.default_rng([seed, zlib.crc32(fault.encode())])
    rows = [{"objects": [{"desc": o.desc, "bbox_2d": o.bins, "bins": o} for o in s.objects]} for s in samples]
    labels = Labels.of(rows)
    for sample, row, own in zip(samples, rows, objects, strict=True):
        kept = tuple(one["bins"] for one in FAULTS[fault](row, share, labels, rng)) if row["objects"] else ()
        removed = [obj for obj in sample.objects if obj not in kept]
        clusters = candidates(replace(sample, objects=kept), own)
        free = [one for one in clusters if one.relation == "free"]
        right = np.zeros(number + 1, dtype=np.int64)
        same = np.array([[one.object.desc == obj.desc for obj in removed] for one in free], dtype=bool)
        iou = iou_matrix([one.object for one in free], removed)
        for i, *_ in assign(iou, (iou >= SAME) & same.reshape(iou.shape)):
            right[free[i].votes] += 1
        found.append((tally(clusters, number), right, len(kept)))
    return found


def _of(counted: Counted, places: Sequence[int] | NDArray[np.int64] | range) -> dict[str, Any]:
    chosen = [counted[i] for i in places]
    tallies, labels = np.sum([one for one, *_ in chosen], axis=0), sum(one for *_, one in chosen)
    known = estimate(tallies, labels)
    free, right = tallies[1:, 2].astype(float), np.sum([one for _, one, _ in chosen], axis=0)[1:].astype(float)
    gained = (2 * right - free)[::-1].cumsum()[::-1] / max(1, labels)
    precision = np.array(known.precision)
    return {
        "min_votes": known.min_votes,
        "missing": known.missing,
        "free": free.astype(int).tolist(),
        "estimated": precision.round(2).tolist(),
        "true": (right / np.maximum(free, 1)).round(2).tolist(),
        "gained": round(float(gained[known.min_votes - 1]) if known.min_votes else 0.0, 3),
        "best": round(max(0.0, float(gained.max())), 3),
        "error": round(float((abs(precision - right / np.maximum(free, 1)) * free).sum() / max(1, free.sum())), 3),
    }


def _mean(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    means = {name: round(float(np.mean([one[name] for one in found])), 3) for name in ("gained", "best", "error")}
    nothing = float(np.mean([one["min_votes"] is None for one in found]))
    return {
        **means,
        "nothing": round(nothing, 3),
        "harmful": round(float(np.mean([one["gained"] < 0 for one in found])), 3),
    }


if __name__ == "__main__":
    typer.run(main)
