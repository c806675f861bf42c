"""`training.callbacks` in whole runs: when hooks are called, on which rank, and what ends the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.extensions import check_extensions
from shared.config.model import ConfigErrors
from shared.errors import CallbackError
from tests.tiers import slow
from tests.unit.learner.config.examples import changed
from tests.unit.learner.trainer_world import make_config, run

PARTS = """
import json
from learner.extensions import Callback

class Notes(Callback):
    def __init__(self, config):
        super().__init__(config)
        self.note("made")
    def note(self, hook, **values):
        with open("notes.jsonl", "a") as file:
            file.write(json.dumps({"hook": hook, **values}) + "\\n")
    def on_step(self, result):
        self.note("step", step=result.global_step, loss=result.loss)
    def on_eval(self, step, metrics):
        self.note("eval", step=step, f1=metrics["f1@0.5"])
    def on_save(self, step, folder):
        self.note("save", step=step, whole=(folder / "config.json").is_file(), name=folder.name)

class EndByStep(Notes):
    def on_step(self, result):
        super().on_step(result)
        return result.global_step == 2

class EndByEval(Notes):
    def on_eval(self, step, metrics):
        super().on_eval(step, metrics)
        return step == 1

class FailStep(Notes):
    def on_step(self, result):
        super().on_step(result)
        if result.global_step == 2:
            raise RuntimeError("no more")

class FailEval(Notes):
    def on_eval(self, step, metrics):
        super().on_eval(step, metrics)
        return metrics["no such metric"]

class FailSave(Notes):
    def on_save(self, step, folder):
        super().on_save(step, folder)
        raise OSError("no such host")

class FailInit(Callback):
    def __init__(self, config):
        raise KeyError("token")

class Wordy(Callback):
    def on_step(self, result):
        return "yes"

class Other: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PARTS)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("part_mine")]:
        del sys.modules[name]


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def hooks(folder: Path) -> list[tuple[str, int]]:
    return [(note["hook"], note["step"]) for note in notes(folder) if note["hook"] != "made"]


def config(model: Path, folder: Path, name: str, **training: Any) -> RunConfig:
    base = make_config(model, folder, max_steps=4, **training).model_dump()
    needed = {
        "custom.trainer_variant": "rollout_matching_sft",
        "training.callbacks": [f"mine.py:{name}"],
    }
    return config_of(changed(base, needed))


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_hooks_are_called_on_one_rank_in_order(
    tiny_text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    run(config(tiny_text, folder, "Notes", save_steps=2, eval_steps=4), monkeypatch, world_size)
    assert hooks(folder) == [("step", 1), ("step", 2), ("save", 2), ("step", 3), ("step", 4), ("save", 4), ("eval", 4)]
    assert [note["hook"] for note in notes(folder)].count("made") == 1
    saved = [note for note in notes(folder) if note["hook"] == "save"]
    assert [(note["whole"], note["name"]) for note in saved] == [(True, "checkpoint-2"), (True, "checkpoint-4")]
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert [note["loss"] for note in notes(folder) if note["hook"] == "step"] == pytest.approx(losses)


@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize(("name", "last"), [("EndByStep", 2), ("EndByEval", 1)])
def test_a_callback_ends_the_run_as_its_last_step_does(
    tiny_text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, last: int, world_size: int
) -> None:
    keys = {"eval_steps": 1, "save_on_end": True, "eval_on_end": True}
    run(config(tiny_text, folder, name, **keys), monkeypatch, world_size)
    assert max(step for _, step in hooks(folder)) == last
    assert [checkpoint.name for checkpoint in (folder / "run").glob("checkpoint-*")] == [f"checkpoint-{last}"]


@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize(
    ("name", "hook", "saved", "found"),
    [
        ("FailStep", "on_step", 2, "mine.py:"),
        ("FailEval", "on_eval", 1, "no such metric"),
        ("FailSave", "on_save", 1, "no such host"),
        ("Wordy", "on_step", 1, "yes"),
    ],
)
def test_a_callback_that_fails_is_named_and_the_step_is_saved(
    tiny_text: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    hook: str,
    saved: int,
    found: str,
    world_size: int,
) -> None:
    cadence = {"FailEval": {"eval_steps": 1}, "FailSave": {"save_steps": 1}}.get(name, {})
    with pytest.raises(CallbackError) as caught:
        run(config(tiny_text, folder, name, **cadence), monkeypatch, world_size)
    assert f"mine.py:{name}" in caught.value.what
    assert hook in caught.value.what
    assert found in caught.value.found
    assert (folder / "run" / f"checkpoint-{saved}" / "config.json").is_file()
    if name == "FailSave":
        assert hooks(folder).count(("save", 1)) == 1, "no hook is called after one failed"


def test_a_callback_that_cannot_be_made_ends_the_run_before_its_first_step(
    tiny_text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CallbackError) as caught:
        run(config(tiny_text, folder, "FailInit"), monkeypatch)
    assert "token" in caught.value.found


@pytest.mark.parametrize(("names", "found"), [(["Other"], "another class"), (["Notes", "Notes"], "again")])
def test_what_is_no_callback_is_refused(tiny_text: Path, folder: Path, names: list[str], found: str) -> None:
    paths = [f"mine.py:{name}" for name in names]
    wrong = config_of(changed(make_config(tiny_text, folder, max_steps=1).model_dump(), {"training.callbacks": paths}))
    with pytest.raises(ConfigErrors) as caught:
        check_extensions(wrong)
    (mistake,) = caught.value.mistakes
    assert mistake.path == f"training.callbacks[{len(names) - 1}]"
    assert found in mistake.found
