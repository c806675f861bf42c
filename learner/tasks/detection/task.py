"""The detection task: implements `learner.extensions.Task` with the modules of this package."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learner.config.sections.loss import LossConfig
from learner.config.sections.task import TaskConfig
from learner.config.sections.training import ESTIMATED
from learner.extensions import PrefixRewards, Task, Tokenizer
from learner.records import Assignment, DetectionObject, ParsedRollout, Rollout, Sample, Target
from learner.tasks.detection.bins import canonical_key
from learner.tasks.detection.calibrate import cross_fitted, fit_calibration
from learner.tasks.detection.grammar import NUM_BINS, grammar_of
from learner.tasks.detection.match import match_objects
from learner.tasks.detection.metrics import COLUMNS, METRICS, CountTable, coco_ap, count_objects, evaluate_counts
from learner.tasks.detection.parse import parse_rollout
from learner.tasks.detection.reasons import Reason, reason_of
from learner.tasks.detection.rewards import answer_rewards, prefix_rewards
from learner.tasks.detection.scores import CalibrationFile, ScoreCandidate, candidates, scores_of, token_scores
from learner.tasks.detection.target import build_target, ground_truth_target
from learner.tasks.detection.write import escaped, object_fault, serialize_objects, validate_sample
from learner.tasks.task import SerializedTail
from learner.tasks.tokens import pieces_of
from shared.errors import ConfigError, DataError

# Names of metrics. The estimated metrics are reported if labels have gaps.
EVALUATED = (
    *METRICS,
    *coco_ap([]),
    "coco/calibrated",
    ESTIMATED,
    "estimated_f1_low@0.5",
    "estimated_f1_high@0.5",
)


class DetectionTask(Task):
    """The detection task. The object has no state besides the grammar and token tables, so it can be reused."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        """Set up the tables. Raises ConfigError if coordinates are tokens and the tokenizer lacks one of them."""
        self.config = config
        self.grammar = grammar_of(config.container, config.coordinates)
        self._numbered = grammar_of(config.container, config.coordinates, numbered=True)
        self._pieces = pieces_of(tokenizer)
        self._bin_of_token = np.empty(0, np.int64) if self.grammar.digits else _coordinate_tokens(tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._pieces.tokenizer

    def parse(self, rollout: Rollout) -> ParsedRollout:
        """Parse an answer [T] strictly: malformed objects are dropped and counted by reason. Never raises."""
        grammar = self._numbered if len(rollout.sample.images) > 1 else self.grammar
        return parse_rollout(rollout, self._pieces, self._bin_of_token, grammar)

    def match(self, parsed: ParsedRollout) -> Assignment:
        """Match predictions one-to-one with the sample's objects in the same image, by IoU of at least `iou_threshold`
        (Hungarian). Names do not matter."""
        return match_objects(parsed, self.config.iou_threshold)

    def serialize(self, objects: Sequence[DetectionObject], *, after: ParsedRollout | None) -> SerializedTail:
        """Return `objects` as text: a whole answer if `after` is None, else the continuation of `after`."""
        return serialize_objects(objects, after, self.grammar)

    def can_be_taught(self, obj: DetectionObject) -> bool:
        return object_fault(obj, self._pieces) is None

    def canonical_key(self, obj: DetectionObject) -> tuple[int, ...]:
        return canonical_key(obj)

    def coordinate_text(self, value: int) -> str:
        return self.grammar.coordinate_text(value)

    def desc_text(self, desc: str) -> str:
        return escaped(desc)

    def target(self, assignment: Assignment, loss: LossConfig) -> Target:
        """Return Y_train [Y]: the answer's own prefix, the missed objects, and EOS, with labels and weights. Raises
        LossError if the tokenizer changes the appended text; `validate` finds such samples."""
        return build_target(assignment, self, self.tokenizer, loss=loss)

    def ground_truth(self, sample: Sample, loss: LossConfig) -> Target:
        """Return the whole answer, teacher-forced [Y]. Raises LossError as `target` does."""
        return ground_truth_target(sample, self, self.tokenizer, desc_weight=loss.desc_weight)

    def stats(self, assignment: Assignment) -> dict[str, float]:
        parsed = assignment.parsed
        return {
            "matched": float(len(assignment.pairs)),
            "missed": float(len(assignment.missed)),
            "spurious": float(len(assignment.spurious)),
            "truncated": float(parsed.truncated),
            "unusable": float(not parsed.usable),
            **{f"drop/{reason}": float(count) for reason, count in parsed.drops.items()},
        }

    def reason(self, assignments: Sequence[Assignment], metrics: Mapping[str, float]) -> Reason | None:
        return reason_of(assignments, metrics, lambda ids: str(self.tokenizer.decode(list(ids))))

    def rewards(self, assignment: Assignment, names: Collection[str]) -> dict[str, float]:
        return answer_rewards(assignment.parsed, names)

    def prefix_rewards(self, assignment: Assignment, weights: Mapping[str, float]) -> PrefixRewards:
        return prefix_rewards(assignment, weights, self._pieces)

    def scene(self, assignment: Assignment) -> dict[str, object]:
        """Return the content of the report's picture: truth and predictions in bins, scores of the predictions, pairs
        and drops."""
        parsed = assignment.parsed
        sample = parsed.rollout.sample
        return {
            "truth": [object_json(o) for o in sample.objects],
            "ignored": [object_json(o) for o in sample.ignored],
            "predictions": [object_json(p.object) for p in parsed.objects],
            "scores": [round(float(score), 5) for score in self._scores(assignment)],
            "pairs": [list(pair) for pair in assignment.pairs],
            "drops": dict(parsed.drops),
            "truncated": parsed.truncated,
        }

    def count(self, assignments: Sequence[Assignment]) -> CountTable:
        """Return the counts that `evaluate` adds up, one row per sample, for the bootstrap."""
        return count_objects(assignments)

    def counts(self, assignments: Sequence[Assignment]) -> list[Mapping[str, float]]:
        """Return each row of `count` as numbers by column name, without zeros."""
        rows = self.count(assignments).values
        return [{name: float(v) for name, v in zip(COLUMNS, row, strict=True) if v} for row in rows]

    def evaluate(self, assignments: Sequence[Assignment]) -> Mapping[str, float]:
        """Return all of `metrics.METRICS` over the whole set, by name, and COCO's AP; 0 for an empty set. AP uses
        calibrated scores if all assignments have them, else the tokens' probabilities."""
        calibrated = bool(assignments) and all(one.scores is not None for one in assignments)
        ap = coco_ap(assignments, [self._scores(one) for one in assignments])
        return {**evaluate_counts(self.count(assignments)), **ap, "coco/calibrated": float(calibrated)}

    def _scores(self, assignment: Assignment) -> Sequence[float]:
        """Return a score for each prediction."""
        return assignment.scores if assignment.scores is not None else token_scores(assignment.parsed, self._pieces)

    def calibration(self, assignments: Sequence[Assignment]) -> str | None:
        try:
            calibration, _, _ = fit_calibration(*self._candidates(assignments), num_drawn=0)
        except DataError:
            return None
        return CalibrationFile(calibrations=[calibration]).to_json()

    def calibrated(self, assignments: Sequence[Assignment], calibration: str | None = None) -> Sequence[Assignment]:
        found, samples = self._candidates(assignments)
        if calibration is not None:
            known = CalibrationFile.model_validate_json(calibration).of(0)
            scores = [scores_of(own, known) if own else np.empty(0) for own in found]
        else:
            try:
                scores = cross_fitted(found, samples)
            # There are too few boxes for a fit, so AP uses the probabilities of the tokens.
            except DataError:
                return assignments
        return [replace(one, scores=tuple(own.tolist())) for one, own in zip(assignments, scores, strict=True)]

    def _candidates(self, assignments: Sequence[Assignment]) -> tuple[list[list[ScoreCandidate]], list[Sample]]:
        """Return each answer's candidates, in the order of its predictions, and the samples."""
        found = [candidates([one.parsed], self._pieces) for one in assignments]
        return found, [one.parsed.rollout.sample for one in assignments]

    def validate(self, sample: Sample) -> None:
        """Raises DataError if an object cannot be ground truth, or if objects are not in canonical order."""
        validate_sample(sample, self._pieces)

    @staticmethod
    def check(sample: Sample) -> None:
        validate_sample(sample, None)


