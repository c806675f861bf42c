"""Computes a score for every box: the probability that it is right, from several features.

In: the parsed answers to one image, the greedy answer first, then K sampled answers (K may be 0). Out: candidates with
scores. A candidate is a box of the greedy answer, or a cluster of boxes of sampled answers that the greedy answer lacks
(`agreement.py`). A candidate has `FEATURES`: probabilities of its tokens, agreement of the answers, size and position.
A `Calibration`, fitted on validation images (`calibrate.py`), turns features into the probability that the box is
right: IoU at least 0.5 with an object of the same name. Without a calibration the score only ranks boxes: it rises with
the probability of their tokens.

A calibration is a logistic regression over piecewise linear functions of the features. `calibration.json` in the folder
of the weights has one calibration for each K that was measured. No side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from learner.config.inference import CALIBRATION_NAME
from learner.records import DetectionObject, ParsedRollout
from learner.tasks.detection.agreement import Cluster, ClusterMember, cluster_objects
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.grammar import NUM_BINS
from learner.tasks.tokens import TokenPieces
from shared.validation import read_if_there

FEATURES = (
    "greedy",  # 1 if the greedy answer has the object, else 0
    "share",  # fraction of the sampled answers that have the object
    "tight",  # mean IoU of the boxes in sampled answers with this box
    "named",  # fraction of the answers with the object that give it this name
    "name_logprob",  # log-probability of the name, mean over the answers with the object
    "coord_logprob",  # log-probability of the coordinates, mean over coordinates and answers
    "coord_least",  # log-probability of the least probable coordinate, mean over answers
    "log_area",
    "log_aspect",  # logarithm of the box's width / height
    "edge",  # distance to the nearest edge of the image, as a fraction of the image's side
    "place",  # position in the answer, from 0 (first object) to 1 (last)
    "count",  # log(1 + mean number of objects per answer)
    "overlap",  # the box's largest IoU with another candidate
    "overlap_same",  # the largest IoU with another candidate of the same name
    "rivals",  # the largest fraction of the answers that have an overlapping candidate
)
_LEAST = -12.0  # min log-probability of a feature, in nats; lower values are set to this.
# Without a calibration, a log-probability of -4 nats (a probability of 0.02) gives a score of 0.5.
_HALF_NATS = 4.0


class ScoreCandidate(NamedTuple):
    """A box to be scored. `votes`: number of sampled answers that contain the box; None: none were sampled."""

    object: DetectionObject
    in_greedy: bool
    votes: int | None
    features: NDArray[np.float64]  # [len(FEATURES)]


class ObjectLogprobs(NamedTuple):
    """Log-probabilities of one object in its answer, in nats: of the name, of the coordinates (mean), and of the least
    probable coordinate. `place`: the object's position in the answer, from 0 (first) to 1 (last)."""

    name: float
    coords: float
    least: float
    place: float


def candidates(answers: Sequence[ParsedRollout], pieces: TokenPieces) -> list[ScoreCandidate]:
    """Return the boxes of one image that get a score. `answers`: the greedy answer, then the sampled ones."""
    drawn = len(answers) - 1
    objects = [[predicted.object for predicted in answer.objects] for answer in answers]
    clusters = (
        cluster_objects(objects)
        if drawn
        else [Cluster(members=(ClusterMember(0, i, obj),), object=obj) for i, obj in enumerate(objects[0])]
    )
    told = [told_of(answer, pieces) for answer in answers]
    chosen = [cluster.object for cluster in clusters]
    shares = np.array([len(cluster.members) / len(answers) for cluster in clusters])
    overlaps = _overlaps(chosen, shares)
    count = np.log1p(np.mean([len(one) for one in objects]))
    found = []
    for cluster, obj, overlap in zip(clusters, chosen, overlaps, strict=True):
        in_greedy, votes = _votes(cluster)
        place = np.mean([told[m.answer][m.place].place for m in cluster.members])
        features = np.array([*_support(cluster, obj, told, drawn), *_shape(obj), place, count, *overlap])
        found.append(ScoreCandidate(obj, in_greedy, votes if drawn else None, features))
    return found


