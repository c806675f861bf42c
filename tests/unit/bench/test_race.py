"""The race's file and arithmetic, without a model. Its run on CPU is in tests/integration/test_race.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from bench import forked
from bench.race import (
    LARGE,
    Race,
    RaceResults,
    RunningSide,
    SideResult,
    enlarged,
    parts_lines,
    run_side,
    steps_with_parts,
    table,
)
from bench.tiny import tiny_model
from bench.watch import GpuUse
from deploy.launch import supervised
from shared.errors import DataError, DeadlineError
from tests.unit.bench.test_runs import started

ROOT = Path(__file__).parents[3]
WORK = {"model": "tiny", "steps": 4, "data": "bccd"}


def step(seconds: float) -> dict[str, float]:
    return {"step_s": seconds, "sync_s": 0.25, "sync/merge": 0.125, "rollout_s": seconds / 2}


def test_parts_belong_to_the_step_that_follows() -> None:
    events = [
        {"event": "sync", "parts": {"merge": 0.1}},
        {"event": "rollout_call", "parts": {"engine": 1.0}},
        {"event": "step", "loss": 0.5, "metrics": {"step_s": 2.0, "sync_s": 0.2}},
        {"event": "rollout_call", "parts": {"engine": 1.5}},
        {"event": "step", "loss": 0.5, "metrics": {"step_s": 1.0}},
    ]
    first, second = steps_with_parts(events)
    assert first == {"step_s": 2.0, "sync_s": 0.2, "sync/merge": 0.1, "rollout/engine": 1.0}
    assert second == {"step_s": 1.0, "rollout/engine": 1.5}


def test_steps_are_kept_when_a_side_is_cut_off(tmp_path: Path) -> None:
    out, steps = tmp_path / "race.json", [step(9.0)]

    def read() -> tuple[Mapping[str, float], Sequence[Mapping[str, float]]]:
        return {"plan": 3.0}, steps

    def cut_off(timeout_s: float, *, until: Callable[[], bool]) -> None:
        assert not until()
        raise DeadlineError("the side did not end in time")

    with pytest.raises(DeadlineError):
        RunningSide(side="ours", read=read, results=RaceResults(out, WORK)).run(cut_off, 5.0)
    results = RaceResults(out, WORK)
    assert results.lacks("ours")
    assert results.lacks("trl")
    assert results.sides["ours"].steps == steps
    assert "cut off" in table([results.sides["ours"]], 64, {})

    steps += [step(seconds) for seconds in (3.0, 2.0, 1.0)]
    RunningSide(side="ours", read=read, results=results).run(lambda timeout_s, *, until: until(), 5.0)
    again = RaceResults(out, WORK)
    assert not again.lacks("ours")
    assert again.lacks("trl")
    assert again.sides["ours"].median_s("step_s") == 1.5
    assert parts_lines(again.sides["ours"])[0] == "sync: merge 0.125, rest 0.125"


def test_memory_is_that_of_the_race_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs may have the host's first one."""
    asked: list[Sequence[str]] = []

    @contextmanager
    def gpu_use(every_ms: int, devices: Sequence[str] = ()) -> Iterator[dict[int, GpuUse]]:
        asked.append(devices)
        yield {2: GpuUse(busy_mean=0.5, busy_median=0.5, memory_mib=64.0)}

    monkeypatch.setattr("bench.race.gpu_use", gpu_use)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    results = RaceResults(tmp_path / "race.json", WORK)
    side = RunningSide(side="ours", read=lambda: ({}, [step(1.0)] * 4), results=results)
    side.run(lambda timeout_s, *, until: until(), 5.0)
    assert asked == [["2"]]
    assert results.sides["ours"].gpu["memory_mib"] == 64.0


def test_a_file_of_another_race_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    RaceResults(out, WORK).write()
    before = out.read_bytes()
    with pytest.raises(DataError) as refused:
        RaceResults(out, {**WORK, "steps": 5})
    assert (refused.value.found, refused.value.wanted) == (f"steps {WORK['steps']}", "steps 5")
    assert out.read_bytes() == before


