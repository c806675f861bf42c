"""What a task must know: how to read an answer, score it against the truth, and write the truth as an answer.

A task is pure: token ids and records in, records out; no model, no HTTP, no clock. The trainer, the evaluation and the
target builder use only this protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from learner.records import Assignment, DetectionObject, ParsedRollout, Rollout, Sample


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks and targets need."""

    eos_token_id: int

    def __hash__(self) -> int: ...  # by identity: tables are cached per tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SerializedTail:
    """Text to append, with half-open character spans of each object's description, and of each object with the
    separator before it."""

    text: str
    desc_spans: tuple[tuple[int, int], ...]
    object_spans: tuple[tuple[int, int], ...]


class Task(Protocol):
    def parse(self, rollout: Rollout) -> ParsedRollout:
        """Token-aligned and strict: no repair; a malformed object is dropped and counted, with a reason."""
        ...

    def match(self, parsed: ParsedRollout) -> Assignment:
        """One-to-one assignment; pairs below the IoU threshold are infeasible before the assignment."""
        ...

    def serialize(self, objects: Sequence[DetectionObject], *, after: ParsedRollout | None) -> SerializedTail:
        """`objects` as text that continues `after` (None: a new answer) and closes the container, without EOS."""
        ...

    def can_be_taught(self, obj: DetectionObject) -> bool:
        """Whether an object could be ground truth: written as an answer, it reads back unchanged."""
        ...

    def canonical_key(self, obj: DetectionObject) -> tuple[int, ...]:
        """The sort key of canonical order."""
        ...

    def coordinate_text(self, value: int) -> str:
        """One bin as an answer spells it."""
        ...

    def desc_text(self, desc: str) -> str:
        """One description as an answer spells it, without its quotes."""
        ...

    def counts(self, assignments: Sequence[Assignment]) -> list[Mapping[str, float]]:
        """Per assignment, the counts that `evaluate` adds up. A bootstrap over samples resamples them."""
        ...

    def evaluate(self, assignments: Sequence[Assignment]) -> Mapping[str, float]:
        """Metrics over a whole evaluation set, by name."""
        ...

    def validate(self, sample: Sample) -> None:
        """Raises DataError if the task cannot use the sample."""
        ...