def told_of(answer: ParsedRollout, pieces: TokenPieces) -> list[ObjectLogprobs]:
    """Return log-probabilities and position of each object of an answer. Unknown log-probabilities are 0."""
    number = len(answer.objects)
    logprobs = answer.rollout.logprobs
    places = [i / max(1, number - 1) for i in range(number)]
    if logprobs is None or not number:
        return [ObjectLogprobs(0.0, 0.0, 0.0, place) for place in places]
    text = pieces.text(answer.rollout.response_token_ids)
    by_token = np.maximum(np.array(logprobs), _LEAST)
    slots = answer.slots
    found = []
    for predicted, place in zip(answer.objects, places, strict=True):
        begin, end = predicted.desc_bytes
        name = by_token[text.token_at(begin) : text.tokens_until(end)]
        each = [by_token[slots.start[i] : slots.end[i]].sum() for i in predicted.slots]
        found.append(ObjectLogprobs(float(name.sum()), float(np.mean(each)), float(min(each)), place))
    return found


def _votes(cluster: Cluster) -> tuple[bool, int]:
    # Members are sorted by answer, and answer 0 is the greedy one.
    in_greedy = cluster.members[0].answer == 0
    return in_greedy, cluster.votes - in_greedy


def _support(
    cluster: Cluster, obj: DetectionObject, told: Sequence[Sequence[ObjectLogprobs]], drawn: int
) -> list[float]:
    """Return how well the answers support the object: the features `greedy` to `coord_least` of FEATURES. In order:
    whether the greedy answer has the object, its fraction of the votes, its mean IoU with the boxes of sampled answers,
    its name's fraction, and mean log-probabilities of its name and coordinates."""
    in_greedy, votes = _votes(cluster)
    own = [told[m.answer][m.place] for m in cluster.members]
    others = [m.object for m in cluster.members if m.answer]
    tight = float(iou_matrix([obj], others).mean()) if others else 0.0
    named = cluster.names.get(obj.desc, 0) / cluster.votes
    means = np.mean([one[:3] for one in own], axis=0)
    return [float(in_greedy), votes / drawn if drawn else 0.0, tight, named, *means.tolist()]


def _shape(obj: DetectionObject) -> list[float]:
    """Return three features of the object's bounding box. `log_area`: the natural logarithm of its area, as a fraction
    of the image's area. `log_aspect`: the natural logarithm of its width over its height, in bins. `edge`: its distance
    to the nearest edge, as a fraction of the image's side."""
    x1, y1, x2, y2 = bounding_box(obj)
    width, height, last = x2 - x1, y2 - y1, NUM_BINS - 1
    edge = min(x1, y1, last - x2, last - y2) / last
    return [float(np.log(width * height / last**2)), float(np.log(width / height)), edge]


