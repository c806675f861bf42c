"""The models and scenes of the benchmarks, made in the run's folder.

- The demo's model: its trained checkpoint if there is one, else the same size with random weights.
- Text models of real size with random weights (`build`): Qwen3's own shapes in bfloat16. They have the demo's tokenizer
  extended to Qwen3's vocabulary, so everything that a random model writes has a text. transformers and vLLM load them.
- A vision model of real size with random weights.
- Models for photographs (`build_photograph_model`): Qwen3-VL's shapes of 2B, 4B and 8B, or a small one with the same
  patches, so that a photograph has as many tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from bench.demo_model import Size as VisionSize
from bench.demo_model import build as build_vision_model
from bench.tiny import CHAT_TEMPLATE, EOS, MERGE_SIZE, PAD, build_processor, build_tokenizer, vision_token_ids
from deploy.demo.build_data import Build
from deploy.demo.build_data import build as build_data

Size = Literal["0.6B", "4B", "tiny"]
PhotographSize = Literal["2B", "4B", "8B", "small"]
CHECKPOINT = Path("deploy/demo/checkpoint")
MAX_POSITIONS = 4096

# vocabulary, hidden, layers, heads, key-value heads, head size, intermediate; "tiny" is for a try without a GPU.
SHAPES: dict[Size, tuple[int, int, int, int, int, int, int]] = {
    "0.6B": (151_936, 1024, 28, 16, 8, 128, 3072),
    "4B": (151_936, 2560, 36, 32, 8, 128, 9728),
    "tiny": (4096, 64, 2, 4, 2, 32, 128),
}

PATCH_SIZE = 16  # a photograph of 1024x1024 pixels has 4,096 patches and 1,024 tokens
MOST_PIXELS = 1024 * 1024
# the language model: vocabulary, hidden, layers, heads, key-value heads, head size, intermediate, sections of positions
TEXT_SHAPES: dict[PhotographSize, tuple[int, int, int, int, int, int, int, list[int]]] = {
    "2B": (151_936, 2048, 28, 16, 8, 128, 6144, [24, 20, 20]),
    "4B": (151_936, 2560, 36, 32, 8, 128, 9728, [24, 20, 20]),
    "8B": (151_936, 4096, 36, 32, 8, 128, 12_288, [24, 20, 20]),
    "small": (4096, 128, 2, 4, 2, 32, 256, [6, 5, 5]),
}
# the vision tower: layers, hidden, heads, intermediate, layers whose output goes to the language model too
VISION_SHAPES: dict[PhotographSize, tuple[int, int, int, int, list[int]]] = {
    "2B": (24, 1024, 16, 4096, [5, 11, 17]),
    "4B": (24, 1024, 16, 4096, [5, 11, 17]),
    "8B": (27, 1152, 16, 4304, [8, 16, 24]),
    "small": (1, 32, 1, 64, [0]),  # on a CPU its attention over 4,096 patches is most of the work
}


def demo_model(folder: Path) -> Path:
    """Return the demo's checkpoint, or a random model of its size in `folder`."""
    return CHECKPOINT.resolve() if (CHECKPOINT / "config.json").is_file() else vision_model(folder, "demo")


def demo_scenes(folder: Path) -> Path:
    """Return a folder with the demo's scenes: 600 to train on, and one each for the other splits."""
    build_data(Build(train=600, val=1, test=1), folder / "data")
    return folder / "data"


def vision_model(folder: Path, size: VisionSize) -> Path:
    path = folder / f"model-{size}"
    if not path.is_dir():
        build_vision_model(path, size)
    return path


def text_model(folder: Path, size: Size) -> Path:
    """Made on the first GPU if there is one."""
    path = folder / f"text-model-{size}"
    if not path.is_dir():
        build(path, size, device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        torch.cuda.empty_cache()
    return path


def text_config(size: Size) -> Qwen3Config:
    """Return the configuration of a text model, its head tied."""
    vocab_size, hidden, layers, heads, kv_heads, head_dim, intermediate = SHAPES[size]
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
    )


def build(path: Path, size: Size, *, device: torch.device) -> int:
    """Write a text model into `path`; returns its number of parameters, the tied head not counted twice."""
    config = text_config(size)
    tokenizer = grown_tokenizer(config.vocab_size)
    config.eos_token_id = cast(Any, tokenizer).eos_token_id
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=cast(Any, tokenizer).eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def grown_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the demo's, with additional tokens up to `vocab_size` that no text encodes to."""
    small = build_tokenizer()
    described = json.loads(small.backend_tokenizer.to_str())
    vocab = described["model"]["vocab"]
    first, more = len(vocab), vocab_size - len(small)  # added tokens come after the vocabulary
    vocab |= {f"\u0100\u0101{i}": i for i in range(first, first + more)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


# ---- models for photographs ----------------------------------------------------------------------------------------


def photograph_model(folder: Path, size: PhotographSize) -> Path:
    """Made on the first GPU if there is one."""
    path = folder / f"photographs-{size}"
    if not (path / "config.json").is_file():
        build_photograph_model(path, size)
    return path


def build_photograph_model(path: Path, size: PhotographSize = "4B") -> int:
    """Write a Qwen3-VL with random weights in bfloat16 into `path`; returns its number of parameters."""
    vocab_size = TEXT_SHAPES[size][0]
    tokenizer: Any = grown_tokenizer(vocab_size)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen3VLForConditionalGeneration(photograph_config(tokenizer, size))
    torch.set_default_dtype(torch.float32)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=False)
    model.save_pretrained(path)
    build_processor(tokenizer, MOST_PIXELS, min_pixels=256 * 256, patch_size=PATCH_SIZE).save_pretrained(path)
    count = sum(p.numel() for p in model.parameters())
    del model
    torch.cuda.empty_cache()
    return count


def photograph_config(tokenizer: Any, size: PhotographSize) -> Qwen3VLConfig:
    """Return the model's configuration, with the tokenizer's ids."""
    vocab_size, hidden, layers, heads, kv_heads, head_dim, intermediate, sections = TEXT_SHAPES[size]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    text = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 32_768,
        "rope_parameters": rope,
        "tie_word_embeddings": size != "8B",
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    depth, width, vision_heads, vision_intermediate, deepstack = VISION_SHAPES[size]
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": vision_intermediate,
        "num_heads": vision_heads,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "out_hidden_size": hidden,
        "num_position_embeddings": 48 * 48,
        "deepstack_visual_indexes": deepstack,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        **vision_token_ids(tokenizer),
        tie_word_embeddings=size != "8B",
        dtype="bfloat16",
    )
