"""Tiny models on disk, made once per test session: a Qwen3-VL with its processor, and a text-only Qwen3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from deploy.demo.model import CHAT_TEMPLATE, build, build_tokenizer


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL of 0.7M parameters (bfloat16 on disk)."""
    path = tmp_path_factory.mktemp("models") / "tiny-vlm"
    build(path, "tiny", seed=0)
    return path


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random text-only Qwen3 with the same tokenizer, and an output head of its own (not tied)."""
    path = tmp_path_factory.mktemp("models") / "tiny-text"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
