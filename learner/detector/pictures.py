"""Draws boxes on photographs, and writes the page that shows the pictures.

Pictures are JPEG, at most `LONGEST` pixels a side. Small photographs are enlarged. A class has one color on all
pictures. The page is one file without scripts. The page names the pictures by relative paths, so that the folder can be
moved or served.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jinja2
from PIL import Image, ImageDraw, ImageFont

from learner.detector.boxes import Prediction, ScoredBox
from learner.detector.results import COCO_NAME, CSV_NAME, PAGE_NAME, PICTURES
from learner.run.files import write_atomically, writing

LONGEST = 1600
SMALL = 640  # pixels; a photograph whose longer side is at most half of this is enlarged to it
_QUALITY = 88
_GOLDEN = 0.618034  # step between hues: with the golden ratio each new hue is far from all earlier hues
_SHOWN_BOXES = 40  # max boxes in a picture's list on the page

TEMPLATES = jinja2.Environment(
    loader=jinja2.ChoiceLoader([jinja2.PackageLoader("learner.detector"), jinja2.PackageLoader("learner.report")]),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, kw_only=True)
class DrawnPicture:
    """One picture on the page. `file` is relative to the page, and empty if the picture file was deleted."""

    prediction: Prediction
    file: str
    boxes: Sequence[ScoredBox]

    @property
    def counts(self) -> list[tuple[str, int]]:
        return sorted(Counter(box.name for box in self.boxes).items())


def color_of(name: str, classes: Sequence[str]) -> tuple[int, int, int]:
    """Return the color of a class: bright, and different from the other classes' colors."""
    place = classes.index(name) if name in classes else len(classes)
    # With many classes hues come close to each other, so lightness changes after every five classes.
    lightness = 0.6 if place // 5 % 2 == 0 else 0.4
    red, green, blue = colorsys.hls_to_rgb((0.58 + place * _GOLDEN) % 1.0, lightness, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def picture_name(place: int, prediction: Prediction) -> str:
    """Return a name that is readable, and different for different images."""
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(prediction.name).stem)[:80]
    return f"{place + 1:05d}-{stem}.jpg"


def draw(picture: Image.Image, boxes: Sequence[ScoredBox], classes: Sequence[str]) -> Image.Image:
    """Return a copy of the photograph in a size for people, with boxes, names and scores."""
    longest = max(picture.size)
    # On a small photograph the names would hide the objects.
    scale = min(1.0, LONGEST / longest) if 2 * longest > SMALL else SMALL / longest
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    drawn = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    canvas = ImageDraw.Draw(drawn)
    line = max(1, round(max(size) / 350))
    # The page shows pictures at about half their size, so the letters are large.
    font = ImageFont.load_default(max(9, round(max(size) / 45)))
    # The best box is drawn last, on top of the others.
    for box in sorted(boxes, key=lambda one: one.score):
        _draw_box(canvas, box, scale, color_of(box.name, classes), line, font)
    return drawn


def _draw_box(
    canvas: ImageDraw.ImageDraw,
    box: ScoredBox,
    scale: float,
    color: tuple[int, int, int],
    line: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    x1, y1, x2, y2 = (value * scale for value in box.box)
    if box.outline:
        points = [value * scale for value in box.outline]
        canvas.line([*points, *points[:2]], fill=color, width=line)
    else:
        canvas.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=color, width=line)
    # Pillow's own font has only the characters of Latin-1.
    text = f"{box.name} {box.score:.2f}".encode("latin-1", "replace").decode("latin-1")
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x, y = max(0.0, min(x1, canvas.im.size[0] - width)), y1 - height if y1 >= height else y1
    canvas.rectangle((x, y, x + width, y + height), fill=color)
    dark = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] < 120
    canvas.text((x + 2 - left, y + 2 - top), text, fill=(255, 255, 255) if dark else (0, 0, 0), font=font)


def save_picture(out: Path, name: str, picture: Image.Image) -> None:
    """Write a picture as JPEG. Raises OutputError."""
    folder = out / PICTURES
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / name, format="JPEG", quality=_QUALITY)


def write_page(
    out: Path,
    predictions: Mapping[int, Prediction],
    *,
    title: str,
    facts: str,
    conf: float,
    score_note: str,
    skipped: Sequence[str],
    classes: Sequence[str],
) -> Path:
    """Write the page, and return its path. Raises OutputError."""
    drawings = []
    for place, one in sorted(predictions.items()):
        name = picture_name(place, one)
        file = f"{PICTURES}/{quote(name)}" if (out / PICTURES / name).is_file() else ""
        drawings.append(DrawnPicture(prediction=one, file=file, boxes=[box for box in one.boxes if box.score >= conf]))
    counts: Counter[str] = Counter()
    for drawing in drawings:
        counts.update(dict(drawing.counts))
    page = TEMPLATES.get_template("predictions.html").render(
        title=title,
        facts=facts,
        drawings=drawings,
        counts=sorted(counts.items(), key=lambda entry: -entry[1]),
        colors={name: "#{:02x}{:02x}{:02x}".format(*color_of(name, classes)) for name in counts},
        conf=conf,
        score_note=score_note,
        skipped=skipped,
        shown_boxes=_SHOWN_BOXES,
        coco_name=COCO_NAME,
        csv_name=CSV_NAME,
    )
    write_atomically(out / PAGE_NAME, page)
    return out / PAGE_NAME