def test_a_side_that_hangs_is_stopped(tmp_path: Path) -> None:
    """The file has its steps until then."""
    results = RaceResults(tmp_path / "race.json", WORK)
    with supervised() as processes:
        run = started(processes, tmp_path, "import time; time.sleep(60)")
        watched = RunningSide(side="ours", read=lambda: ({}, [step(2.0)]), results=results)
        with pytest.raises(DeadlineError):
            watched.run(run.wait, 0.3)
        assert run.process.popen.poll() is not None
    assert json.loads((tmp_path / "race.json").read_text())["sides"][0]["steps"] == [step(2.0)]


def test_a_side_says_its_rates_and_versions_and_the_factor_over_the_first() -> None:
    sides = [
        SideResult(side=name, ended=True, run_s=9.0, steps=[step(seconds)] * 3, start={}, gpu={}, versions=versions)
        for name, seconds, versions in (("ours", 2.0, {}), ("trl", 8.0, {"trl": "1.16.0", "vllm": "0.26.0"}))
    ]
    *_, row, versions = table(sides, 64, {"learn_tflop": 800.0, "rate_tflop_s": 500.0}).splitlines()
    assert [cell.strip() for cell in row.split("|")[-4:-1]] == ["8.0", "0.200", "4.00"]
    assert versions == "trl: trl 1.16.0, vllm 0.26.0"


@pytest.mark.slow
def test_a_rival_has_its_own_packages_and_one_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    site = tmp_path / "site-trl-best"
    site.mkdir()
    (site / "trl.py").write_text("raise ImportError('of this folder')\n")
    results = RaceResults(tmp_path / "race.json", WORK)
    photographs(tmp_path / "data", 2)
    race = Race(
        model=tiny_model(tmp_path / "model"),
        data=tmp_path / "data",
        steps=3,
        photographs=2,
        tokens=4,
        row_tokens=1024,
        context=512,
        whole_model=False,
        on_gpu=False,
        share=0.3,
        compile_engine=True,
        limit_s=120.0,
    )
    assert not run_side("trl-best", race, results, tmp_path / "logs", tmp_path)
    (side,) = RaceResults(tmp_path / "race.json", WORK).sides.values()
    assert side.failed.endswith("ImportError: of this folder")
    assert not side.ended
    assert table([side], 16, {}).endswith("ImportError: of this folder")
    assert "of this folder" in (tmp_path / "logs" / "trl-best.log").read_text()


def test_an_unknown_rival_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    argv = ["--data", str(tmp_path), "--out", str(tmp_path / "race.json"), "--size", "tiny"]
    argv += ["--against", "swift", "--against", "verl"]
    (said,) = forked.finish(forked.LEARNER, "bench.race", argv, envs=[os.environ], timeout_s=120)
    assert said.returncode == 2
    assert "verl; wanted: trl, trl-best, swift, unsloth" in " ".join(said.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_photographs_are_enlarged_with_their_boxes(tmp_path: Path) -> None:
    photographs(tmp_path / "data", 3)
    folder = enlarged(tmp_path / "data", tmp_path / "large", 2)
    assert (folder / "splits" / "train.txt").read_text().split() == ["p0", "p1"]
    with Image.open(folder / "images" / "p1.jpg") as image:
        assert image.size == LARGE
    box = ElementTree.parse(folder / "voc" / "p1.xml").find("object/bndbox")
    assert box is not None
    assert {corner.tag: corner.text for corner in box} == {"xmin": "150", "ymin": "110", "xmax": "1500", "ymax": "550"}


def photographs(folder: Path, number: int) -> None:
    """Write pictures of 100 x 50 pixels with one box each, as BCCD has them."""
    for name in ("images", "voc", "splits"):
        (folder / name).mkdir(parents=True)
    for i in range(number):
        Image.new("RGB", (100, 50), (40 * i, 80, 120)).save(folder / "images" / f"p{i}.jpg")
        corners = "".join(f"<{k}>{v}</{k}>" for k, v in {"xmin": 10, "ymin": 5, "xmax": 100, "ymax": 25}.items())
        size = "<size><width>100</width><height>50</height><depth>3</depth></size>"
        box = f"<object><name>cell</name><bndbox>{corners}</bndbox></object>"
        text = f"<annotation><filename>p{i}.jpg</filename>{size}{box}</annotation>"
        (folder / "voc" / f"p{i}.xml").write_text(text)
    (folder / "splits" / "train.txt").write_text("\n".join(f"p{i}" for i in range(number)) + "\n")
