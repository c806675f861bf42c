"""The tokenizer that pieces are made of is the one that a run uses, and yet nobody else's settings reach it."""

from __future__ import annotations

from deploy.demo.model import build_tokenizer
from learner.tasks.pieces import TokenPieces


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
