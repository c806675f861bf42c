"""Write the demo's Qwen3-VL, randomly initialised, to a folder: `python -m bench.demo_model --size demo --out DIR`.

In: a size ("tiny" for tests, "demo" for the digit demo, "0.5B" for measurements) and a seed. `bench.tiny` makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from transformers import Qwen3VLForConditionalGeneration

from bench.tiny import TINY, TinyShape, build_config, build_tokenizer, write_model

Size = Literal["tiny", "demo", "0.5B"]

SHAPES: dict[Size, TinyShape] = {
    "tiny": TINY,
    "demo": TinyShape(
        layers=6,
        hidden=256,
        intermediate=352,
        head_dim=64,
        mrope_section=(12, 10, 10),
        vision_depth=4,
        vision_hidden=128,
        vision_intermediate=256,
        initializer_range=0.02,
    ),
    "0.5B": TinyShape(  # the language model of Qwen3-0.6B, with the demo's small vocabulary
        layers=28,
        hidden=1024,
        intermediate=3072,
        head_dim=128,
        mrope_section=(24, 20, 20),
        vision_depth=12,
        vision_hidden=768,
        vision_intermediate=3072,
        initializer_range=0.02,
        heads=16,
        kv_heads=8,
        vision_heads=12,
    ),
}


def build(path: str | Path, size: Size = "tiny", seed: int = 0) -> None:
    """Write the model into the folder `path` (made where missing)."""
    write_model(path, SHAPES[size], seed=seed)


def count_parameters(size: Size) -> int:
    """Return the number of parameters, the tied output head not counted twice; allocates no memory."""
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(build_config(build_tokenizer(), SHAPES[size]))
    return sum(p.numel() for p in model.parameters())


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    size: Annotated[Size, typer.Option(help="tiny (tests), demo or 0.5B.")] = "demo",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Write a randomly initialised Qwen3-VL."""
    build(out, size, seed)
    num_bytes = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{out}: {size}, {count_parameters(size):,} parameters, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
