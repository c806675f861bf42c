"""Which bytes each token stands for, so that text can be read over a model's own token ids.

In: token ids. Out: their bytes joined, and where each token ends. A byte-level BPE token may hold part of a UTF-8
character, so text is bytes here and becomes `str` only where a description is read. Pieces and short encodings are
cached per tokenizer; nothing is ever re-tokenized. Used by the detection parser and by the target builder.

Seams. A tokenizer cuts text at its added tokens before anything else, so no token reaches across one, and what lies
between two is encoded alike wherever it stands. An answer is mostly that: `, `, and the words between two objects.
`encode_long` asks the tokenizer for each such part once. It gives the ids of the whole text, or else asks for those.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from learner.tasks.task import Tokenizer

_CACHED_ENCODINGS = 1 << 16
_SEAM = re.compile(r"(<\|[^|<>]*\|>)")


class TokenText(NamedTuple):
    """`data[ends[i-1]:ends[i]]` are the bytes of token i. A token may be empty."""

    data: bytes
    ends: list[int]

    def start(self, index: int) -> int:
        """The offset of token `index`'s first byte."""
        return self.ends[index - 1] if index else 0

    def token_at(self, offset: int) -> int:
        """The token that holds byte `offset`."""
        return bisect_right(self.ends, offset)

    def tokens_until(self, offset: int) -> int:
        """How many tokens it takes to reach `offset` bytes; the last may reach further."""
        return bisect_left(self.ends, offset) + 1 if offset else 0


class TokenPieces(dict[int, bytes]):
    """Token id -> bytes, filled as ids are met. Made by `pieces_of`.

    Raises KeyError for nothing: an id that the tokenizer does not know has no bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.encode = lru_cache(maxsize=_CACHED_ENCODINGS)(self._encode)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self._added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {}) if self._byte_level else {}
        self._seams = _seams(self._added)

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._piece(token_id)
        return piece

    def text(self, token_ids: Sequence[int]) -> TokenText:
        """The text of `token_ids`, with each token's place in it."""
        pieces = list(map(self.__getitem__, token_ids))
        return TokenText(b"".join(pieces), list(accumulate(map(len, pieces))))

    def encode_long(self, text: str) -> list[int]:
        """`encode` for texts that will hardly come again, from parts that will."""
        ids: list[int] = []
        for part in _SEAM.split(text) if self._seams else (text,):
            seam = self._seams.get(part)
            if seam is not None:
                ids.append(seam)
            elif _SEAM.fullmatch(part):  # a seam's shape only: nothing is known of how it mixes with its neighbours
                return list(self._encode(text))
            elif part:
                ids += self.encode(part) if self._seams else self._encode(part)
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        if not self._byte_level:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        piece: str | None = self.tokenizer.convert_ids_to_tokens(token_id)  # type: ignore[attr-defined]
        return bytes(map(_BYTE_OF.__getitem__, piece)) if piece else b""


@lru_cache(maxsize=8)
def pieces_of(tokenizer: Tokenizer) -> TokenPieces:
    """The pieces of `tokenizer`; the same object for the same tokenizer, so that its caches are shared."""
    return TokenPieces(tokenizer)


def _seams(added: Mapping[int, Any]) -> dict[str, int]:
    """Added tokens of the form `<|...|>` that are cut out as they stand; none where another could lie across one."""
    texts = [str(token) for token in added.values()]
    if any(text.endswith("<") or ("<|" in text and not _SEAM.fullmatch(text)) for text in texts):
        return {}
    return {
        str(token): token_id
        for token_id, token in added.items()
        if _SEAM.fullmatch(str(token))
        and not any(getattr(token, trait, True) for trait in ("normalized", "lstrip", "rstrip", "single_word"))
    }


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, as every byte-level BPE vocabulary spells them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
