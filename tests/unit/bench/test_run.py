"""The runner: which part runs where, what is left out, and figures on their way between processes."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console

from bench import run
from bench.figures import Figure, read, sampled, save, show, write
from bench.run import PARTS, Device, Job, Part, call, choose, measure_all, read_settings
from shared.errors import ConfigError


@pytest.mark.parametrize(("value", "at_least", "good"), [(2.0, True, True), (0.5, True, False), (0.5, False, True)])
def test_a_figure_knows_whether_it_is_good(value: float, at_least: bool, good: bool) -> None:
    assert Figure(name="x", value=value, unit="s", wanted=1.0, at_least=at_least).good is good
    assert Figure(name="x", value=value, unit="s").good is None


def test_a_figure_of_samples_is_their_median() -> None:
    assert sampled("x", [3.0, 1.0, 2.0], "s", at_most=1.5).value == 2.0
    assert sampled("x", [3.0, 1.0, 2.0], "s", at_most=1.5).good is False
    assert sampled("x", [3.0, 1.0, 2.0], "s", at_least=1.5).good is True
    assert sampled("x", [3.0], "s").good is None


def test_a_run_is_written_with_its_circumstances_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure(name="speed", value=2.0, unit="m/s", wanted=1.0, samples=[1.0, 2.0, 3.0])
    written = json.loads(save("a", [figure], tmp_path).read_text())
    assert written["figures"][0]["good"] is True
    assert {"date", "commit", "hardware", "versions"} < written.keys()
    assert written["hardware"]["cores"] == os.cpu_count()
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert json.loads(save("a", [figure], tmp_path).read_text())["commit"] == "abc1234"
    console = Console(record=True, width=100)
    show([figure], console)
    assert "1 to 3" in console.export_text()


def test_figures_survive_the_way_between_processes(tmp_path: Path) -> None:
    figures = [Figure(name="a", value=1.0, unit="s", wanted=2.0, at_least=False, samples=[1.0, 1.5])]
    write(tmp_path / "figures.json", figures)
    assert read(tmp_path / "figures.json") == figures
    assert read(tmp_path / "none.json") == []


def functions(part: Part | None, device: Device) -> list[str]:
    return [job.function for job in choose(part, device, {})]


def test_parts_know_on_which_devices_they_run() -> None:
    whole_run = ["stages:measure", "training:measure", "training:first_token", "sync:adapters"]
    assert functions(None, "cpu") == [f"bench.{name}" for name in (*whole_run, "infer:measure")]
    sizes = [(job.function, job.settings.get("size")) for job in choose(None, "cuda", {})]
    assert sizes == [
        ("bench.sync:full", "4B"),
        ("bench.infer:measure", "0.6B"),
        ("bench.infer:measure", "4B"),
        ("bench.sync:full", "4B"),
        ("bench.learning:measure", "4B"),
        ("bench.learning:photographs", "4B"),
        ("bench.training:offload", "4B"),
    ]
    assert functions("learning", "cpu") == ["bench.learning:measure"], "a try without a GPU, if it is asked for"
    with pytest.raises(ConfigError, match="does not run on this device") as refused:
        choose("sync", "cpu", {})
    assert (refused.value.found, refused.value.wanted) == ("--device cpu", "cuda")


def test_without_a_device_a_part_runs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert {job.device for job in choose("stages", None, {})} == {"cpu"}
        assert {job.device for job in choose("sync", None, {})} == {"cuda"}
        assert {job.device for job in choose("learning", None, {})} == {"cuda"}, "without a GPU only if asked for"
        assert {job.device for job in choose("infer", None, {})} == {"cuda" if has_gpu else "cpu"}
        assert {job.device for job in choose(None, None, {})} == {"cuda" if has_gpu else "cpu"}


def test_settings_are_laid_over_a_parts_own() -> None:
    (job,) = choose("infer", "cuda", read_settings(["size=tiny", "rounds=2"]))
    assert job.settings == {"size": "tiny", "rounds": "2"}
    with pytest.raises(ConfigError, match="--set"):
        choose(None, "cpu", {"size": "tiny"})
    with pytest.raises(ConfigError, match="--set") as refused:
        read_settings(["size"])
    assert (refused.value.found, refused.value.wanted) == ("size", "NAME=VALUE")


@pytest.mark.parametrize("job", [job for jobs in PARTS.values() for job in jobs], ids=str)
def test_every_job_names_a_function_and_settings_that_it_takes(job: Job) -> None:
    module, _, name = job.function.partition(":")
    inspect.signature(getattr(import_module(module), name)).bind(Path(), **job.settings)


def test_settings_become_what_the_function_takes(tmp_path: Path) -> None:
    def measure(folder: Path, *, number: int = 1, size: Literal["a", "b"] = "a") -> Iterator[Figure]:
        yield Figure(name=f"{size} in {folder.name}", value=number + 1, unit="")

    (figure,) = call(measure, tmp_path, {"number": "3", "size": "b"})
    assert (figure.name, figure.value) == (f"b in {tmp_path.name}", 4)
    wrong: dict[str, Any]
    for wrong in ({"number": "x"}, {"size": "c"}, {"other": "1"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))) as refused:
            list(call(measure, tmp_path, wrong))
        assert next(iter(wrong.values())) in refused.value.found


PART = """
from bench.figures import Figure

def good(folder, *, value: float):
    yield Figure(name="good", value=value, unit="")

def bad(folder):
    yield Figure(name="before", value=1, unit="")
    raise RuntimeError("after")
"""


@pytest.mark.slow
def test_a_failed_part_ends_no_other_and_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each measurement is a process of its own."""
    (tmp_path / "some_part.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    jobs = [
        Job(function="some_part:bad"),
        Job(function="some_part:good", settings={"value": 2.5}),
        Job(function="some_part:good", device="cuda", gpus=99, settings={"value": 2.5}),
    ]
    figures, failed = measure_all(jobs, tmp_path)
    assert failed
    assert [(figure.name, figure.value) for figure in figures] == [("before", 1), ("good", 2.5)]
    assert "needs 99 GPUs" in capfd.readouterr().err


def test_a_part_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_part.py").write_text("import time\n\ndef slow(folder):\n    time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(run, "_TIMEOUT_S", 0.5)
    assert measure_all([Job(function="slow_part:slow")], tmp_path) == ([], True)
