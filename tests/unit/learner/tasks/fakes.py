"""A byte-level tokenizer whose vocabulary is whatever a test cuts text into, and records made from text.

`encode` is deterministic (greedy, longest of the merges that the test gave, else single bytes; coordinate tokens
whole); `split` cuts at given offsets, so that a test can fuse and tear anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from learner.config.sections.task import TaskConfig
from learner.records import DetectionObject, Rollout, Sample
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import _BYTE_OF

_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}
COORD = re.compile(rb"<\|coord_(0|[1-9]\d{0,2})\|>")
FIRST_COORD_ID = 1000


class ByteLevelDecoder:
    def __repr__(self) -> str:
        return "ByteLevel()"


class CuttingTokenizer:
    """Ids 1000..1999 are the coordinate tokens, 2000 is EOS; all others are made as pieces are met."""

    eos_token_id = 2000

    def __init__(self, merges: Iterable[bytes] = ()) -> None:
        self.backend_tokenizer = SimpleNamespace(decoder=ByteLevelDecoder())
        self.added_tokens_decoder = {FIRST_COORD_ID + k: f"<|coord_{k}|>" for k in range(1000)}
        self.added_tokens_decoder[self.eos_token_id] = "<|end|>"
        self.merges = sorted(merges, key=len, reverse=True)
        self._id_of: dict[bytes, int] = {}
        self._piece_of: dict[int, bytes] = {}

    def id_of(self, piece: bytes) -> int:
        if piece not in self._id_of:
            self._id_of[piece] = 3000 + len(self._id_of)
            self._piece_of[self._id_of[piece]] = piece
        return self._id_of[piece]

    def get_vocab(self) -> dict[str, int]:
        """A test may cut text anywhere, so a number may be fused with anything."""
        return {"1,": self.id_of(b"1,")}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return "".join(_CHAR_OF[byte] for byte in self._piece_of[token_id])

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        data, pos, ids = text.encode(), 0, []
        while pos < len(data):
            if coord := COORD.match(data, pos):
                ids.append(FIRST_COORD_ID + int(coord[1]))
                pos = coord.end()
                continue
            piece = next((m for m in self.merges if data.startswith(m, pos)), data[pos : pos + 1])
            ids.append(self.id_of(piece))
            pos += len(piece)
        return ids

    def split(self, data: bytes, cuts: Iterable[int], *, whole_coords: bool = True) -> list[int]:
        """Tokens of `data`, torn at `cuts` and around coordinate tokens."""
        ids, wanted, pos = [], sorted(set(cuts)), 0
        for coord in [*(COORD.finditer(data) if whole_coords else ()), None]:
            end = coord.start() if coord else len(data)
            inner = [c for c in wanted if pos < c < end]
            for begin, stop in zip([pos, *inner], [*inner, end], strict=True):
                if begin < stop:
                    ids.append(self.id_of(data[begin:stop]))
            if coord:
                ids.append(FIRST_COORD_ID + int(coord[1]))
                pos = coord.end()
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return b"".join(self.piece(i) for i in token_ids).decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        added = self.added_tokens_decoder.get(token_id)
        return self._piece_of[token_id] if added is None else added.encode()


def make_task(
    container: str = "index_map", coordinates: str = "tokens", merges: Iterable[bytes] = ()
) -> tuple[DetectionTask, CuttingTokenizer]:
    tokenizer = CuttingTokenizer(merges)
    config = TaskConfig.model_validate({"container": container, "coordinates": coordinates})
    return DetectionTask(config, tokenizer), tokenizer


def box(desc: str, *bins: int) -> DetectionObject:
    return DetectionObject(desc=desc, kind="bbox_2d", bins=bins)


def poly(desc: str, *bins: int) -> DetectionObject:
    return DetectionObject(desc=desc, kind="poly", bins=bins)


def make_sample(objects: Iterable[DetectionObject] = (), sample_id: str = "s0", num_images: int = 1) -> Sample:
    several = num_images if num_images > 1 else 0
    return Sample(
        sample_id=sample_id,
        messages=(),
        images=tuple(f"{k}.png" for k in range(several)),
        objects=tuple(objects),
        width=100,
        height=100,
        sizes=((100, 100),) * several,
    )


def make_rollout(
    token_ids: Iterable[int],
    truth: Iterable[DetectionObject] = (),
    *,
    finish_reason: str = "stop",
    sample_id: str = "s0",
    num_images: int = 1,
) -> Rollout:
    return Rollout(
        sample=make_sample(truth, sample_id, num_images),
        prompt_token_ids=(1,),
        response_token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        ver=0,
        seed=0,
    )
