"""Build the demo's data: `python -m deploy.demo.build_data --out DIR --train 1500 --val 100 --test 200`.

In: the number of scenes in each split, their style, and a seed. Out, under DIR: `images/<split>/000000.png`, and per
split the same annotations twice, `<split>.jsonl` (the project's own format) and `<split>.coco.json`. The image names in
both annotation files are relative to DIR.

Invariants: scene i of a split depends only on (seed, split, i), not on the number of workers or scenes; annotation
dropout changes labels, never pixels; the stamp `build.json` is written last. So a folder with the stamp is complete,
and stays unchanged if the same build is requested again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

from deploy.demo import scenes
from deploy.demo.scenes import DIGIT_WORDS, SPLITS, STYLES, SceneObject, Split, StyleName, draw_scene, load_bank

PROMPT = "<image>Detect every digit."
STAMP = "build.json"
CHUNK = 100  # number of scenes in one job of a worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """A request to build. Dropout and cap apply to training annotations only: val and test stay complete."""

    train: int
    val: int
    test: int
    style: StyleName = "demo"
    annotation_dropout: float = 0.0  # probability that an object has no label
    annotation_cap: int | None = None  # max labels of a scene; the first labels in reading order are kept
    annotation_cap_share: float = 1.0  # fraction of the scenes to which the cap applies, chosen at random
    seed: int = 0

    def num_scenes(self, split: Split) -> int:
        return {"train": self.train, "val": self.val, "test": self.test}[split]

    def stamp(self) -> dict[str, Any]:
        """Return the request and a digest of the drawing code. Equal stamps mean equal files."""
        code = b"".join(Path(file).read_bytes() for file in (__file__, scenes.__file__))
        return {**asdict(self), "code": hashlib.sha256(code).hexdigest()}


def build(request: Build, out: Path, *, workers: int = 1) -> bool:
    """Write all splits into `out`. Returns False, and writes nothing, if `out` already holds an equal build."""
    stamp_file = out / STAMP
    if stamp_file.is_file() and json.loads(stamp_file.read_text()) == request.stamp():
        return False
    # The stamp is removed first and written last. So the folder of an interrupted build has no stamp.
    stamp_file.unlink(missing_ok=True)
    for split in SPLITS:
        (out / "images" / split).mkdir(parents=True, exist_ok=True)
        rows = list(_rows(request, split, out, workers))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{split}.jsonl").write_text(lines)
        (out / f"{split}.coco.json").write_text(json.dumps(to_coco(rows)))
    stamp_file.write_text(json.dumps(request.stamp()))
    return True


def to_coco(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows as a COCO instances file; boxes become x, y, width, height."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    category_ids = {name: i for i, name in enumerate(DIGIT_WORDS, start=1)}
    for image_id, row in enumerate(rows, start=1):
        images.append({"id": image_id, "file_name": row["images"][0], "width": row["width"], "height": row["height"]})
        for item in row["objects"]:
            x1, y1, x2, y2 = item["bbox_2d"]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category_ids[item["desc"]],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": i, "name": name} for name, i in category_ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _rows(request: Build, split: Split, out: Path, workers: int) -> Iterator[dict[str, Any]]:
    total = request.num_scenes(split)
    jobs = [(request, split, out, start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)]
    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            yield from _make_chunk(job)
        return
    with ProcessPoolExecutor(min(workers, len(jobs))) as pool:
        for rows in pool.map(_make_chunk, jobs):
            yield from rows


def _make_chunk(job: tuple[Build, Split, Path, int, int]) -> list[dict[str, Any]]:
    """Draw scenes start..stop, save their images, return their rows."""
    request, split, out, start, stop = job
    bank, style = load_bank(split), STYLES[request.style]
    rows = []
    for i in range(start, stop):
        key = (request.seed, SPLITS.index(split), i)
        # Pixels and labels have generators of their own, so that missing labels never change pixels.
        scene = draw_scene(np.random.default_rng([*key, 0]), bank, style)
        name = f"images/{split}/{i:06d}.png"
        Image.fromarray(scene.pixels).save(out / name, compress_level=1)
        objects = scene.objects
        if split == "train":
            rng = np.random.default_rng([*key, 1])
            objects = _drop_labels(rng, objects, request.annotation_dropout)
            if rng.random() < request.annotation_cap_share:
                # The annotator goes from top to bottom and stops after `annotation_cap` objects.
                objects = tuple(sorted(objects, key=lambda item: (item.box[1], item.box[0]))[: request.annotation_cap])
        rows.append(_row(f"{split}-{i:06d}", name, objects, style.canvas))
    return rows


def _drop_labels(
    rng: np.random.Generator, objects: tuple[SceneObject, ...], probability: float
) -> tuple[SceneObject, ...]:
    """Drop each label with `probability`. If all would be dropped, one chosen at random stays."""
    keep = rng.random(len(objects)) >= probability
    keep[rng.integers(len(objects))] |= not keep.any()
    return tuple(item for item, kept in zip(objects, keep, strict=True) if kept)


def _row(sample_id: str, image: str, objects: Iterable[SceneObject], size: int) -> dict[str, Any]:
    return {
        "id": sample_id,
        "messages": [{"role": "user", "content": PROMPT}],
        "images": [image],
        "objects": [{"desc": item.desc, "bbox_2d": list(item.box)} for item in objects],
        "width": size,
        "height": size,
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    train: Annotated[int, typer.Option(min=0, help="Training scenes.")] = 1500,
    val: Annotated[int, typer.Option(min=0, help="Validation scenes.")] = 100,
    test: Annotated[int, typer.Option(min=0, help="Test scenes.")] = 200,
    style: Annotated[StyleName, typer.Option(help="demo: up to 8 digits; hard: up to 30, overlap, clutter.")] = "demo",
    annotation_cap: Annotated[
        int | None, typer.Option(min=1, help="Training labels stop after so many objects of a scene.")
    ] = None,
    annotation_cap_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the training scenes that the cap is for.")
    ] = 1.0,
    annotation_dropout: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that a training object has no label.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the scenes; the split of digit images is fixed.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per CPU core.")] = 0,
) -> None:
    """Write scenes of handwritten digits as PNG files, JSONL and COCO JSON."""
    request = Build(
        train=train,
        val=val,
        test=test,
        style=style,
        annotation_dropout=annotation_dropout,
        annotation_cap=annotation_cap,
        annotation_cap_share=annotation_cap_share,
        seed=seed,
    )
    started = time.monotonic()
    if build(request, out, workers=workers or os.cpu_count() or 1):
        labels = f", {annotation_dropout:.0%} of training labels left out" if annotation_dropout else ""
        typer.echo(f"{out}: {train} train, {val} val, {test} test scenes{labels} in {time.monotonic() - started:.1f} s")
    else:
        typer.echo(f"{out}: the same build is there already, nothing to do")


if __name__ == "__main__":
    typer.run(main)
