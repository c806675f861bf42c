"""Encoding in parts gives the ids of the whole text, with real tokenizers of both kinds that matter."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deploy.demo.model import build_tokenizer
from learner.tasks.pieces import TokenPieces, _seams

COORDS = ["<|coord_0|>", "<|coord_77|>", "<|coord_999|>", "<|coord_1000|>", "<|im_end|>"]
PARTS = st.sampled_from([*COORDS, "<|", "|>", "<", ", ", '": {"desc": "']) | st.text(max_size=6)
# Qwen's way of cutting words: leading spaces stay with words, digits stand alone.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """The demo's, which cuts nothing; or the same with words cut by a regular expression in front."""
    tokenizer = build_tokenizer()
    if kind == "words":
        cut, spell = pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    return tokenizer


@pytest.mark.parametrize("kind", ["whole", "words"])
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, max_size=12))
def test_parts_give_the_ids_of_the_whole(kind: str, parts: list[str]) -> None:
    tokenizer, text = tokenizer_of(kind), "".join(parts)
    pieces = TokenPieces(tokenizer)
    assert pieces._seams, "nothing to cut at: this would compare a thing with itself"
    assert list(pieces.encode_long(text)) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|x|>", lstrip=True, normalized=False),
        AddedToken("<|x|>", rstrip=True, normalized=False),
        AddedToken("<|x|>", single_word=True, normalized=False),
        AddedToken("<|x|>", normalized=True),
        AddedToken("[x]", normalized=False),
    ],
    ids=["eats left", "eats right", "words only", "normalized", "another shape"],
)
def test_only_tokens_cut_out_as_they_stand_are_seams(token: AddedToken) -> None:
    assert _seams({5: token}) == {}
    assert _seams({5: token, 6: AddedToken("<|y|>", normalized=False)}) == {"<|y|>": 6}


@pytest.mark.parametrize("other", [", <", "a<|x|>", "<|x|><|y|>"])
def test_no_seams_where_another_token_may_lie_across_one(other: str) -> None:
    assert _seams({5: AddedToken("<|x|>", normalized=False), 6: AddedToken(other, normalized=False)}) == {}


def test_a_tokenizer_without_seams_is_asked_for_the_whole() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<|x|>": 0, "?": 1}, "?")))
    assert TokenPieces(tokenizer).encode_long("<|x|>") == [0]


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
