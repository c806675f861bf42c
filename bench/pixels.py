"""Measure what the comparison of pixels costs (`data.pixel_check`): ms per image on each side, on one thread.

    python -m bench.pixels [--out FILE]

In: images of three sizes, with Qwen3-VL's image processor (patches of 16). Out: a table, and with `--out` a JSON file.
The processor's own time stands beside it: both sides process every image anyway. The server makes its digest on a
thread beside the generation, the learner beside the step or, colocated, within it. It needs no vLLM.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import Qwen2VLImageProcessor

from bench.figures import circumstances
from shared.pixels import LEVELS, ImageProcessing, seen_image

SIZES = {0.05: (256, 192), 0.5: (832, 608), 3.0: (2016, 1504)}  # megapixels: width, height
REPEATS = 7


def main(out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None) -> None:
    torch.set_num_threads(1)
    found = {str(size): measure(*sides) for size, sides in SIZES.items()}
    if out:
        out.write_text(json.dumps({**circumstances(), "ms per image, by megapixels": found}, indent=1) + "\n")
    table = Table("megapixels", *next(iter(found.values())), title="pixels: ms per image, one thread")
    for size, row in found.items():
        table.add_row(size, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)


def measure(width: int, height: int) -> dict[str, float]:
    """Return medians, in ms."""
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 4096 * 1024}
    processor = Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=pixels)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    inputs = processor(images=[image], return_tensors="pt")
    values, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    processing = ImageProcessing.of(processor)
    row = {"processing": timed(lambda: processor(images=[image], return_tensors="pt"))}
    for dtype in (LEVELS, "bfloat16"):
        theirs = torch.cat([part.flatten(1) for part in processing.as_type(values, dtype)])

        def server(theirs: torch.Tensor = theirs) -> Any:
            return seen_image([theirs], size=theirs.numel(), grid=grids[0].tolist())

        row |= {f"server, {dtype}": timed(server)}
        row |= {f"learner, {dtype}": timed(lambda dtype=dtype: processing.processed(values, grids, dtype))}  # type: ignore[misc]
    return row


def timed(work: Callable[[], Any]) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(taken), 2)


if __name__ == "__main__":
    typer.run(main)
