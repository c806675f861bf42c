"""The loss on the ground truth after a model's own words, compared with that after the ground truth's words. Also the
loss on each token of the whole ground truth, which says how well the model knows the labels.

In: greedy answers, matched. From the first object that an answer skipped, the ground truth continues
(`loss.prefix_end: first_miss`). Out: nats per token of that continuation, once after the model's own words and once
after the ground truth's, by kind of token. The difference (own minus ground truth) is what training after the model's
own words can improve beyond teacher forcing. If it is about zero, the model errs in what it sees, not because it reads
its own words.

Only tokens that are the same in both are compared. Coordinates in digits count as structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from learner.config.sections.loss import LossConfig
from learner.policy.load import Policy
from learner.records import Assignment, EncodedPrompt, Sample, Target
from learner.tasks.detection.target import build_target, ground_truth_target
from learner.tasks.detection.task import DetectionTask

Kind = Literal["coordinates", "names", "structure", "all"]
KINDS: tuple[Kind, ...] = ("structure", "names", "coordinates", "all")
NAME_WEIGHT = 2.0  # marks descriptions; nothing is learned
LOSS = LossConfig(prefix_end="first_miss", desc_weight=NAME_WEIGHT)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherForced:
    """The ground truth of a sample as the model sees it: `nats` [Y] of each token after all before it."""

    prompt: EncodedPrompt
    target: Target
    nats: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """One scene's tokens after the model's first miss."""

    own: NDArray[np.float64]  # [N] nats, after the model's own words
    truth: NDArray[np.float64]  # [N] nats, after the ground truth's
    kinds: NDArray[np.str_]  # [N]

    def sums(self, kind: Kind) -> NDArray[np.float64]:
        """Return [3] for one kind of token: nats after the model's own words, nats after the truth's, number of
        tokens."""
        mask = np.full(len(self.kinds), True) if kind == "all" else self.kinds == kind
        return np.array([self.own[mask].sum(), self.truth[mask].sum(), mask.sum()])


def teacher_forced(policy: Policy, task: DetectionTask, sample: Sample) -> TeacherForced:
    prompt = policy.encoder.encode(sample)
    target = ground_truth_target(sample, task, policy.tokenizer, desc_weight=NAME_WEIGHT)
    return TeacherForced(prompt=prompt, target=target, nats=_nats(policy, prompt, target))


def compare(policy: Policy, task: DetectionTask, assignment: Assignment, forced: TeacherForced) -> Compared | None:
    """Compare the ground truth's tokens after the answer's own words with the same tokens after the ground truth's.
    None if no part of the answer is usable, or if object numbers take different numbers of tokens."""
    own = build_target(assignment, task, policy.tokenizer, loss=LOSS)
    length = len(own.token_ids) - own.prefix_length
    if not own.prefix_length or length > len(forced.target.token_ids):
        return None
    same = own.token_ids[-length:] == forced.target.token_ids[-length:]
    is_name = forced.target.loss_weights == NAME_WEIGHT
    pieces = policy.tokenizer.convert_ids_to_tokens(forced.target.token_ids)
    is_coordinate = [piece.startswith("<|coord_") for piece in pieces]
    kinds = np.where(is_coordinate, "coordinates", np.where(is_name, "names", "structure"))[-length:]
    if not (kinds[~same] == "structure").all():  # object numbers may differ, and nothing else
        return None
    nats = _nats(policy, forced.prompt, own)
    return Compared(own=nats[-length:][same], truth=forced.nats[-length:][same], kinds=kinds[same])


def _nats(policy: Policy, prompt: EncodedPrompt, target: Target) -> NDArray[np.float64]:
    (logprobs,) = policy.logprobs([(prompt, target.token_ids.tolist())])
    return -np.asarray(logprobs)
