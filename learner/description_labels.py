"""Labels of matched descriptions, in the rollout's own context (`loss.matched_desc_weight`).

Matching goes by IoU alone, so a prediction in the right place may have the wrong name, and the loss on Y_train has no
word on it: prefix text has weight 0. Where names are what a model gets wrong, that leaves its errors as they are.

In: an `Assignment`. Out: which tokens of its prefix are supervised, and what each should have been. Pure. Called by
`learner.target`. The rule is that of numbers (`coordinate_labels.py`): own tokens count as far as the true description
has the same ones; at the first token where it leaves them, its token is the label; what follows is masked. A token
that holds any byte of the description is one of its tokens; where the true one is longer, the parting token may be the
one behind it. A description is masked whole where the rollout cut its text in other tokens than the tokenizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from learner.records import Assignment, PredictedObject
from learner.tasks.pieces import TokenPieces, TokenText, pieces_of
from learner.tasks.task import Tokenizer


def description_labels(
    assignment: Assignment, desc_text: Callable[[str], str], tokenizer: Tokenizer
) -> Iterator[tuple[int, int]]:
    """(position in the prefix, label) of every supervised token of a matched description."""
    parsed, truth = assignment.parsed, assignment.parsed.rollout.sample.objects
    pieces = pieces_of(tokenizer)
    text = pieces.text(parsed.token_ids[: parsed.prefix_length].tolist())
    for index, truth_index, _ in assignment.pairs:
        predicted, wanted = parsed.objects[index], truth[truth_index].desc
        begin, end = _inside_quotes(predicted)
        if end >= len(text.data):
            continue  # fused with the prefix's end, which the tail gives back
        if predicted.object.desc == wanted:
            tokens = range(text.token_at(begin), text.tokens_until(end))
            yield from zip(tokens, text.ids[tokens].tolist(), strict=True)
        else:
            yield from _up_to_parting(text, predicted, desc_text(wanted), pieces)


def _up_to_parting(
    text: TokenText, predicted: PredictedObject, wanted: str, pieces: TokenPieces
) -> Iterator[tuple[int, int]]:
    """The labels where `wanted` is not what was said: its tokens in the same place, between the same bytes."""
    begin, end = _inside_quotes(predicted)
    first, last = text.token_at(begin), text.tokens_until(end)  # with the token behind the description
    last = min(last, len(text.ids) - 1)
    before, behind = text.data[text.start(first) : begin], text.data[end : text.ends[last]]
    own = text.ids[first : last + 1].tolist()
    if _encoded(before + text.data[begin:end] + behind, pieces) != own:
        return
    labels = _encoded(before + wanted.encode() + behind, pieces) or []
    for position, (token, label) in enumerate(zip(own, labels, strict=False), start=first):
        yield position, label
        if token != label:
            return


def _inside_quotes(predicted: PredictedObject) -> tuple[int, int]:
    begin, end = predicted.desc_bytes
    return begin + 1, end - 1


def _encoded(data: bytes, pieces: TokenPieces) -> list[int] | None:
    """None where the bytes are no text: a character is torn at either end."""
    try:
        return list(pieces.encode(data.decode()))
    except UnicodeDecodeError:
        return None
