"""Models of real size with random weights, made on the spot: `build(path, "4B")`.

In: a size. Out: a folder that transformers and vLLM load: Qwen3's own shapes, in bfloat16, with the demo's tokenizer
grown to Qwen3's vocabulary, so that whatever a random model says has a text. Called by the benchmarks of this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from deploy.demo.model import CHAT_TEMPLATE, EOS, PAD, build_tokenizer

Size = Literal["0.6B", "4B", "tiny"]
MAX_POSITIONS = 4096

# vocabulary, hidden, layers, heads, key-value heads, head size, intermediate; "tiny" is for a try without a GPU.
SHAPES: dict[Size, tuple[int, int, int, int, int, int, int]] = {
    "0.6B": (151_936, 1024, 28, 16, 8, 128, 3072),
    "4B": (151_936, 2560, 36, 32, 8, 128, 9728),
    "tiny": (4096, 64, 2, 4, 2, 32, 128),
}


def build(path: Path, size: Size, *, device: torch.device) -> int:
    """Write the model into `path`; its number of parameters, the tied head not counted twice."""
    vocab_size, hidden, layers, heads, kv_heads, head_dim, intermediate = SHAPES[size]
    tokenizer = grown_tokenizer(vocab_size)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=cast(Any, tokenizer).eos_token_id,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=cast(Any, tokenizer).eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def grown_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """The demo's, with tokens up to `vocab_size` that no text becomes."""
    small = build_tokenizer()
    told = json.loads(small.backend_tokenizer.to_str())
    vocab = told["model"]["vocab"]
    first, more = len(vocab), vocab_size - len(small)  # added tokens come behind the vocabulary
    vocab |= {f"\u0100\u0101{i}": i for i in range(first, first + more)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(told)),
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )
