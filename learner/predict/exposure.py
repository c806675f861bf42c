"""Measures whether a model predicts labels worse after its own answer than after the preceding labels (exposure gap).

In: greedy answers, matched with labels. Each answer is cut at the position of the first label that it missed. After the
cut come the labels that the answer lacks (`loss.prefix_end: first_miss`). Out: the loss (nats) on the tokens of these
labels, by kind of token, computed twice: after the model's own answer, and after the preceding labels. Training on the
model's own answers can reduce the difference between the two, and teacher forcing cannot. If the difference is about
zero, the model's mistakes do not come from reading its own answer.

Only tokens that are the same in both texts are compared. Coordinates that are written as digits count as structure.
`TeacherForced` also has the loss on all labels, a measure of how well the model knows them.
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
NAME_WEIGHT = 2.0  # a marker: tokens with this loss weight are descriptions; nothing is trained here
LOSS = LossConfig(prefix_end="first_miss", desc_weight=NAME_WEIGHT)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherForced:
    """A sample's labels as the answer to its prompt, and the model's loss on them."""

    prompt: EncodedPrompt
    target: Target
    nats: NDArray[np.float64]  # loss of each token of `target`, given all tokens before it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """The loss on the N tokens of the labels that an answer lacks, computed twice."""

    own: NDArray[np.float64]  # [N] nats, after the model's own answer
    truth: NDArray[np.float64]  # [N] nats, computed after the preceding labels
    kinds: NDArray[np.str_]  # [N] kind of each token, see `KINDS`

    def sums(self, kind: Kind) -> NDArray[np.float64]:
        """Return three numbers for one kind of token: the summed loss in nats with the model's own answer as context,
        the same with the preceding labels as context, and the number of tokens."""
        mask = np.full(len(self.kinds), True) if kind == "all" else self.kinds == kind
        return np.array([self.own[mask].sum(), self.truth[mask].sum(), mask.sum()])


def teacher_forced(policy: Policy, task: DetectionTask, sample: Sample) -> TeacherForced:
    prompt = policy.encoder.encode(sample)
    target = ground_truth_target(sample, task, policy.tokenizer, desc_weight=NAME_WEIGHT)
    return TeacherForced(prompt=prompt, target=target, nats=_nats(policy, prompt, target))


def compare(policy: Policy, task: DetectionTask, assignment: Assignment, forced: TeacherForced) -> Compared | None:
    """Return the loss on the labels that the answer lacks: after the answer, and after the preceding labels (`forced`).
    None if no part of the answer is usable, or if the two texts do not line up."""
    own = build_target(assignment, task, policy.tokenizer, loss=LOSS)
    length = len(own.token_ids) - own.prefix_length
    if not own.prefix_length or length > len(forced.target.token_ids):
        return None
    same = own.token_ids[-length:] == forced.target.token_ids[-length:]
    is_name = forced.target.loss_weights == NAME_WEIGHT
    pieces = policy.tokenizer.convert_ids_to_tokens(forced.target.token_ids)
    is_coordinate = [piece.startswith("<|coord_") for piece in pieces]
    kinds = np.where(is_coordinate, "coordinates", np.where(is_name, "names", "structure"))[-length:]
    # Only the objects' running numbers may differ. If a number has more tokens in one text, the two texts do not line
    # up.
    if not (kinds[~same] == "structure").all():
        return None
    nats = _nats(policy, forced.prompt, own)
    return Compared(own=nats[-length:][same], truth=forced.nats[-length:][same], kinds=kinds[same])


def _nats(policy: Policy, prompt: EncodedPrompt, target: Target) -> NDArray[np.float64]:
    (logprobs,) = policy.logprobs([(prompt, target.token_ids.tolist())])
    return -np.asarray(logprobs)
