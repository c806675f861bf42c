"""Maps tokens to bytes, so that a model's own token ids can be read as text, and encodes long texts fast.

`TokenPieces`. In: token ids. Out: their joined bytes, and where each token ends. A byte-level BPE token may hold part
of a UTF-8 character, so text stays bytes, and only the objects' names are decoded to `str`. The bytes of all tokens
seen so far are kept in arrays indexed by token id, so that one array lookup gives the bytes of a whole answer.
Encodings of short texts are cached.

`TokenBoundaries` encodes long texts by joining encoded parts, which often repeat. A text is cut only where no token can
cross the cut. In: a tokenizer's encoding, its added tokens and its vocabulary. Out: the ids of the whole text, or None
if the text cannot be cut safely. Tokenizers split at an added token `<|...|>` first, so the text between two added
tokens always has the same tokens. A coordinate in digits stands between one of `[ ,` and one of `,]`. If no token has a
digit next to one of these characters, no token crosses the number's ends. A pre-tokenizer may split the text between
two numbers differently for different digits. So the text between two numbers is encoded with a digit on either side,
and used only if these digits are separate tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from struct import pack
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.extensions import Tokenizer


def ranges(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of all ranges, concatenated. Range i has `lengths[i]` numbers, beginning with `first[i]`."""
    if not len(first):
        return np.empty(0, dtype=np.int64)
    ends = lengths.cumsum()
    return (first - ends + lengths).repeat(lengths) + np.arange(ends[-1])


_CACHED_PARTS = 1 << 16
_NUM_BINS = 1000
_ADDED_TOKEN = r"(<\|[^|<>]*\|>)"
_NUMBER = r"(?<=[\[ ])(0|[1-9][0-9]{0,2})(?=[,\]])"
_NO_NUMBER = r"((?!))"
_DIGIT = "0"  # an example of a digit.
# The characters that can be next to a number. Whitespace is given twice: as in byte-level vocabularies, and plain, as
# in added tokens.
_BESIDE = r"[\[\], \t\n\rĠĉĊč]"
_FUSED = re.compile(f"[0-9]{_BESIDE}|{_BESIDE}[0-9]")

Ids = tuple[int, ...]


class TokenBoundaries:
    """Encodes texts in parts. `numbers` has the ids of each coordinate in digits; empty if digits may be fused."""

    def __init__(
        self, encode: Callable[[str], Ids], added: Mapping[int, object], vocabulary: Mapping[str, int]
    ) -> None:
        self.numbers = _numbers_alone(encode, vocabulary)
        self._added = _splitting_tokens(added)
        self._cut = re.compile(f"{_ADDED_TOKEN}|{_NUMBER if self.numbers else _NO_NUMBER}")
        # The cache is not on the method, because cache and object would refer to each other and stay until garbage
        # collection.
        self._between = lru_cache(maxsize=_CACHED_PARTS)(partial(_encode_between, encode, self.numbers))

    def encode(self, text: str) -> list[int] | None:
        # `parts` repeats three items: the text before a cut, the added token or None, the number or None.
        parts = self._cut.split(text)
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
                if added not in self._added:  # the text only looks like an added token, so a token may cross its ends
                    return None
                ids.append(self._added[added])
        return ids


def _encode_between(
    encode: Callable[[str], Ids], numbers: Mapping[str, Ids], left: str, text: str, right: str
) -> Ids | None:
    """Return the ids of `text`, encoded between the digits `left` and `right` if they are given; None if a token holds
    both a digit and a part of `text`."""
    ids = encode(left + text + right)
    if (left and ids[:1] != numbers[left]) or (right and ids[-1:] != numbers[right]):
        return None
    return ids[len(left) : len(ids) - len(right)]


def _splitting_tokens(added: Mapping[int, object]) -> dict[str, int]:
    """Return the added tokens `<|...|>` at which texts are always split; {} if another added token could overlap one of
    them."""
    texts = [str(token) for token in added.values()]
    if any(text.endswith("<") or ("<|" in text and not re.fullmatch(_ADDED_TOKEN, text)) for text in texts):
        return {}
    return {
        str(token): token_id
        for token_id, token in added.items()
        if re.fullmatch(_ADDED_TOKEN, str(token))
        # Added tokens are left out if they are searched in normalized text, include neighbouring blanks, or are found
        # in whole words only.
        and not any(getattr(token, trait, True) for trait in ("normalized", "lstrip", "rstrip", "single_word"))
    }


def _numbers_alone(encode: Callable[[str], Ids], vocabulary: Mapping[str, int]) -> dict[str, Ids]:
    """Return the token ids of each coordinate, if a coordinate has the same ids everywhere in a list; otherwise {}."""
    if not vocabulary or any(map(_FUSED.search, vocabulary)):
        return {}
    numbers = {str(value): encode(str(value)) for value in range(_NUM_BINS)}
    spelled = {token_id: text for text, token_id in vocabulary.items()}
    as_written = all("".join(map(spelled.__getitem__, ids)) == text for text, ids in numbers.items())
    return numbers if as_written and len(numbers[_DIGIT]) == 1 else {}


_CACHED_ENCODINGS = 1 << 16
_MAX_VOCABULARY = 1 << 20  # no tokenizer has larger token ids; a larger id has no text
_NOT_MET = -1


