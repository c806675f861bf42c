"""Encoding in parts gives the ids of the whole text, with real tokenizers of the kinds that matter."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.tiny import build_tokenizer
from learner.tasks.tokens import TokenBoundaries, TokenPieces, _splitting_tokens
from tests.examples import examples
from tests.tiers import slow

COORDS = ["<|coord_0|>", "<|coord_77|>", "<|coord_999|>", "<|coord_1000|>", "<|im_end|>"]
NUMBERS = st.integers(0, 1010).map(str) | st.sampled_from(["007", "[12", " 5]", "[1, 23, 456]", '"seat [7], "'])
PARTS = st.sampled_from([*COORDS, "<|", "|>", "<", ", ", "[", "]", '": {"desc": "']) | NUMBERS | st.text(max_size=6)
# Tokenizers cut these before they merge: the demo's nothing, Qwen's digits apart, Llama's digits in threes, GPT-2's
# digits with the space in front.
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "whole": None,
    "digits apart": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST,
    "digits in threes": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST,
    "digits with a space": r" ?\p{L}+| ?\p{N}+|" + REST,
}


@functools.cache
def tokenizer_of(cut: str) -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer with another pre-tokenizer."""
    tokenizer = build_tokenizer()
    if CUTS[cut]:
        first, spell = (
            pre_tokenizers.Split(Regex(CUTS[cut]), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        )
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, spell])
    return tokenizer


@pytest.mark.parametrize("cut", [cut if cut in ("whole", "digits in threes") else slow(cut) for cut in CUTS])
@settings(max_examples=examples(300), deadline=None)
@given(parts=st.lists(PARTS, max_size=12))
def test_parts_give_the_ids_of_the_whole(cut: str, parts: list[str]) -> None:
    tokenizer, text = tokenizer_of(cut), "".join(parts)
    found = TokenPieces(tokenizer).boundaries.encode(text)
    assert found is None or found == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("cut", CUTS)
def test_an_answer_is_cut(cut: str) -> None:
    """Else the comparison above would be of nothing, and the encoding as slow as without."""
    boundaries = TokenPieces(tokenizer_of(cut)).boundaries
    assert boundaries.encode('{"object_1": {"desc": "cat", "bbox_2d": [<|coord_1|>, <|coord_20|>]}}') is not None
    assert boundaries.encode('{"object_1": {"desc": "cat", "bbox_2d": [1, 20, 300, 999]}}') is not None


def test_numbers_that_a_token_reaches_into_are_no_boundaries() -> None:
    encode = functools.partial(map, ord)
    vocabulary = {chr(code): code for code in range(128)}

    def boundaries(**more: int) -> TokenBoundaries:
        return TokenBoundaries(lambda text: tuple(encode(text)), {}, vocabulary | more)

    assert boundaries().numbers["42"] == (ord("4"), ord("2"))
    for fused in ["[1", "1]", "23,", "Ġ7", "0Ġ", "Ċ5", "<|1, 2|>"]:
        assert not boundaries(**{fused: 500}).numbers, fused
    assert boundaries(bbox_2d=500, object_1=501).numbers


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
def test_only_tokens_cut_out_as_they_stand_are_boundaries(token: AddedToken) -> None:
    assert _splitting_tokens({5: token}) == {}
    assert _splitting_tokens({5: token, 6: AddedToken("<|y|>", normalized=False)}) == {"<|y|>": 6}


@pytest.mark.parametrize("other", [", <", "a<|x|>", "<|x|><|y|>"])
def test_no_boundaries_where_another_token_may_lie_across_one(other: str) -> None:
    assert _splitting_tokens({5: AddedToken("<|x|>", normalized=False), 6: AddedToken(other, normalized=False)}) == {}


def test_a_tokenizer_without_boundaries_is_asked_for_the_whole() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<|x|>": 0, "?": 1}, "?")))
    assert TokenPieces(tokenizer).encode_long("<|x|>") == [0]
