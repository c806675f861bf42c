"""Draw what labels lack: `python -m tools.gaps_picture --data DIR --photograph BloodImage_00285 --out docs/gaps.jpg`.

`--data` is the folder of `bench.study real`: `bccd/` (photographs) and `bccd_redone/` (published labels, and labels
that others drew anew). Published boxes are green. Boxes that only the new labels have are blue.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageDraw

from deploy.demo.scenes import Box, iou

PUBLISHED, MISSING = "#1b9e3e", "#1f4fff"
SAME_OBJECT = 0.5  # IoU


def read_boxes(path: Path, photograph: str) -> list[Box]:
    """Read the boxes of one photograph in a COCO file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    (image,) = (i["id"] for i in content["images"] if Path(i["file_name"]).stem == photograph)
    boxes = (a["bbox"] for a in content["annotations"] if a["image_id"] == image)
    return [(x, y, x + width, y + height) for x, y, width, height in boxes]


def main(
    data: Annotated[Path, typer.Option()],
    photograph: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()],
    split: Annotated[str, typer.Option()] = "val",
) -> None:
    """Write one photograph with its published boxes and those that they lack, as JPEG."""
    published, redone = (
        read_boxes(data / "bccd_redone" / f"{split}_{which}.json", photograph) for which in ("published", "redone")
    )
    missing = [box for box in redone if all(iou(box, other) < SAME_OBJECT for other in published)]
    picture = Image.open(data / "bccd" / "images" / f"{photograph}.jpg").convert("RGB")
    draw = ImageDraw.Draw(picture)
    for boxes, color in ((published, PUBLISHED), (missing, MISSING)):
        for x1, y1, x2, y2 in boxes:
            draw.rectangle((x1 + 1, y1 + 1, x2 - 2, y2 - 2), outline=color, width=4)
    picture.save(out, quality=82, optimize=True)
    print(f"{out}: {len(published)} published boxes, {len(missing)} that they lack, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    typer.run(main)