def object_json(item: DetectionObject) -> dict[str, object]:
    """Return description, image (if the sample has several) and bins of an object, as an answer has them."""
    return {"desc": item.desc, **({} if item.image is None else {"image": item.image}), item.kind: list(item.bins)}


def coordinate_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the thousand `<|coord_k|>` tokens. Raises ConfigError if the tokenizer lacks one of them."""
    texts = [f"<|coord_{value}|>" for value in range(NUM_BINS)]
    # All texts are encoded in one call, because one call per token took a sixth of a short run.
    together = tokenizer.encode("".join(texts), add_special_tokens=False)
    if len(together) == len(set(together)) == NUM_BINS:
        return list(together)
    token_ids: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                "task.coordinates is `tokens`, but the tokenizer lacks some of them",
                found=f"{text} is {len(ids)} tokens",
                wanted="one token for each <|coord_k|>, k in 0..999",
                remedy="add them to the tokenizer and train their embeddings, or set task.coordinates: digits",
            )
        token_ids += ids
    return token_ids


def _coordinate_tokens(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return [id] the bin of each coordinate token; -1 for other tokens. The last entry stands for all larger ids."""
    token_ids = coordinate_token_ids(tokenizer)
    bin_of_token = np.full(max(token_ids) + 2, -1)
    bin_of_token[token_ids] = np.arange(NUM_BINS)
    return bin_of_token
