"""The estimate of labels with gaps is compared with all labels, on answers that are drawn once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from bench import study
from bench.experiment.estimated import ANSWERS, ORDERS, by_loss, drawn_answers, estimated
from bench.experiment.gaps import Row
from bench.experiment.results import objects_of
from tests.unit.bench.test_study import made

BOXES = [[100.0 * i + 10, 100.0 * j + 10, 100.0 * i + 70, 100.0 * j + 70] for i in range(4) for j in range(2)]
INVENTED = [410.0, 10.0, 470.0, 70.0]


def rows(folder: Path, labels: int, number: int = 30) -> list[Row]:
    """Photographs of eight objects, of which the first ones have a label."""
    Image.new("RGB", (500, 250), "grey").save(folder / "grey.png")
    objects = [{"desc": "a", "bbox_2d": box} for box in BOXES[:labels]]
    one = {"images": [str(folder / "grey.png")], "objects": objects, "width": 500, "height": 250}
    return [{"id": str(i), **one} for i in range(number)]


def drawn(samples: list[Row]) -> dict[str, Row]:
    """All answers have all objects, the first one has a box of nothing, too."""
    found = {}
    for row in samples:
        said = [[one.desc, *one.bins] for one in objects_of(row)]
        (more,) = objects_of({**row, "objects": [{"desc": "a", "bbox_2d": INVENTED}]})
        answers = [[*said, [more.desc, *more.bins]], *[said] * (ANSWERS - 1)]
        scored = [[*one, 0.9] for one in said] + [[more.desc, *more.bins, 0.1]]
        found[row["id"]] = {"id": row["id"], "answers": answers, "scored": scored}
    return found


def test_what_is_right_and_found_is_counted_by_all_labels(tmp_path: Path) -> None:
    everything = rows(tmp_path, 8)
    found = estimated(rows(tmp_path, 4), everything, drawn(everything))
    assert (found["labels"], found["objects"], found["finds"][:2]) == (120, 240, [150, 120])
    assert found["right"] == [0.8, 1.0, 1.0, 1.0, 1.0]
    assert (found["source"], found["found"]["missing"], found["found"]["in all"]) == ("votes", 120, 1.0)
    assert "right" in found["not_random"], "what lies further right has no label, so votes are not reported"
    assert (found["completes"], found["net"]) == (False, {"auto": 0, "probability": 0, "best votes": 120})
    assert [found["found"][order] for order in ORDERS] == [1.0] * len(ORDERS)


def test_loss_inspection_suspects_what_is_sure_and_unlike_any_label() -> None:
    one = {"name": "a", "width": 100, "height": 100, "votes": 4, "answers": 8, "score": 0.4, "labels": ()}
    box = (10.0, 10.0, 30.0, 30.0)
    assert by_loss({**one, "box": box}) == 0.4
    assert by_loss({**one, "box": box, "score": None}) == 0.5
    half = (("a", (10.0, 10.0, 30.0, 20.0)), ("b", box))
    assert by_loss({**one, "box": box, "labels": half}) == pytest.approx(0.2, abs=0.01), "of its class only"


def test_estimates_and_draws_go_on_where_they_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = made(tmp_path)
    everything = study.read_rows(one.rows(study.Regime("real"), "score", "all"))
    for row in everything:
        Path(row["images"][0]).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (row["width"], row["height"])).save(row["images"][0])
    kept = one.out / "answers" / "cells.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("".join(json.dumps(line) + "\n" for line in drawn(everything).values()))
    assert len(drawn_answers(tmp_path / "no-model", one.rows(study.Regime("real"), "score", "all"), kept)) == 1
    for draws in (1, 3):
        study.estimate_regimes(one, [study.Regime("real")], draws)
    alarms = study.read_rows(one.out / "alarms-cells.jsonl")
    assert [(line["draw"], line["not_random"]) for line in alarms] == [(0, ""), (1, ""), (2, "")]
    assert list(json.loads((one.out / "estimated.json").read_text())["regimes"]) == ["real"]
    assert "| real | 1 of 2 |" in capsys.readouterr().out
