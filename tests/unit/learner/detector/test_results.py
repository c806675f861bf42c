"""The folder of `predict`: who may write there, and what a second command is told (R43)."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.detector.boxes import Prediction
from learner.detector.results import LINES, PAGE_NAME, Store
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
