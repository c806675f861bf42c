"""The folder of `predict`: who may write there, and what a second command is told (R43)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from learner.detector.boxes import Prediction, ScoredBox
from learner.detector.results import CSV_NAME, LINES, PAGE_NAME, Store, write_results
from shared.errors import ConfigError, OutputError

REQUEST = {
    "model": "cells",
    "settings": {"classes": ["red"], "max_new_tokens": 512},  # as the model was trained
    "asked": {"samples": 2, "server": None, "max_new_tokens": None},
    "classes": [],
}


def test_files_that_predict_did_not_write_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / PAGE_NAME).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError) as caught:
        Store.open(tmp_path, REQUEST)
    assert PAGE_NAME in caught.value.found
    assert "notes.txt" not in caught.value.found, "it would stay"
    assert sorted(path.name for path in tmp_path.iterdir()) == [PAGE_NAME, "notes.txt"]
    Store.open(tmp_path, REQUEST, overwrite=True).close()


def test_a_command_that_answered_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    Store.open(tmp_path, REQUEST).close()
    assert (tmp_path / LINES).is_file()
    store = Store.open(tmp_path, {**REQUEST, "classes": ["red"]})
    assert store.done == {}
    store.close()


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-2+3", "@SUM(A1)", "\t=1", " =1", "\uff1d1"])
def test_no_name_is_a_formula_of_a_spreadsheet(name: str, tmp_path: Path) -> None:
    boxes = (ScoredBox(name, 0.5, (-1.0, 0.0, 2.0, 2.0)), ScoredBox("cell", 0.5, (0.0, 0.0, 2.0, 2.0)))
    one = Prediction(id=name, name=name, source="a.png", width=8, height=8, boxes=boxes)
    write_results(tmp_path, [one], {}, 0.0)
    rows = list(csv.DictReader((tmp_path / CSV_NAME).open(newline="")))
    assert [rows[0][column] for column in ("file", "image_id", "class")] == [f"'{name}"] * 3
    assert (rows[1]["class"], rows[0]["x1"]) == ("cell", "-1.0"), "numbers stay numbers"


LINE = {"place": 0, "id": 1, "name": "a", "source": "a", "width": 8, "height": 8, "boxes": []}
DAMAGED = [
    *("{", "[]", "1", "null", '"a"', "{}", "[" * 100_000, "\udcff", '{"place": NaN}'),
    *(json.dumps(LINE | {"place": -1}), json.dumps(LINE | {"boxes": 3}), json.dumps(LINE | {"boxes": [[1]]})),
    *(json.dumps(LINE | {"boxes": [["a", 0.5, [1, 2], [], None]]}), json.dumps(LINE | {"id": None})),
    *(json.dumps(LINE | {"width": "wide"}), json.dumps(LINE | {"more": 1}), json.dumps(LINE).replace("8", "1e999")),
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_line_is_done_again(text: str, tmp_path: Path) -> None:
    Store.open(tmp_path, REQUEST).close()
    whole = json.dumps(LINE | {"place": 1, "boxes": [["a", 0.5, [0, 0, 1, 1], [], 2]]})
    (tmp_path / LINES).write_bytes(f"{text}\n{whole}\n".encode(errors="surrogateescape"))
    store = Store.open(tmp_path, REQUEST)
    store.close()
    assert list(store.done) == [1]
    assert store.done[1].boxes == (ScoredBox("a", 0.5, (0, 0, 1, 1), (), 2),)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"a"', "\udcff", "[" * 100_000, '{"asked": 3}', "{}"])
def test_a_damaged_request_is_an_error_that_says_what_to_do(text: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path, REQUEST)
    store.add(0, Prediction(id=1, name="a.png", source="a.png", width=8, height=8, boxes=()))
    store.close()
    (tmp_path / "request.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises((ConfigError, OutputError)) as caught:
        Store.open(tmp_path, REQUEST)
    assert "--overwrite" in caught.value.remedy


def test_another_request_is_refused_by_the_options_that_differ(tmp_path: Path) -> None:
    store = Store.open(tmp_path, REQUEST)
    store.add(0, Prediction(id=1, name="a.png", source="a.png", width=8, height=8, boxes=(), truncated=False))
    store.close()
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path, {**REQUEST, "asked": {"samples": 4, "server": None, "max_new_tokens": None}})
    assert caught.value.found == "samples: 2 there, 4 now"
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path, {**REQUEST, "settings": {"classes": ["red", "white"], "max_new_tokens": 512}})
    assert caught.value.found == "the model's classes: ['red'] there, ['red', 'white'] now"