class TokenText(NamedTuple):
    """The text of T tokens. `data[ends[i-1]:ends[i]]` are the bytes of token i, which may be empty."""

    ids: NDArray[np.int64]  # [T]
    data: bytes
    ends: NDArray[np.int64]  # [T]

    def starts(self) -> NDArray[np.int64]:
        """Return [T + 1]: the offset at which each token begins, and the end of the text."""
        return np.concatenate([[0], self.ends])

    def start(self, index: int) -> int:
        """Return the offset of token `index`'s first byte."""
        return int(self.ends[index - 1]) if index else 0

    def token_at(self, offset: int) -> int:
        """Return the index of the token that holds byte `offset`."""
        return int(self.ends.searchsorted(offset, "right"))

    def tokens_until(self, offset: int) -> int:
        """Return how many tokens hold the first `offset` bytes. The last token may hold later bytes too."""
        return int(self.ends.searchsorted(offset, "left")) + 1 if offset else 0


class TokenPieces:
    """Gives the bytes of each token, which it reads on demand. An unknown id has no bytes. `pieces_of` returns one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self._added: dict[int, object] = getattr(tokenizer, "added_tokens_decoder", {}) if self._byte_level else {}
        # The cache is not on the method, because cache and object would refer to each other, and the tables stay until
        # garbage collection.
        self._encode = partial(_encode, tokenizer, _encoder_of(backend))
        self.encode = lru_cache(maxsize=_CACHED_ENCODINGS)(self._encode)
        # `_bytes` has the bytes of all tokens seen so far. `_lengths` and `_begins` give, by token id, the number of a
        # token's bytes and their offset in `_bytes`. The last entry is for all larger ids.
        self._lengths = np.full(_MAX_VOCABULARY + 1, _NOT_MET, dtype=np.int64)
        self._begins = np.zeros(_MAX_VOCABULARY + 1, dtype=np.int64)
        self._bytes = np.empty(0, dtype=np.uint8)
        self._lengths[-1] = 0
        self._adding = Lock()

    def __getitem__(self, token_id: int) -> bytes:
        return self.text((token_id,)).data

    def text(self, token_ids: Sequence[int]) -> TokenText:
        """Return the text of `token_ids`, with the end of each token."""
        ids = np.frombuffer(pack(f"{len(token_ids)}q", *token_ids), dtype=np.int64)  # half the time of np.fromiter
        lengths = self.lengths(ids)
        at = ranges(self._begins.take(ids, mode="clip"), lengths)
        return TokenText(ids, self._bytes.take(at).tobytes(), lengths.cumsum())

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of bytes of each token [T]."""
        lengths = self._lengths.take(ids, mode="clip")
        if len(ids) and lengths.min() == _NOT_MET:
            self._meet(ids)
            lengths = self._lengths.take(ids, mode="clip")
        return lengths

    def _meet(self, ids: NDArray[np.int64]) -> None:
        """Add the bytes of new tokens to the tables."""
        with self._adding:
            new = np.unique(ids[self._lengths.take(ids, mode="clip") == _NOT_MET])
            pieces = list(map(self._piece, new.tolist()))
            lengths = np.array(list(map(len, pieces)), dtype=np.int64)
            begins = len(self._bytes) + lengths.cumsum() - lengths
            self._bytes = np.concatenate([self._bytes, np.frombuffer(b"".join(pieces), dtype=np.uint8)])
            # Other threads read the tables without the lock. Threads without the lock see a token as new until its
            # length is set, so the length is written last.
            self._begins[new] = begins
            self._lengths[new] = lengths

    def encode_long(self, text: str) -> list[int]:
        """Return the token ids of `text`, as `encode` does. Long texts rarely repeat as a whole, so the ids of their
        parts are cached."""
        ids = self.boundaries.encode(text)
        return list(self._encode(text)) if ids is None else ids

    @cached_property
    def boundaries(self) -> TokenBoundaries:
        """Return the encoder that cuts this tokenizer's texts."""
        vocabulary = self.tokenizer.get_vocab() if self._byte_level else {}  # type: ignore[attr-defined]
        return TokenBoundaries(self._encode, self._added, vocabulary)

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        if not self._byte_level:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        piece: str | None = self.tokenizer.convert_ids_to_tokens(token_id)  # type: ignore[attr-defined]
        return bytes(map(_BYTE_OF.__getitem__, piece)) if piece else b""


@lru_cache(maxsize=8)
def pieces_of(tokenizer: Tokenizer) -> TokenPieces:
    """Return the object that gives the bytes of each token of `tokenizer`. All callers with the same tokenizer get the
    same object, so they share its caches."""
    return TokenPieces(tokenizer)


def _encode(tokenizer: Tokenizer, encoder: Any | None, text: str) -> tuple[int, ...]:
    if encoder is not None:
        return tuple(encoder.encode(text, add_special_tokens=False).ids)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _encoder_of(backend: Any) -> Any | None:
    """Return a copy of `backend` if it is a `tokenizers.Tokenizer`, else None. A direct call of the copy encodes a
    short text in a fifth of the time."""
    if not hasattr(backend, "no_truncation"):
        return None
    # The encoder is copied, because other code uses the original with truncation and padding.
    encoder = copy.deepcopy(backend)
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes by the printable characters that byte-level BPE vocabularies use for them (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
