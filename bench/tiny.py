"""A small Qwen3-VL with random weights, made on the spot: for examples, tests and measurements, without a download.

`tiny_model` is what examples need. In: a folder. Out: what a downloaded checkpoint would have: `config.json`,
`model.safetensors` (bfloat16), tokenizer, image and video processor, chat template, generation config. transformers and
vLLM load it like any other Qwen3-VL. `write_model` makes one of any shape. Same shape and seed, same bytes.

The tokenizer is byte-level BPE made by hand: 256 bytes, the merges that PIECES need, `<|coord_0|>`..`<|coord_999|>`,
and Qwen's chat tokens. Coordinate tokens are ordinary added tokens, so that decoding with `skip_special_tokens` keeps
them. `TextConfig.vocab_size` is exactly the tokenizer's length: no id without a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.video_processing_utils import BaseVideoProcessor

from learner.config.inference import INFERENCE_NAME, InferenceSettings, prompt_messages
from learner.config.sections.task import TaskConfig
from learner.run.files import write_atomically

NUM_COORDS = 1000
PAD, EOS = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (
    PAD,
    "<|im_start|>",
    EOS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Texts that are one token each; earlier ones win where two overlap. Closers come fused with commas, as in the
# vocabularies of real models: the parser has to cope.
PIECES = (
    "]}",
    "]},",
    "]}}",
    ' "',
    ", ",
    "object_",
    ' "object_',
    '{"object_',
    '": {"desc": "',
    '", "bbox_2d": [',
    *DIGITS,
    "user",
    "assistant",
    "every",
    "digit",
)
# Qwen's ChatML; content is a string, or a list of text and image parts.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}"
    "{%- else -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
PATCH_SIZE, MERGE_SIZE = 8, 2  # a 128x128 image: 16x16 patches, 64 image tokens


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """The parts that differ between the sizes. The vision tower has one deepstack level at each of its last three
    layers."""

    layers: int
    hidden: int
    intermediate: int
    head_dim: int
    mrope_section: tuple[int, int, int]  # sums to head_dim / 2
    vision_depth: int
    vision_hidden: int
    vision_intermediate: int
    initializer_range: float
    heads: int = 4
    kv_heads: int = 2
    vision_heads: int = 4


TINY = TinyShape(
    layers=2,
    hidden=64,
    intermediate=128,
    head_dim=32,
    mrope_section=(6, 5, 5),
    vision_depth=3,
    vision_hidden=64,
    vision_intermediate=128,
    initializer_range=0.1,  # an untrained model with 0.02 repeats one token, and comparing tokens shows little
)


def tiny_model(folder: str | Path) -> Path:
    """Write a model of 0.3M parameters with random weights into the folder (made where missing), which it returns.

    It can be loaded, asked, trained and served like any other. What it answers to a photograph has no sense.
    """
    write_model(folder, TINY)
    task = TaskConfig(container="array", coordinates="digits")
    settings = InferenceSettings(task=task, messages=prompt_messages("Detect every digit."), max_new_tokens=32)
    write_atomically(Path(folder) / INFERENCE_NAME, settings.to_json())
    return Path(folder)


def write_model(
    path: str | Path,
    shape: TinyShape,
    *,
    words: Sequence[str] = (),
    max_pixels: int = 256**2,
    trained: str | Path | None = None,
    seed: int = 0,
) -> None:
    """Write a model of any shape; each of `words` is one token of it besides those of PIECES.

    `trained`: a folder with a model of the same shape and these tokens, some of `words` aside. Its weights are taken
    over, those of a token by the token's text; new words begin with random weights.
    """
    tokenizer = build_tokenizer(words)
    processor = build_processor(tokenizer, max_pixels)
    config = build_config(tokenizer, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    if trained is not None:
        _take_weights(model, tokenizer, trained)
    model.bfloat16()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=False)
    model.save_pretrained(path)
    processor.save_pretrained(path)


def _take_weights(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, path: str | Path) -> None:
    trained = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    of_token = PreTrainedTokenizerFast.from_pretrained(path).get_vocab()
    weights = trained.state_dict()
    for name, weight in model.state_dict().items():
        if weight.shape[0] == len(tokenizer):  # the embeddings, which are the output head too
            for text, index in tokenizer.get_vocab().items():
                if text in of_token:
                    weight[index] = weights[name][of_token[text]]
        else:
            weight.copy_(weights[name])


def build_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each of PIECES and `words`, each coordinate and each special token is one token."""
    to_unit = _byte_units()
    units = [to_unit[byte] for byte in range(256)]
    merges: list[tuple[str, str]] = []
    for piece in (*PIECES, *words):
        while len(parts := _merge([to_unit[byte] for byte in piece.encode()], merges)) > 1:
            merges.append((parts[0], parts[1]))
    vocab = {text: i for i, text in enumerate([*units, *(a + b for a, b in merges)])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # No regex splits the text: skeleton pieces may span what Qwen's regex would cut.
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(f"<|coord_{k}|>", normalized=False, special=False) for k in range(NUM_COORDS)])
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(
    tokenizer: PreTrainedTokenizerFast,
    max_pixels: int = 256**2,
    *,
    min_pixels: int = 64**2,
    patch_size: int = PATCH_SIZE,
    kind: type[ProcessorMixin] = Qwen3VLProcessor,
    video: type[BaseVideoProcessor] = Qwen3VLVideoProcessor,
) -> ProcessorMixin:
    """An image keeps its size from `min_pixels` to `max_pixels` pixels; four of its patches become a token."""
    patches = {"patch_size": patch_size, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    pixels = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return kind(
        image_processor=Qwen2VLImageProcessor(size=pixels, **patches),
        tokenizer=tokenizer,
        video_processor=video(size=pixels, **patches),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, shape: TinyShape) -> Qwen3VLConfig:
    """Return the model's configuration, with the tokenizer's ids."""
    return Qwen3VLConfig(
        text_config=_text_config(tokenizer, shape),
        vision_config=_vision_config(shape),
        **vision_token_ids(tokenizer),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def vision_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the tokenizer's ids of the tokens for images, by their keys in a Qwen-VL configuration."""
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    ids = {key: tokenizer.convert_tokens_to_ids(text) for key, text in tokens.items()}
    assert all(isinstance(token_id, int) for token_id in ids.values())
    return ids


def _text_config(tokenizer: PreTrainedTokenizerFast, shape: TinyShape) -> dict[str, object]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": list(shape.mrope_section),
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "initializer_range": shape.initializer_range,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _vision_config(shape: TinyShape) -> dict[str, object]:
    return {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_heads,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "out_hidden_size": shape.hidden,
        "num_position_embeddings": 16 * 16,
        "initializer_range": shape.initializer_range,
        "deepstack_visual_indexes": list(range(shape.vision_depth - 3, shape.vision_depth)),
    }


def _byte_units() -> dict[int, str]:
    """Return GPT-2's printable character for each byte: itself where printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _merge(parts: list[str], merges: list[tuple[str, str]]) -> list[str]:
    """Apply merges in rank order."""
    for left, right in merges:
        merged: list[str] = []
        for part in parts:
            if merged and (merged[-1], part) == (left, right):
                merged[-1] += part
            else:
                merged.append(part)
        parts = merged
    return parts