def _overlaps(objects: Sequence[DetectionObject], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return three features of each of N candidates of an image [N, 3]. `overlap`: the largest IoU with another
    candidate. `overlap_same`: the largest IoU with another candidate of its name. `rivals`: the largest of `shares`
    among other candidates that it overlaps by an IoU of 0.3 or more. A feature is 0 if there is no such candidate.
    `shares` [N]: for each candidate the fraction of the answers that have it."""
    if not objects:
        return np.zeros((0, 3))
    iou = iou_matrix(objects, objects)
    np.fill_diagonal(iou, 0.0)
    names = np.array([obj.desc for obj in objects], dtype=object)
    same = np.where(names[:, None] == names[None, :], iou, 0.0)
    rivals = np.where(iou >= 0.3, shares[None, :], 0.0)
    return np.stack([iou.max(axis=1), same.max(axis=1), rivals.max(axis=1)], axis=1)


# ---- calibration ---------------------------------------------------------------------------------------------------


class ScoredObject(NamedTuple):
    object: DetectionObject
    score: float  # 0 to 1
    votes: int | None


class Calibration(BaseModel):
    """A logistic regression. `weights` has a weight for each column of `design`. `samples` is K, the number of sampled
    answers per image. `threshold` is the score with the best F1 on the images of the fit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int
    names: list[str]  # names of the classes that have columns in `design`
    knots: dict[str, list[float]]  # for each feature, the ascending values between which its function is linear
    weights: list[float]
    threshold: float
    num_images: int
    num_boxes: int
    measured: dict[str, float] = {}  # quality on held-out images: `auc` and `ece`

    def scores(self, features: NDArray[np.float64], names: Sequence[str]) -> NDArray[np.float64]:
        """Return the probabilities [N] of N candidates with features [N, len(FEATURES)]."""
        columns = design(features, names, knots=self.knots, classes=self.names)
        return 1 / (1 + np.exp(-np.clip(columns @ np.array(self.weights), -30, 30)))


class CalibrationFile(BaseModel):
    """The content of `calibration.json`: one calibration for each K that was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    calibrations: list[Calibration]

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    def of(self, samples: int) -> Calibration | None:
        """Return the calibration whose K is nearest to `samples`; None if there is none. A calibration for K = 0 is
        never used for another K, nor a calibration for another K for K = 0."""
        fitting = [one for one in self.calibrations if (one.samples > 0) == (samples > 0)]
        return min(fitting, key=lambda one: abs(one.samples - samples), default=None)


def read_calibration(folder: Path, *, samples: int) -> Calibration | None:
    """Return the folder's calibration for K = `samples`; None if it has none. Raises ConfigError for a bad file."""
    found = read_calibrations(folder)
    return None if found is None else found.of(samples)


def read_calibrations(folder: Path) -> CalibrationFile | None:
    """Return all calibrations of a model; None if the folder has none. Raises ConfigError for a bad file."""
    return read_if_there(
        CalibrationFile,
        folder / CALIBRATION_NAME,
        what="the calibration cannot be read",
        remedy="make it again: rollout-learner calibrate",
    )


def design(
    features: NDArray[np.float64], names: Sequence[str], *, knots: Mapping[str, Sequence[float]], classes: Sequence[str]
) -> NDArray[np.float64]:
    """Return the columns [N, D] of the regression: a constant, then each feature as a piecewise linear function, then
    for each class a constant and a slope over the area. The piecewise linear functions are constant outside their
    knots."""
    columns = [np.ones(len(features))]
    area = np.zeros(len(features))
    for i, name in enumerate(FEATURES):
        ends = knots.get(name, ())
        if len(ends) < 2:
            continue
        low, high = ends[0], ends[-1]
        scaled = (np.clip(features[:, i], low, high) - low) / (high - low)
        columns.append(scaled)
        for knot in ends[1:-1]:
            columns.append(np.maximum(0.0, scaled - (knot - low) / (high - low)))
        if name == "log_area":
            area = scaled
    line = np.array(names, dtype=object)
    for one in classes:
        is_it = (line == one).astype(np.float64)
        columns += [is_it, is_it * area]
    return np.stack(columns, axis=1)


def scored_objects(
    answers: Sequence[ParsedRollout], pieces: TokenPieces, calibration: Calibration | None
) -> list[ScoredObject]:
    """Return the candidates of one image with their scores, not sorted."""
    found = candidates(answers, pieces)
    if not found:
        return []
    scores = scores_of(found, calibration)
    return [ScoredObject(one.object, float(score), one.votes) for one, score in zip(found, scores, strict=True)]


def scores_of(found: Sequence[ScoreCandidate], calibration: Calibration | None) -> NDArray[np.float64]:
    """Return the scores [N] of the candidates."""
    features = np.stack([one.features for one in found])
    if calibration is not None:
        return calibration.scores(features, [one.object.desc for one in found])
    # The tokens of a right box may have a probability of 0.003. The formula keeps the order of scores, and does not
    # show a box with a small probability as 0.00.
    return 1 / (1 - np.log(np.maximum(raw_scores(features), 1e-300)) / _HALF_NATS)


def token_scores(parsed: ParsedRollout, pieces: TokenPieces) -> list[float]:
    """Return a score for each object of an answer. A score rises with the probability of name and coordinates, as in
    `scores_of` without a calibration. The score is 1 if log-probabilities are not known."""
    return [1 / (1 - (told.name + told.coords) / _HALF_NATS) for told in told_of(parsed, pieces)]


def raw_scores(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N]: the probability of name and coordinates. For a candidate in sampled answers, return the mean of this
    probability and the fraction of sampled answers that have it."""
    column = {name: features[:, i] for i, name in enumerate(FEATURES)}
    tokens = np.exp(column["name_logprob"] + column["coord_logprob"])
    return np.where(column["share"] > 0, (column["share"] + tokens) / 2, tokens * column["greedy"])
