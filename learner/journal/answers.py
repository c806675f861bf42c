"""Writes the newest answers of a run, with the learned label of each token, for the live view.

In: an answer's assignment (its objects, matched with the labels), and the target that is learned from it; `add` may be
called on any thread. Out: `answers.json` in the run directory, with rank 0's last answers. The file is written again
after a step, at most every WRITE_EVERY_S.

A target begins with the answer's first tokens (the prefix), and continues with tokens that the answer should have had
(the tail). Each token of the answer has one kind: `kept` (in the prefix), `matched` (in the prefix, and a label is
learned there), `dropped` (with a reason), or `cut` (after the prefix). After the answer's tokens come the tail's
tokens. The kind of a tail's token is `appended`, or `unlearned` if it has no loss.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.data.views import shown_images, shown_sizes
from learner.extensions import Tokenizer
from learner.records import Assignment, Target
from learner.run.files import write_atomically
from learner.tasks.detection.task import object_json
from learner.tasks.supervision import IGNORED
from learner.tasks.tokens import TokenPieces, pieces_of

NAME = "answers.json"
NEWEST = 6  # max answers in answers.json
WRITE_EVERY_S = 2.0  # min seconds between two writes of the file
MAX_TOKENS = 1500  # max written tokens of an answer, and max written tokens of its tail.
# (text, kind, note). The note is the label that is learned instead of the token, or the reason why the token was
# dropped.
Token = list[str]


class AnswersLog:
    """Keeps the last `size` answers, and writes them to `answers.json`."""

    def __init__(
        self,
        run_dir: Path,
        tokenizer: Tokenizer,
        size: int = NEWEST,
        *,
        kept: Callable[[Assignment], Sequence[int]] = lambda _: (),
    ) -> None:
        """`kept` returns the indices of an answer's unmatched predictions that are kept (`loss.keep_unmatched`): the
        loss treats them as objects whose label is missing."""
        self._kept = kept
        self._path, self._pieces = run_dir / NAME, pieces_of(tokenizer)
        self._last: deque[tuple[Assignment, Target]] = deque(maxlen=size)
        self._written_at_s = -WRITE_EVERY_S

    def add(self, assignment: Assignment, target: Target) -> None:
        """Keep an answer for the next `write`. The call takes no time, and any thread may call it."""
        # The `append` of a deque is atomic, so no lock is needed.
        self._last.append((assignment, target))

    def write(self, global_step: int) -> None:
        """Write the last answers, newest first, unless the file was written less than WRITE_EVERY_S ago. Raises
        OutputError."""
        now = time.monotonic()
        answers = list(self._last)
        if answers and now - self._written_at_s >= WRITE_EVERY_S:
            self._written_at_s = now
            told = [
                answer(assignment, target, self._pieces, self._kept(assignment))
                for assignment, target in reversed(answers)
            ]
            write_atomically(self._path, json.dumps({"global_step": global_step, "answers": told}))


def answer(assignment: Assignment, target: Target, pieces: TokenPieces, kept: Sequence[int] = ()) -> dict[str, object]:
    """Return one answer's entry in the file. `kept`: indices of unmatched predictions that `loss.keep_unmatched`
    keeps."""
    parsed = assignment.parsed
    rollout, sample = parsed.rollout, parsed.rollout.sample
    return {
        "id": sample.sample_id,
        "images": shown_images(sample),
        **shown_sizes(sample),
        "truth": [object_json(item) for item in sample.objects],
        "ignored": [object_json(item) for item in sample.ignored],
        "predictions": [object_json(predicted.object) for predicted in parsed.objects],
        "pairs": [[p, t, round(iou, 3)] for p, t, iou in assignment.pairs],
        "missed": list(assignment.missed),
        "kept": list(kept),
        "drops": dict(parsed.drops),
        "truncated": parsed.truncated,
        "usable": parsed.usable,
        "ver": rollout.ver,
        "server_id": rollout.server_id,
        "finish_reason": rollout.finish_reason,
        "tokens": tokens_of(assignment, target, pieces),
    }


def tokens_of(assignment: Assignment, target: Target, pieces: TokenPieces) -> list[Token]:
    """Return the tokens of the answer, at most MAX_TOKENS, and then the tokens of the tail (tokens that the answer
    should have had), at most MAX_TOKENS."""
    parsed = assignment.parsed
    num_kept = min(target.prefix_length, len(parsed.token_ids))  # the prefix may also have the stop token
    texts = _texts(parsed.token_ids, pieces)
    tokens = [[text, "kept" if i < num_kept else "cut", ""] for i, text in enumerate(texts)]
    for reason, begin, end in parsed.dropped:
        for token in tokens[begin:end]:
            token[1:] = ["dropped", reason]
    labels = target.labels[:num_kept]
    taught = np.flatnonzero(labels != IGNORED)
    for i, label in zip(taught.tolist(), _texts(labels[taught], pieces), strict=True):
        tokens[i][1:] = ["matched", "" if label == texts[i] else label]
    tail = _texts(target.token_ids[num_kept:], pieces)
    learned = (target.labels[num_kept:] != IGNORED).tolist()
    appended = [
        [text, "appended" if is_learned else "unlearned", ""] for text, is_learned in zip(tail, learned, strict=True)
    ]
    return tokens[:MAX_TOKENS] + appended[:MAX_TOKENS]


def _texts(ids: NDArray[np.int64], pieces: TokenPieces) -> list[str]:
    """Return the text of each token. If a token has only some bytes of a character, they become U+FFFD."""
    text = pieces.text(ids.tolist())
    spans = zip([0, *text.ends.tolist()], text.ends.tolist(), strict=False)
    return [text.data[begin:end].decode(errors="replace") for begin, end in spans]
