"""Defines the methods of tasks whose answers are lists of objects (`ObjectTask`), and checks texts before they are
learned. The protocol of all tasks is `learner.extensions.Task`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from learner.records import Assignment, DetectionObject, ParsedRollout, Rollout

# Modules that load numpy are imported for types only, because `check` does not need numpy.
if TYPE_CHECKING:
    from learner.tasks.tokens import TokenPieces


@dataclass(frozen=True, kw_only=True, slots=True)
class SerializedTail:
    """The text that continues an answer. `desc_spans` has a half-open span of characters for each object's description,
    `object_spans` a span for each object with the separator before it."""

    text: str
    desc_spans: tuple[tuple[int, int], ...]
    object_spans: tuple[tuple[int, int], ...]


class ObjectTask(Protocol):
    def parse(self, rollout: Rollout) -> ParsedRollout:
        """Parse strictly, aligned to tokens. A malformed object is dropped and counted with a reason, never
        repaired."""
        ...

    def match(self, parsed: ParsedRollout) -> Assignment:
        """Match predictions one-to-one with the sample's objects. Each pair has at least the IoU threshold."""
        ...

    def serialize(self, objects: Sequence[DetectionObject], *, after: ParsedRollout | None) -> SerializedTail:
        """Return `objects` as text that continues `after` (None: a new answer) and closes the container, without
        EOS."""
        ...

    def can_be_taught(self, obj: DetectionObject) -> bool:
        """Return True if an object could be ground truth: its text, parsed again, gives the same object."""
        ...

    def canonical_key(self, obj: DetectionObject) -> tuple[int, ...]:
        """Return the sort key of canonical order."""
        ...

    def coordinate_text(self, value: int) -> str:
        """Return one bin as it is spelled in an answer."""
        ...

    def desc_text(self, desc: str) -> str:
        """Return a description as it is spelled in an answer, without its quotes."""
        ...


def text_fault(text: str, pieces: TokenPieces | None, what: str = "description") -> tuple[str, str, str] | None:
    """Return (found, wanted, what to do) if `text` cannot be taught, else None. `pieces` None: it is not checked that
    the text is the same after tokenization. `what` names the text in the message."""
    remedy = f"rewrite the {what}"
    if not text.strip():
        return repr(text), f"a {what} that is not blank", remedy
    if "<|" in text:
        return repr(text), "no text that tokenizers read as special tokens", remedy
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return repr(text), "valid Unicode", remedy
    if pieces is None:
        return None
    token_ids = pieces.encode(text)
    if pieces.tokenizer.eos_token_id in token_ids or pieces.text(token_ids).data != data:
        return repr(text), "text that survives tokenization", f"{remedy} (in Unicode form NFC, without special tokens)"
    return None
