"""Tiny random models on disk, one per family: what the learner trains and vLLM serves in tests.

All have the demo's tokenizer and chat template. Weights are large enough that an untrained model does not repeat one
token for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.demo_model import build
from bench.tiny import CHAT_TEMPLATE, MERGE_SIZE, PATCH_SIZE, build_processor, build_tokenizer, vision_token_ids


def build_qwen3_vl(path: Path) -> None:
    """Build the demo's family, tied embeddings (bfloat16 on disk)."""
    build(path, "tiny", seed=0)


def build_qwen3(path: Path) -> None:
    """Build a model of text only, with an output head of its own (float32 on disk)."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    _save(Qwen3ForCausalLM(config), tokenizer, path)
    tokenizer.save_pretrained(path)


def build_qwen2_5_vl(path: Path) -> None:
    """Build a vision tower that attends within windows of 4 x 4 patches in one of its two layers; biases in q, k and v;
    mrope sections side by side instead of interleaved (float32 on disk)."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(_qwen2_5_vl_config(tokenizer))
    _save(model, tokenizer, path)
    build_processor(tokenizer, kind=Qwen2_5_VLProcessor, video=Qwen2VLVideoProcessor).save_pretrained(path)


def build_qwen2_vl(path: Path) -> None:
    """Build a vision tower with full attention and no window; otherwise like Qwen2.5-VL (float32 on disk)."""
    tokenizer = build_tokenizer()
    config = _qwen2_5_vl_config(tokenizer)
    vision: dict[str, Any] = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": PATCH_SIZE, "spatial_merge_size": MERGE_SIZE, "initializer_range": 0.1}
    text = {key: getattr(config.text_config, key) for key in _TEXT_KEYS}
    tokens = {key: getattr(config, key) for key in _TOKEN_KEYS}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    )
    _save(model, tokenizer, path)
    build_processor(tokenizer, kind=Qwen2VLProcessor, video=Qwen2VLVideoProcessor).save_pretrained(path)


_TEXT_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_TOKEN_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def build_qwen2(path: Path) -> None:
    """Build a model of text only, biases in q, k and v, tied embeddings (float32 on disk)."""
    _build_text(path, Qwen2Config, Qwen2ForCausalLM, tie_word_embeddings=True)


def build_llama(path: Path) -> None:
    """Build a model of text only, no biases, no norms of queries and keys (float32 on disk)."""
    _build_text(path, LlamaConfig, LlamaForCausalLM, tie_word_embeddings=False)


def _build_text(path: Path, config: type[Any], model: type[Any], *, tie_word_embeddings: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    # heads of 32, the smallest that vLLM's CPU attention takes
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    tokens |= {"pad_token_id": tokenizer.pad_token_id}
    settings = {"max_position_embeddings": 512, "initializer_range": 0.1, "tie_word_embeddings": tie_word_embeddings}
    _save(model(config(**sizes, **heads, **tokens, **settings)), tokenizer, path)
    tokenizer.save_pretrained(path)


FAMILIES: Mapping[str, Callable[[Path], None]] = {
    "qwen3_vl": build_qwen3_vl,
    "qwen3": build_qwen3,
    "qwen2_5_vl": build_qwen2_5_vl,
}
MORE_FAMILIES: Mapping[str, Callable[[Path], None]] = {  # `bench.families` alone has these
    "qwen2_vl": build_qwen2_vl,
    "qwen2": build_qwen2,
    "llama": build_llama,
}


def _qwen2_5_vl_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]},
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "window_size": 4 * PATCH_SIZE,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
        "initializer_range": 0.1,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        **vision_token_ids(tokenizer),
        tie_word_embeddings=False,
    )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
