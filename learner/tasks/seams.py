"""Encodes long texts from parts that come again, cut where no token can reach across.

In: a tokenizer's encoding, its added tokens and its vocabulary. Out: the ids of the whole text, or None where it can't
be cut safely. Made and called by `TokenPieces`.

An added token `<|...|>` is cut out by tokenizers before anything else, so what lies between two of them is encoded
alike wherever it stands. A coordinate in digits stands between one of `[ ,` and one of `,]`: where no token has a
digit beside such a character, none reaches into the number or out of it. What a pre-tokenizer makes of the text
between two numbers may still depend on there being digits, so that text is asked for with a digit on either side, and
the answer is only taken where these are tokens of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

_CACHED_PARTS = 1 << 16
_NUM_BINS = 1000
_ADDED_TOKEN = r"(<\|[^|<>]*\|>)"
_NUMBER = r"(?<=[\[ ])(0|[1-9][0-9]{0,2})(?=[,\]])"
_NO_NUMBER = r"((?!))"
_DIGIT = "0"  # stands for all of them
# In byte-level spelling, where space, tab, newline and carriage return look like this; added tokens have them plain.
_BESIDE = r"[\[\], \t\n\rĠĉĊč]"
_FUSED = re.compile(f"[0-9]{_BESIDE}|{_BESIDE}[0-9]")

Ids = tuple[int, ...]


class Seams:
    """`numbers` has the ids of each coordinate in digits; none where they do not stand alone."""

    def __init__(self, encode: Callable[[str], Ids], added: Mapping[int, Any], vocabulary: Mapping[str, int]) -> None:
        self.numbers = _numbers_alone(encode, vocabulary)
        self._added = _added_seams(added)
        self._seam = re.compile(f"{_ADDED_TOKEN}|{_NUMBER if self.numbers else _NO_NUMBER}")
        # No method of this object: a cache that holds its owner lives until the garbage is collected.
        self._between = lru_cache(maxsize=_CACHED_PARTS)(partial(_encode_between, encode, self.numbers))

    def encode(self, text: str) -> list[int] | None:
        parts = self._seam.split(text)  # between, added token or None, number or None, between, ...
        if len(parts) == 1:
            return None
        ids: list[int] = []
        left = ""
        for between, added, number in zip(parts[0::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
            if between:
                inner = self._between(left, between, _DIGIT if number else "")
                if inner is None:
                    return None
                ids += inner
            left = _DIGIT if number else ""
            if number:
                ids += self.numbers[number]
            elif added:
                if added not in self._added:  # the shape only: nothing is known of how it mixes with its neighbours
                    return None
                ids.append(self._added[added])
        return ids


def _encode_between(
    encode: Callable[[str], Ids], numbers: Mapping[str, Ids], left: str, text: str, right: str
) -> Ids | None:
    """The ids of `text` where a digit stands beside it as `left` and `right` say; None where one is fused with it."""
    ids = encode(left + text + right)
    if (left and ids[:1] != numbers[left]) or (right and ids[-1:] != numbers[right]):
        return None
    return ids[len(left) : len(ids) - len(right)]


def _added_seams(added: Mapping[int, Any]) -> dict[str, int]:
    """Added tokens of the form `<|...|>` that are cut out as they stand; none where another could lie across one."""
    texts = [str(token) for token in added.values()]
    if any(text.endswith("<") or ("<|" in text and not re.fullmatch(_ADDED_TOKEN, text)) for text in texts):
        return {}
    return {
        str(token): token_id
        for token_id, token in added.items()
        if re.fullmatch(_ADDED_TOKEN, str(token))
        and not any(getattr(token, trait, True) for trait in ("normalized", "lstrip", "rstrip", "single_word"))
    }


def _numbers_alone(encode: Callable[[str], Ids], vocabulary: Mapping[str, int]) -> dict[str, Ids]:
    """Each coordinate's ids, which are the same wherever it stands in a list; none where that can't be said."""
    if not vocabulary or any(map(_FUSED.search, vocabulary)):
        return {}
    numbers = {str(value): encode(str(value)) for value in range(_NUM_BINS)}
    spelled = {token_id: text for text, token_id in vocabulary.items()}
    as_written = all("".join(map(spelled.__getitem__, ids)) == text for text, ids in numbers.items())
    return numbers if as_written and len(numbers[_DIGIT]) == 1 else {}
