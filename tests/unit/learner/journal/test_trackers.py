"""Trackers: what each real package has on disk after a run without network, and that none can end or slow a run."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learner.config.load import config_of
from learner.config.sections.logging import LoggingConfig
from learner.doctor.check import run_check
from learner.journal import trackers
from learner.journal.log import MetricsLog
from learner.journal.trackers import Tracker, TrackerCount, TrackerKind, TrackerPlace, Trackers, check_trackers
from learner.policy.parallel import Ranks
from shared.config.parse import dump_yaml
from tests.runs import events
from tests.unit.learner.config.examples import changed, minimal
from tests.unit.learner.data.fakes import draw
from tests.unit.learner.trainer_world import Seen, make_config, trainer
from tests.waits import wait_until

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[4] / "docs" / "trackers.md"
SETTINGS = {"training": {"seed": 3, "output_dir": "out"}, "data": {"val": None}}


def write_all(tmp_path: Path, name: str, *, steps: Sequence[int] = (1, 2)) -> list[str]:
    """Write a short run of `name`; return what it said."""
    config = LoggingConfig(trackers=[name], project="tests")  # type: ignore[list-item]
    said: list[str] = []
    made = Trackers(config, tmp_path / "run", tell=said.append, timeout_s=60.0)
    (tmp_path / "run").mkdir(exist_ok=True)
    made.begin(SETTINGS)
    for step in steps:
        made.scalars({"step/loss": 1.0 / step, "eval/metrics/f1@0.5": 0.5}, step)
    made.pictures(lambda: [("scene 1", Image.new("RGB", (8, 6), (255, 0, 0)))], steps[-1])

    def report() -> Path:
        (tmp_path / "report.html").write_text("<p>report</p>")
        return tmp_path / "report.html"

    assert made.close(report=report) == {}, said
    return said


# ---- the real packages ---------------------------------------------------------------------------------------------


def test_tensorboard_has_config_numbers_and_pictures(tmp_path: Path) -> None:
    assert write_all(tmp_path, "tensorboard") == []
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("step/loss")] == [(1, 1.0), (2, 0.5)]
    assert [image.step for image in board.Images("eval/scene 1")] == [2]
    assert b'"seed": 3' in board.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_mlflow_has_config_numbers_pictures_and_the_report(tmp_path: Path) -> None:
    """All are in its file store. A resumed run goes on in the same run."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    assert write_all(tmp_path, "mlflow") == []
    assert write_all(tmp_path, "mlflow", steps=(2, 3)) == []
    client = MlflowClient(tracking_uri=(tmp_path / "run" / "trackers" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["training.seed"] == "3"
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert sorted({(metric.step, metric.value) for metric in history}) == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert run.data.metrics["eval/metrics/f1_at_0.5"] == 0.5
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (folder / "report.html").read_text() == "<p>report</p>"
    assert Image.open(folder / "eval" / "step_000002" / "scene_1.png").size == (8, 6)


def test_wandb_without_a_key_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online without a login: one warning that says what to do, and no prompt on the terminal."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "login", lambda prompt: prompt)
    config = LoggingConfig(trackers=["wandb"])
    said: list[str] = []
    made = Trackers(config, tmp_path, tell=said.append, timeout_s=30.0)
    made.scalars({"step/loss": 1.0}, 1)
    assert made.close()["wandb"].failed == 3
    assert len(said) == 1
    assert "wandb login" in said[0]


def test_a_whole_run_with_three_of_them(tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, numbers, the pictures of an evaluation, and the report arrive; nothing is lost. wandb's folder is what
    `wandb sync` would send."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb").teardown()  # it reads its variables once
    monkeypatch.setattr(trackers, "CLOSE_S", 60.0)
    row = {"messages": [{"role": "user", "content": "<image>Detect."}], "width": 200, "height": 100}
    objects = [{"desc": "cat", "bbox_2d": [10, 50, 20, 90]}, {"desc": "roof", "poly": [10, 10, 90, 10, 50, 60]}]
    draw(tmp_path, "1.png")
    (tmp_path / "t.jsonl").write_text(json.dumps({**row, "images": ["1.png"], "objects": objects}))
    base = make_config(tiny_vlm, tmp_path, max_steps=1, eval_on_end=True).model_dump()
    keys = {
        "logging.trackers": ["tensorboard", "mlflow", "wandb"],
        "data.train": str(tmp_path / "t.jsonl"),
        "data.test": str(tmp_path / "t.jsonl"),
        "custom.extra.rollout_matching": {"rollout_backend": "hf", "decoding": {"max_new_tokens": 8}},
    }
    with trainer(config_of(changed(base, keys)), Ranks(), monkeypatch, Seen()) as made:
        made.run()
    run_dir = tmp_path / "run"
    assert events(run_dir, "trackers") == []
    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert "step/loss" in board.Tags()["scalars"]
    assert "eval/metrics/f1@0.5" in board.Tags()["scalars"]
    assert board.Tags()["images"] == ["eval/1"]
    assert list((run_dir / "trackers" / "mlruns").rglob("eval/step_000001/1.png"))
    assert "<title>" in next((run_dir / "trackers" / "mlruns").rglob("report.html")).read_text()
    (folder,) = (run_dir / "trackers" / "wandb").glob("offline-run-*")
    (stored,) = folder.glob("run-*.wandb")
    # wandb's service writes this file. It does so after `finish` has returned: it is told to end without an answer.
    for written in (b"step/loss", b"eval/metrics/f1@0.5", b"learning_rate", b"report.html"):
        wait_until(lambda written=written: written in stored.read_bytes())
    (picture,) = folder.glob("files/media/images/eval/*.png")
    assert Image.open(picture).size == (200, 100)
    assert json.loads((run_dir / "trackers.json").read_text())["wandb"] in stored.name


def test_every_yaml_block_of_the_page_is_accepted() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        check_trackers(config_of({**minimal(), **yaml.safe_load(block)}))


# ---- faults --------------------------------------------------------------------------------------------------------


class Faulty(Tracker):
    """`hook` is called with the name of each method."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        self._hook = hook

    def begin(self, config: Mapping[str, Any]) -> None:
        self._hook("begin")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._hook("scalars")

    def pictures(self, pictures: Sequence[Any], step: int) -> None:
        self._hook("pictures")

    def end(self) -> None:
        self._hook("end")


def with_faults(
    tmp_path: Path,
    hook: Callable[[str], None],
    *,
    timeout_s: float = 5.0,
    make: Callable[[TrackerPlace], Tracker] | None = None,
) -> tuple[Trackers, list[str]]:
    said: list[str] = []
    kind = TrackerKind(make=make or (lambda _: Faulty(hook)), module="wandb", install="")
    config = LoggingConfig(trackers=["wandb"])
    return Trackers(config, tmp_path, tell=said.append, kinds={"wandb": kind}, timeout_s=timeout_s), said


def test_a_tracker_that_fails_is_one_warning_and_a_count(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == "scalars":
            raise OSError("no space left")

    made, said = with_faults(tmp_path, fail)
    for step in range(50):
        made.scalars({"loss": 1.0}, step)
    assert made.close() == {"wandb": TrackerCount(failed=51, dropped=0, unfinished=0)}
    assert len(said) == 1
    assert "wandb" in said[0]
    assert "no space left" in said[0]


def test_a_tracker_that_comes_back_gets_what_follows(tmp_path: Path) -> None:
    calls: list[str] = []

    def fail_twice(name: str) -> None:
        calls.append(name)
        if len(calls) <= 2:
            raise ConnectionError("down")

    made, said = with_faults(tmp_path, fail_twice)
    for step in range(5):
        made.scalars({"loss": 1.0}, step)
    assert made.close()["wandb"].failed == 2
    assert calls == ["scalars"] * 5 + ["end"]
    assert len(said) == 1


def test_a_tracker_that_cannot_begin_is_left_alone(tmp_path: Path) -> None:
    def refuse(_: TrackerPlace) -> Tracker:
        raise PermissionError("no API key")

    made, said = with_faults(tmp_path, lambda _: None, make=refuse)
    made.scalars({"loss": 1.0}, 1)
    assert made.close()["wandb"].failed == 3
    assert len(said) == 1


def test_a_tracker_that_hangs_slows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded, calls do not wait, and the end comes at its deadline."""
    monkeypatch.setattr(trackers, "MAX_WAITING", 10)
    released = threading.Event()

    def hang(_: str) -> None:
        released.wait(120)

    made, said = with_faults(tmp_path, hang, timeout_s=0.2)
    began = time.monotonic()
    for step in range(1000):
        made.scalars({"loss": 1.0}, step)
    lost = made.close()["wandb"]
    assert time.monotonic() - began < 60.0
    released.set()
    assert lost.dropped >= 989
    assert 1 <= lost.unfinished <= 11
    assert len(said) == 2, "that it is too slow, and that it was given up"


def test_a_trackers_failure_is_in_the_log_and_the_metrics_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: TrackerPlace) -> Tracker:
        raise OSError("no network")

    monkeypatch.setitem(trackers.KINDS, "wandb", TrackerKind(make=refuse, module="wandb", install=""))
    log = MetricsLog(tmp_path, LoggingConfig(trackers=["wandb"]), settings=SETTINGS)
    said: list[str] = []
    log.tell = said.append
    log.write("step", {"loss": 0.5}, step=1)
    log.close()
    assert [event["loss"] for event in events(tmp_path, "step")] == [0.5]
    (lost,) = events(tmp_path, "trackers")
    assert lost["wandb"]["failed"] >= 3


def test_a_missing_package_is_told_by_check_with_the_line_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("wandb", "mlflow") else find(name))
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(changed(minimal(), {"logging.trackers": ["tensorboard", "wandb", "mlflow"]})))
    assert run_check(str(path)) == 2
    wandb, mlflow = capsys.readouterr().err.splitlines()
    assert wandb.startswith("logging.trackers[1]: ")
    assert mlflow.startswith("logging.trackers[2]: ")
    assert "pip install 'wandb>=0.19'" in wandb
    assert "pip install 'mlflow-skinny>=3'" in mlflow
