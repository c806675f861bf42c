"""The demo's model: a real Qwen3-VL folder, small, with the tokens that the task writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast

from bench.demo_model import build, count_parameters
from bench.tiny import NUM_COORDS, PIECES, SPECIAL_TOKENS, build_tokenizer
from deploy.demo.scenes import DIGIT_WORDS
from tests.examples import examples

ANSWER = (
    '{"object_1": {"desc": "seven", "bbox_2d": [<|coord_1|>, <|coord_20|>, <|coord_300|>, <|coord_999|>]}, '
    '"object_2": {"desc": "three", "bbox_2d": [<|coord_0|>, <|coord_5|>, <|coord_6|>, <|coord_7|>]}}<|im_end|>'
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build(path, "tiny", seed=1)
    return path


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_skeleton_words_and_coordinates_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    coords = [f"<|coord_{k}|>" for k in range(NUM_COORDS)]
    for text in (*PIECES, *DIGIT_WORDS, *coords, *SPECIAL_TOKENS):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


def test_an_answer_is_written_in_few_tokens_with_fused_closers(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    assert tokenizer.decode(ids) == ANSWER
    pieces = [tokenizer.decode([i]) for i in ids]
    assert "]}," in pieces
    assert "]}}" in pieces
    assert "seven" in pieces
    assert len(ids) == 27


def test_coordinates_survive_a_decode_that_skips_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == ANSWER.removesuffix("<|im_end|>")


def test_demo_size() -> None:
    """The checkpoint in the repository may be 12 MB: bfloat16 weights below 11 MB."""
    assert 4_500_000 < count_parameters("demo") <= 5_500_000


def test_transformers_loads_it_and_answers_a_prompt_with_an_image(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Detect every digit."}]}
    text = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Detect every digit.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8))
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 64
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (1, inputs["input_ids"].shape[1], len(processor.tokenizer))
    assert model.generation_config.eos_token_id[0] == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_an_image_matters(folder: Path) -> None:
    """Another image, other logits: the vision tower is connected."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    text = "<|vision_start|><|image_pad|><|vision_end|>Detect"
    last = []
    for grey in (0, 255):
        inputs = processor(text=[text], images=[Image.new("RGB", (128, 128), (grey,) * 3)], return_tensors="pt")
        with torch.no_grad():
            last.append(model(**inputs).logits[0, -1])
    assert (last[0] - last[1]).abs().max() > 0.01


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    build(tmp_path / "same", "tiny", seed=1)
    build(tmp_path / "other", "tiny", seed=2)
    read = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("same", "other")}
    assert read["same"] == (folder / "model.safetensors").read_bytes()
    assert read["other"] != read["same"]
    assert (tmp_path / "same" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
