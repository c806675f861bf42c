"""`data.val` and `data.test` with keys of their own: another format, reader, folder of images or prompt (R41)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.__main__ import main
from learner.config.load import config_of, load_config
from learner.config.schema import RunConfig
from learner.config.split import as_read_for
from learner.data.splits import category_ids_of
from learner.detector.command import reading
from learner.extensions import check_extensions
from learner.wiring import steps
from shared.config.model import ConfigErrors
from shared.config.parse import write_yaml
from tests.unit.learner.config.examples import changed, minimal
from tests.unit.learner.data.annotations import FINE, coco, jsonl, voc, voc_object
from tests.unit.learner.data.fakes import AnyTask, draw

READER = """
from learner.records import DetectionObject, Sample

def read(path, data):
    for name in open(path):
        turn = {"role": "user", "content": data.prompt}
        objects = (DetectionObject("cat", "bbox_2d", (1, 1, 500, 500)),)
        yield Sample(sample_id=name.strip(), messages=(turn,), images=(name.strip(),), objects=objects, width=200,
                     height=100)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a configuration with JSONL to train on, VOC for `val`, a reader of the user's own for `test`; all in
    places of their own."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    train = jsonl(tmp_path / "a", FINE, FINE)
    voc(tmp_path / "b", "x", voc_object("dog", 10, 10, 90, 95))
    draw(tmp_path / "c", "one.png", "two.png", "three.png")
    (tmp_path / "c" / "list.csv").write_text("one.png\ntwo.png\nthree.png\n")
    (tmp_path / "split_keys_reader.py").write_text(READER)
    monkeypatch.chdir(tmp_path)
    keys = {
        "data.train": str(train),
        "data.format": "jsonl",
        "data.val": {"path": str(tmp_path / "b" / "Annotations"), "format": "voc", "prompt": "<image>Find dogs."},
        "data.test": {
            "path": str(tmp_path / "c" / "list.csv"),
            "format": "split_keys_reader.py:read",
            "image_root": str(tmp_path / "c"),
            "prompt": "<image>Cats?",
        },
        "custom.extra.rollout_matching.rollout_backend": "hf",
    }
    write_yaml(tmp_path / "run.yaml", changed(minimal(), keys))
    return load_config(str(tmp_path / "run.yaml"), world_size=1, env={})


def test_every_split_is_read_by_its_own_keys(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "--config", "run.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == {"train": 2, "val": 1, "test": 3}
    found = {split: steps._load(config, split, AnyTask()).samples for split in ("train", "val", "test")}  # type: ignore[arg-type]
    assert {split: len(samples) for split, samples in found.items()} == {"train": 2, "val": 1, "test": 3}
    assert [found[split][0].messages[0]["content"] for split in found] == [
        "<image>?",
        "<image>Find dogs.",
        "<image>Cats?",
    ]
    assert Path(found["test"][0].images[0]).is_file()


def test_a_format_of_its_own_is_not_read_by_the_run_s_reader(config: RunConfig) -> None:
    data = config.data.model_copy(update={"format": "split_keys_reader.py:read"})
    assert as_read_for(data, "train").reader == as_read_for(data, "other").reader == data.reader
    assert as_read_for(data, "val").reader is None


def test_what_evaluates_a_split_by_its_path_reads_it_alike(config: RunConfig) -> None:
    model: Any = type("Model", (), {"run": config})
    data, reader = reading(model, [str(config.data.path_of("test"))], named=True)
    assert data is not None
    assert (data.prompt, reader.__name__) == ("<image>Cats?", "read")
    assert reading(model, [str(config.data.path_of("val"))], named=True)[1] is None
    assert reading(model, [str(config.data.path_of("test"))], named=False) == (None, None), "nobody named it (D24)"


def test_category_ids_are_those_of_the_split(config: RunConfig, tmp_path: Path) -> None:
    path = str(coco(tmp_path))
    data = config.data.model_copy(update={"val": path, "format": "auto"})
    assert category_ids_of(data, "val") == {"cat": 1}
    assert category_ids_of(data, "test") == category_ids_of(data, None) == {}


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"data.test": {"path": "x", "format": "no_such_module:read"}}, "data.test.format"),
        ({"data.val": {"path": "x", "format": "jsonl", "prompt": "a"}}, "data.val.prompt"),
        ({"data.val": {"path": "x", "fromat": "voc"}}, "data.val.fromat"),
        ({"data.val": {"format": "voc"}}, "data.val.path"),
        ({"data.val": 3}, "data.val"),
    ],
)
def test_mistakes_name_the_key_of_the_split(keys: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_extensions(config_of(changed(minimal(), keys)))
    assert caught.value.mistakes[0].path == path


def test_a_split_that_is_wrong_is_named(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", "run.yaml", "data.val.path=none"]) == 2
    assert capsys.readouterr().err.startswith("data.val: found ")
