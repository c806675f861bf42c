"""The key-value task: the answer is a flat JSON object with the fields of a document or picture as texts.

    {"invoice": "A-17", "total": "12.50"}

`task.type: key_value`, the second task of this project, is an example of a task without objects. The task's parts are,
in the order of the training loop:

1. `read_fields` reads JSONL like the project's own rows, with `fields` instead of `objects`.
2. `parse`: strict, no repair. A pair is *valid* if key and value are JSON strings with text, and the key is new.
   Invalid pairs are dropped with a reason, and reading continues after them. Reading stops at text that cannot be read
   as a pair.
3. `match`: by key. A pair is *right* if the document has the key with exactly this value, *wrong* if the document has
   another value, and *extra* if the document does not have the key.
4. `target`: the answer's right pairs up to the first entry that is not right, then every missing pair in the document's
   order, the closing brace and EOS. The model's own tokens have weight 0, all others weight 1. So no wrong pair comes
   before the learned tokens. If all pairs are right, only the end is learned.
5. `evaluate`: F1 over pairs.

    f1, precision, recall     over pairs: precision = right / valid, recall = right / the document's
    key_recall                fraction of the document's keys that were answered, with any value
    exact_match               fraction of answers with all pairs right, none missing and none dropped
    parse_rate                answers that are one closed object, nothing dropped, nothing after it
    truncation_rate           answers that reached the token limit
    drop/<reason>             dropped pairs per rollout: not_text, blank, repeated_key, unreadable

Only `read_fields` has side effects: it reads a file. The task uses no part of the detection task.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from learner.config.sections.data import DataConfig
from learner.config.sections.loss import LossConfig
from learner.config.sections.task import TaskConfig
from learner.extensions import Task, Tokenizer
from learner.records import Rollout, Sample, Target
from learner.tasks.supervision import continued, tokens_of
from learner.tasks.task import text_fault
from learner.tasks.tokens import TokenPieces, TokenText, pieces_of
from shared.errors import DataError
from shared.reading import json_of, lines_in

__all__ = ["Field", "FieldAssignment", "KeyValueTask", "ParsedFields", "read_fields"]

Drop = Literal["not_text", "blank", "repeated_key", "unreadable"]
DROPS: tuple[Drop, ...] = ("not_text", "blank", "repeated_key", "unreadable")

# The patterns are over bytes and possessive, so reading takes linear time for any text.
_WS = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_SCALAR = rb'[^][{}",: \t\n\r]++'
_OPEN = re.compile(_WS + rb"\{" + _WS + rb"(\}?)")
_PAIR = re.compile(_WS + b"(" + _STRING + b")" + _WS + b":" + _WS + b"(?:(" + _STRING + b")|" + _SCALAR + b")")
_NEXT = re.compile(_WS + rb"([,}]?)")


class Field(NamedTuple):
    """A key and its value."""

    key: str
    value: str


class Entry(NamedTuple):
    """A pair in an answer. `field` is None if the pair was dropped. `end` is the offset of the byte after the pair."""

    field: Field | None
    end: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParsedFields:
    """A strictly parsed answer. `closed` is True if the object is closed and only whitespace follows."""

    rollout: Rollout
    text: TokenText
    entries: tuple[Entry, ...]
    drops: Mapping[str, int]
    closed: bool

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return the answer's valid pairs."""
        return tuple(entry.field for entry in self.entries if entry.field is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FieldAssignment:
    """An answer matched with the document, by key. `right`: pairs with the document's value. `wrong`: pairs with
    another value. `extra`: pairs with keys that the document lacks. `missed`: keys of the document that the answer
    lacks."""

    parsed: ParsedFields
    right: tuple[Field, ...]
    wrong: tuple[Field, ...]
    extra: tuple[Field, ...]
    missed: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        parsed = self.parsed
        return parsed.closed and not (self.wrong or self.extra or self.missed or any(parsed.drops.values()))


# ---- task ----------------------------------------------------------------------------------------------------------


def read_fields(path: str, data: DataConfig) -> Iterator[Sample]:
    """Yield one sample per line: `{"id": ..., "messages": [...], "images": [...], "fields": {"total": "12.50", ...}}`.

    The line number is the id of a line without `id`. Raises DataError for any other line.
    """
    try:
        for number, line in lines_in(Path(path)):
            yield _sample(line, number, path)
    except OSError as error:
        what, wanted = f"{path}: the file cannot be read", "one record a line"
        raise DataError(what, found=str(error), wanted=wanted, remedy="correct the path") from error


class KeyValueTask(Task):
    """The key-value task. The object has no state besides the tokenizer's tables, so it can be reused."""

    reader = staticmethod(read_fields)

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        self._pieces = pieces_of(tokenizer)

    def parse(self, rollout: Rollout) -> ParsedFields:
        return _parse(rollout, self._pieces.text(rollout.response_token_ids))

    def match(self, parsed: ParsedFields) -> FieldAssignment:
        truth = dict(parsed.rollout.sample.objects)
        answered = parsed.fields
        keys = {field.key for field in answered}
        return FieldAssignment(
            parsed=parsed,
            right=tuple(field for field in answered if truth.get(field.key) == field.value),
            wrong=tuple(field for field in answered if truth.get(field.key, field.value) != field.value),
            extra=tuple(field for field in answered if field.key not in truth),
            missed=tuple(key for key in truth if key not in keys),
        )

    def target(self, assignment: FieldAssignment, loss: LossConfig) -> Target:
        parsed, right = assignment.parsed, set(assignment.right)
        kept = 0
        # The kept part ends before the first wrong pair, so that no wrong pair precedes the learned tokens.
        while kept < len(parsed.entries) and parsed.entries[kept].field in right:
            kept += 1
        length, opening, kept = _cut(parsed, kept)
        said = {entry.field for entry in parsed.entries[:kept]}
        missing = [field for field in parsed.rollout.sample.objects if field not in said]
        tail = opening + (", " if said and missing else "") + _written(missing) + "}"
        return continued(parsed.text.ids[:length], tokens_of(tail, self._pieces), self._eos_token_id)

    def ground_truth(self, sample: Sample, loss: LossConfig) -> Target:
        nothing = self._pieces.text(()).ids
        return continued(nothing, tokens_of("{" + _written(sample.objects) + "}", self._pieces), self._eos_token_id)

    def stats(self, assignment: FieldAssignment) -> dict[str, float]:
        return {
            "right": float(len(assignment.right)),
            "wrong": float(len(assignment.wrong)),
            "extra": float(len(assignment.extra)),
            "missed": float(len(assignment.missed)),
            **{f"drop/{reason}": float(count) for reason, count in assignment.parsed.drops.items()},
        }

    def counts(self, assignments: Sequence[FieldAssignment]) -> list[Mapping[str, float]]:
        return [_count(assignment) for assignment in assignments]

    def evaluate(self, assignments: Sequence[FieldAssignment]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for counted in self.counts(assignments):
            total.update(counted)
        return _evaluated(total)

    def scene(self, assignment: FieldAssignment) -> dict[str, object]:
        """Return truth and answer as mappings of texts, and the drops."""
        sample = assignment.parsed.rollout.sample
        fields, drops = assignment.parsed.fields, dict(assignment.parsed.drops)
        return {"fields": dict(sample.objects), "answer": dict(fields), "drops": drops}

    def validate(self, sample: Sample) -> None:
        _validate(sample, self._pieces)

    @staticmethod
    def check(sample: Sample) -> None:
        _validate(sample, None)

    @property
    def _eos_token_id(self) -> int:
        return self._pieces.tokenizer.eos_token_id


# ---- reading -------------------------------------------------------------------------------------------------------


def _parse(rollout: Rollout, text: TokenText) -> ParsedFields:
    entries: list[Entry] = []
    drops: Counter[str] = Counter()
    opening = _OPEN.match(text.data)
    pos, follows = (opening.end(), b"}" if opening[1] else b",") if opening else (0, b"")
    keys: set[str] = set()
    while follows == b",":
        pair = _PAIR.match(text.data, pos)
        if pair is None:
            break
        entries.append(_entry(pair, keys, drops))
        following = _NEXT.match(text.data, pair.end())
        assert following is not None  # always matches: the pattern accepts empty text
        pos, follows = following.end(), following[1]
    closed = follows == b"}" and not text.data[pos:].strip()
    if not closed:
        drops["unreadable"] += 1
    return ParsedFields(rollout=rollout, text=text, entries=tuple(entries), drops=drops, closed=closed)


def _entry(pair: re.Match[bytes], keys: set[str], drops: Counter[str]) -> Entry:
    """Return the entry of a match of `_PAIR`. The pair's key is added to `keys`, and its fault to `drops`."""
    key, value = _decoded(pair[1]), _decoded(pair[2]) if pair[2] is not None else None
    fault: Drop | None = None
    if value is None or key is None:
        fault = "not_text"
    elif not key.strip() or not value.strip():
        fault = "blank"
    elif key in keys:
        fault = "repeated_key"
    if key is not None:
        keys.add(key)
    if fault is not None or key is None or value is None:
        drops[fault or "not_text"] += 1
        return Entry(None, pair.end())
    return Entry(Field(key, value), pair.end())


def _decoded(string: bytes) -> str | None:
    """Return a JSON string's text; None if the text is not valid."""
    try:
        text: str = json.loads(string)
        text.encode()
    except (UnicodeError, ValueError):  # the text has half of a surrogate pair or of a UTF-8 character
        return None
    return text


def _cut(parsed: ParsedFields, kept: int) -> tuple[int, str, int]:
    """Return three values: the number of prefix tokens with the first `kept` entries, the text with which the tail
    begins, and the number of kept entries.

    A token may hold a pair's end and some text after the pair. If the last token is shared in this way, the prefix ends
    before it, and the tail repeats the pair's last bytes. If these bytes are not whole characters, the last pair is not
    kept.
    """
    text = parsed.text
    while kept:
        end = parsed.entries[kept - 1].end
        length = text.tokens_until(end)
        if text.ends[length - 1] == end:
            return length, "", kept
        try:
            return length - 1, text.data[text.start(length - 1) : end].decode(), kept
        except UnicodeDecodeError:
            kept -= 1
    return 0, "{", 0


# ---- writing -------------------------------------------------------------------------------------------------------


def _written(fields: Iterable[Field]) -> str:
    return ", ".join(f"{_quoted(field.key)}: {_quoted(field.value)}" for field in fields)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _count(assignment: FieldAssignment) -> dict[str, float]:
    parsed = assignment.parsed
    counted = {
        "samples": 1,
        "truth": len(parsed.rollout.sample.objects),
        "predictions": len(parsed.fields),
        "right": len(assignment.right),
        "keys": len(assignment.right) + len(assignment.wrong),
        "exact": assignment.is_exact,
        "parsed": parsed.closed and not any(parsed.drops.values()),
        "length_stopped": parsed.rollout.finish_reason == "length",
        **{f"drop/{reason}": count for reason, count in parsed.drops.items()},
    }
    return {name: float(value) for name, value in counted.items()}


def _evaluated(total: Counter[str]) -> dict[str, float]:
    """Return the metrics by name, computed from summed counts."""
    return {
        "f1": _ratio(2 * total["right"], total["predictions"] + total["truth"]),
        "precision": _ratio(total["right"], total["predictions"]),
        "recall": _ratio(total["right"], total["truth"]),
        "key_recall": _ratio(total["keys"], total["truth"]),
        "exact_match": _ratio(total["exact"], total["samples"]),
        "parse_rate": _ratio(total["parsed"], total["samples"]),
        "truncation_rate": _ratio(total["length_stopped"], total["samples"]),
        **{f"drop/{reason}": _ratio(total[f"drop/{reason}"], total["samples"]) for reason in DROPS},
    }


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


EVALUATED = tuple(_evaluated(Counter()))  # names of metrics


def _sample(line: bytes, number: int, path: str) -> Sample:
    wanted = "an object with messages, images, and fields: texts by name"
    try:
        row = json_of(line)
        fields = row["fields"].items()
        if not all(isinstance(value, str) for _, value in fields):
            raise TypeError("a value of `fields` is not a text")
        turns = row["messages"][:-1] if row["messages"][-1]["role"] == "assistant" else row["messages"]
        return Sample(
            sample_id=str(row.get("id", number)),
            messages=tuple(dict(turn) for turn in turns),
            images=tuple(map(str, row.get("images", ()))),
            objects=tuple(Field(key, value) for key, value in fields),
            width=int(row.get("width", 0)),
            height=int(row.get("height", 0)),
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}, in {line.decode(errors='replace')!r:.200}"
        what = f"{path}, line {number}: not a row of the key-value task"
        raise DataError(what, found=found, wanted=wanted, remedy="correct the record") from error


def _validate(sample: Sample, pieces: TokenPieces | None) -> None:
    for item in sample.objects:
        if not isinstance(item, Field):
            raise DataError(
                f"sample {sample.sample_id}: no fields",
                found=f"a {type(item).__name__}",
                wanted="a learner.tasks.key_value.Field",
                remedy="set data.format to auto, or make it return Fields",
            )
        fault = text_fault(item.key, pieces, "key") or text_fault(item.value, pieces, "value")
        if fault is not None:
            found, wanted, remedy = fault
            what = f"sample {sample.sample_id}: the field {item.key!r} cannot be used"
            raise DataError(what, found=found, wanted=wanted, remedy=remedy)
