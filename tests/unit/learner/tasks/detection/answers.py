"""Hypothesis strategies: objects, answers as models write them (good, flawed, corrupted), ways to cut them up."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from learner.records import DetectionObject

CONTAINERS = ("index_map", "array")
COORDINATES = ("tokens", "digits")
DESCS = st.one_of(
    st.sampled_from(["seven", "a cat", "café", "猫", 'say "hi"', "a\\b", "x]}", " ]} ", "nine\n", "object_3", "12"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6).filter(str.strip),
)
WRONG_IMAGES = ["0", "9", "-1", "1.0", '"1"', "true", "null", "[1]", "1000000"]
SPACES = st.sampled_from(["", " ", " ", " ", "\n\t"])


@st.composite
def bboxes(draw: st.DrawFn) -> DetectionObject:
    x1, y1 = draw(st.integers(0, 998)), draw(st.integers(0, 998))
    x2, y2 = draw(st.integers(x1 + 1, 999)), draw(st.integers(y1 + 1, 999))
    return DetectionObject(desc=draw(DESCS), kind="bbox_2d", bins=(x1, y1, x2, y2))


@st.composite
def polygons(draw: st.DrawFn) -> DetectionObject:
    points = draw(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=5))
    x, y = points[0]
    points[1] = ((x + 1) % 1000, (y + 7) % 1000)  # never all in line with an axis
    return DetectionObject(desc=draw(DESCS), kind="poly", bins=tuple(v for p in points for v in p))


OBJECTS = st.one_of(bboxes(), bboxes(), polygons())


def spell(value: int, coordinates: str) -> str:
    return str(value) if coordinates == "digits" else f"<|coord_{value}|>"


@st.composite
def answers(draw: st.DrawFn, container: str, coordinates: str, num_images: int = 1) -> str:
    """Draw a container of valid and flawed objects, with JSON whitespace anywhere, maybe with text around it. If the
    sample has several images, most objects name one of them."""
    entries = []
    for number in range(1, 1 + draw(st.integers(0, 4))):
        name = draw(st.sampled_from([f"object_{number}"] * 8 + ["object_1", "object_01", "thing", "object_40"]))
        body = draw(_bodies(container, coordinates, num_images))
        entries.append(f'"{name}"{draw(SPACES)}:{draw(SPACES)}{body}' if container == "index_map" else body)
    inside = "".join(f"{',' if i else ''}{draw(SPACES)}{entry}{draw(SPACES)}" for i, entry in enumerate(entries))
    opener, closer = "{}" if container == "index_map" else "[]"
    return draw(SPACES) + opener + inside + closer + draw(st.sampled_from(["", "", "", "\n", " so", "}"]))


@st.composite
def _bodies(draw: st.DrawFn, container: str, coordinates: str, num_images: int) -> str:
    obj = draw(OBJECTS)
    numbers = [str(k) for k in range(1, num_images + 1)]
    image = {"image": draw(st.sampled_from(numbers * 4 + WRONG_IMAGES))} if num_images > 1 else {}
    fields = {
        "desc" if container == "index_map" else "label": json.dumps(obj.desc, ensure_ascii=draw(st.booleans())),
        **image,
        obj.kind: "[" + f",{draw(SPACES)}".join(spell(v, coordinates) for v in obj.bins) + "]",
    }
    if draw(st.integers(0, 3)) == 0:
        name, value = draw(st.sampled_from(_flaws(coordinates)))
        fields[name] = value
        if draw(st.booleans()):
            fields.pop(draw(st.sampled_from(sorted(fields))))
    named = list(fields.items())
    if draw(st.booleans()):
        named.reverse()
    inside = f",{draw(SPACES)}".join(f'"{name}":{draw(SPACES)}{value}' for name, value in named)
    return "{" + inside + draw(SPACES) + "}"


def _flaws(coordinates: str) -> list[tuple[str, str]]:
    other = spell(5, "digits" if coordinates == "tokens" else "tokens")
    one = spell(1, coordinates)
    return [
        ("desc", '""'),
        ("label", '"  "'),
        ("desc", "null"),
        ("label", "5"),
        ("bbox", f"[{one}, {one}, {one}, {one}]"),
        ("bbox_2d", f"[{one}, {one}, {one}, {one}]"),
        ("bbox_2d", f"[{one}, {one}, {one}]"),
        ("bbox_2d", "[]"),
        ("poly", f"[{one}, {one}, {one}, {one}]"),
        ("bbox_2d", f"[{other}, {one}, {one}, {one}]"),
        ("bbox_2d", f'[{one}, {one}, {one}, "x"]'),
        ("bbox_2d", f"[[{one}, {one}], [{one}, {one}]]"),
        ("bbox_2d", "[1.5, -3, 1000, 7]"),
        ("poly", "null"),
        ("score", "0.9"),
        ("more", '{"a": [1, {"b": "]}"}]}'),
    ]


@st.composite
def corrupted(draw: st.DrawFn, text: str) -> str:
    """Draw `text`, cut off, or with a few characters gone, doubled or replaced."""
    if draw(st.booleans()):
        text = text[: draw(st.integers(0, len(text)))]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", '"', "{", "}", "]", ",", "\\", "7", " "])) + text[at + 1 :]
    return text


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[int]:
    """Draw where to tear `data` into tokens: anywhere, from single bytes to few long pieces."""
    if draw(st.integers(0, 4)) == 0:
        return list(range(len(data)))
    number = draw(st.integers(0, max(1, len(data) // 2)))
    seed = draw(st.randoms(use_true_random=False))
    return sorted(seed.randrange(len(data) + 1) for _ in range(number))
