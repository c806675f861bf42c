"""A tokenizer's pieces: made of the one that a run uses, out of reach of others' settings, shared by threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench.tiny import build_tokenizer
from learner.tasks.tokens import TokenPieces


def test_what_others_set_on_the_tokenizer_does_not_reach_targets() -> None:
    """Padding and truncation of a prompt stay on the tokenizer's backend until the next call."""
    tokenizer = build_tokenizer()
    text = 'a text, "longer" than four tokens: 123, 45'
    whole = tokenizer.encode(text, add_special_tokens=False)
    tokenizer.backend_tokenizer.enable_truncation(4)
    before = TokenPieces(tokenizer)
    assert list(before.encode(text)) == before.encode_long(text) == whole
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert before.encode("1") == TokenPieces(tokenizer).encode("1")
    assert len(before.encode("1")) == 1


def test_threads_that_meet_tokens_at_once_read_the_right_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts are made into rows on several threads, which share a tokenizer's pieces."""
    monkeypatch.setattr(TokenPieces, "_piece", slow_piece)
    tokenizer = build_tokenizer()
    rng = np.random.default_rng(0)
    answers = [tuple(rng.integers(0, len(tokenizer), 40).tolist()) for _ in range(64)]
    wanted = [b"".join(spelled(i) for i in ids) for ids in answers]
    for _ in range(5):
        pieces = TokenPieces(tokenizer)
        with ThreadPoolExecutor(8) as threads:
            assert [text.data for text in threads.map(pieces.text, answers)] == wanted


def spelled(token_id: int) -> bytes:
    return str(token_id).encode()


def slow_piece(_: TokenPieces, token_id: int) -> bytes:
    time.sleep(1e-5)  # other threads have their turn
    return spelled(token_id)
