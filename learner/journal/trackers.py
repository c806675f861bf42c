"""Experiment trackers: TensorBoard, Weights & Biases and MLflow behind one interface.

`Trackers`. In: the run's configuration, numbers by step, pictures of evaluations, the report. Out: each program of
`logging.trackers` gets the configuration, numbers, pictures and report. Only rank 0 has trackers. The run's own files
(`metrics.jsonl`, `eval/`) do not depend on trackers.

Invariants: a tracker never ends a run, and never makes it wait. Each tracker has a thread and a bounded queue, so a
call here takes microseconds, however slow the network and the disk are. If the queue is full, the call is dropped and
counted. A tracker's first failure is logged as a warning. After MAX_FAILURES failures in a row the tracker gets no more
calls, and further calls are only counted. `close` waits at most CLOSE_S for all trackers together, and returns how many
calls each tracker did not get.

A resumed run continues the same run in wandb and MLflow. `trackers.json` has the ids of the runs in wandb and MLflow.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from learner.config.schema import RunConfig
from learner.config.sections.logging import LoggingConfig
from shared.config.model import ConfigErrors, Mistake
from shared.reading import json_in

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
T = TypeVar("T")

IDS = "trackers.json"
MAX_WAITING = 10_000  # max queued calls of a tracker
CLOSE_S = 10.0  # max seconds to wait at the end for all trackers together
MAX_FAILURES = 20  # number of failed calls in a row after which a tracker gets no more calls
STEP = "global_step"
Pictures = Callable[[], Sequence[tuple[str, "Image"]]]  # a function that makes pictures, each with its sample's name


class Tracker(Protocol):
    """One tracking program. All methods are called on one thread, which serves this tracker only. A method may raise
    any error, and may take long."""

    def begin(self, config: Mapping[str, object]) -> None:
        """Store the run's configuration, a nested mapping of keys to values."""
        ...

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Store the numbers of one optimizer step. The keys of `values` are names such as `step/loss`. All numbers are
        finite."""
        ...

    def pictures(self, pictures: Sequence[tuple[str, Image]], step: int) -> None:
        """Store the pictures of the evaluation after `step`, each with its sample's name."""
        ...

    def artifact(self, path: Path) -> None:
        """Store a file of the run, at its end."""
        return

    def end(self) -> None:
        """Send everything that is not sent yet, and end the tracker's run."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackerPlace:
    """The names under which a tracker stores a run, and the folder for files."""

    project: str
    run_name: str
    run_dir: Path
    timeout_s: float  # max seconds to send everything at the end
    run_id: str | None = None  # the tracker's id of the run to continue; None: a new run

    @property
    def directory(self) -> Path:
        """The folder for files that a tracker keeps on disk."""
        return self.run_dir / "trackers"


class TensorBoard(Tracker):
    """TensorBoard's files, always in `run_dir/tensorboard`."""

    def __init__(self, place: TrackerPlace) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(place.run_dir / "tensorboard"))

    def begin(self, config: Mapping[str, object]) -> None:
        self._board.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def pictures(self, pictures: Sequence[tuple[str, Image]], step: int) -> None:
        import numpy as np

        for name, picture in pictures:
            self._board.add_image(f"eval/{name}", np.asarray(picture), step, dataformats="HWC")

    def end(self) -> None:
        self._board.close()


class Wandb(Tracker):
    """Weights & Biases. The user sets the key, the server and the mode (`wandb login`, WANDB_MODE)."""

    def __init__(self, place: TrackerPlace) -> None:
        import wandb

        self._wandb = wandb
        settings = wandb.Settings(silent=True, console="off", init_timeout=60, finish_timeout=place.timeout_s)
        online = wandb.setup().settings.mode == "online"
        # wandb.init would ask on the terminal.
        if online and not wandb.login(prompt=False):
            raise PermissionError("no API key: run `wandb login`, or set WANDB_MODE=offline")
        place.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=place.project,
            name=place.run_name,
            dir=str(place.directory),
            id=place.run_id,
            resume="allow" if place.run_id else None,
            settings=settings,
        )
        self.run_id = str(self._run.id)

    def begin(self, config: Mapping[str, object]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)
        # A resumed run goes back to an earlier step, which wandb's own step cannot do.
        self._run.define_metric("*", step_metric=STEP)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({STEP: step, **values})

    def pictures(self, pictures: Sequence[tuple[str, Image]], step: int) -> None:
        shown = [self._wandb.Image(picture, caption=name) for name, picture in pictures]
        self._run.log({STEP: step, "eval/pictures": shown})

    def artifact(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{self._run.id}-{path.stem}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def end(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow on the server in MLFLOW_TRACKING_URI. Without MLFLOW_TRACKING_URI, MLflow stores files in
    `directory/mlruns`."""

    def __init__(self, place: TrackerPlace) -> None:
        uri = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # Without a server, mlflow-skinny can only store files, and it refuses that unless this variable is set.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place.directory.mkdir(parents=True, exist_ok=True)
            uri = (place.directory / "mlruns").absolute().as_uri()
        # By default MLflow waits for 120 s and tries seven times, but at the end the run waits for trackers for 10 s
        # only.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(place.project)
        experiment = found.experiment_id if found else self._client.create_experiment(place.project)
        self._is_new = place.run_id is None
        run_id = place.run_id or self._client.create_run(experiment, run_name=place.run_name).info.run_id
        self.run_id = str(run_id)

    def begin(self, config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        if not self._is_new:  # MLflow does not let a run's parameters change
            self._client.update_run(self.run_id, status="RUNNING")
            return
        params = [Param(name, str(value)[:500]) for name, value in flat(config)]
        for i in range(0, len(params), 100):  # MLflow takes at most 100 parameters at a time
            self._client.log_batch(self.run_id, params=params[i : i + 100])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def pictures(self, pictures: Sequence[tuple[str, Image]], step: int) -> None:
        for name, picture in pictures:
            self._client.log_image(self.run_id, picture, artifact_file=f"eval/step_{step:06d}/{_file_name(name)}.png")

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self.run_id, str(path))

    def end(self) -> None:
        self._client.set_terminated(self.run_id)


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A kind of tracker: the function that makes one, the module that it imports, and the command that installs the
    module."""

    make: Callable[[TrackerPlace], Tracker]
    module: str
    install: str


KINDS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(make=TensorBoard, module="tensorboard", install="pip install tensorboard"),
    "wandb": TrackerKind(make=Wandb, module="wandb", install="pip install 'wandb>=0.19'"),
    "mlflow": TrackerKind(make=MLflow, module="mlflow", install="pip install 'mlflow-skinny>=3'"),
}


KEEP_FILES = ("wandb", "mlflow")  # trackers that store the run's report as a file


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigErrors that name each tracker whose package is not installed. No tracker is imported."""
    missing = [
        Mistake(
            path=f"logging.trackers[{i}]",
            found=f"{name}, and the package {KINDS[name].module} is not installed",
            wanted=f"the package {KINDS[name].module}",
            remedy=f"{KINDS[name].install}, or remove {name}",
        )
        for i, name in enumerate(config.logging.trackers)
        if importlib.util.find_spec(KINDS[name].module) is None
    ]
    if missing:
        raise ConfigErrors("a tracker's package is missing", mistakes=missing)


# ---- threads -------------------------------------------------------------------------------------------------------

Call = Callable[[Tracker], None]


class _Thread:
    """One tracker's thread, and the queue of its calls. `tell` is called with a text at the first failed call, and at
    the first dropped call."""

    def __init__(self, name: str, make: Callable[[], Tracker], tell: Callable[[str], None]) -> None:
        self.name = name
        # Numbers of calls that failed, and that were dropped because the queue was full.
        self.failed = self.dropped = 0
        self._make, self._tell = make, tell
        self._failures_in_row = 0
        self._queue: queue.Queue[Call | None] = queue.Queue(MAX_WAITING)
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Call | None) -> None:
        """Queue a call for the tracker, without waiting. If the queue is full, the call is dropped."""
        try:
            # A run never waits for a tracker.
            self._queue.put_nowait(call)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._tell(f"{self.name} is too slow: what its queue cannot take is left out")

    def finish(self) -> None:
        """Queue the last call, which ends the tracker's run, and let the thread end after it."""
        self.put(lambda tracker: tracker.end())
        self.put(None)

    def join(self, timeout_s: float) -> int:
        """Wait for the thread's end, for at most `timeout_s`. Return the number of calls that were not made by then; 0
        if the thread has ended."""
        self._thread.join(timeout_s)
        return self._queue.qsize() + 1 if self._thread.is_alive() else 0

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._make()
        except Exception as error:
            self._fail(error)
        while (call := self._queue.get()) is not None:
            if tracker is None or self._failures_in_row >= MAX_FAILURES:
                self.failed += 1
                continue
            try:
                call(tracker)
                # Failures are forgotten after a success, so a tracker that works again gets all further calls.
                self._failures_in_row = 0
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        self._failures_in_row += 1
        if self.failed == 1:
            text = " ".join(str(error).split())[:300]
            self._tell(f"{self.name} failed, the run goes on without it: {type(error).__name__}: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerCount:
    """The number of calls that a tracker did not get, because they failed, were dropped, or were not made in time."""

    failed: int
    dropped: int
    unfinished: int


@dataclass
class Trackers:
    """All trackers of a run. `tell` is called with the text of each tracker's first failure, on the tracker's
    thread."""

    config: LoggingConfig
    run_dir: Path
    tell: Callable[[str], None] = log.warning
    kinds: Mapping[str, TrackerKind] = field(default_factory=lambda: KINDS)
    timeout_s: float = field(default_factory=lambda: CLOSE_S)

    def __post_init__(self) -> None:
        self._ids_lock = threading.Lock()
        self._ids = _stored_ids(self.run_dir)
        names = dict.fromkeys(self.config.trackers)
        self._threads = [_Thread(name, functools.partial(self._make, name), self._say) for name in names]

    def begin(self, config: Mapping[str, object]) -> None:
        self._all(lambda tracker: tracker.begin(config))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if values:
            self._all(lambda tracker: tracker.scalars(values, step))

    def pictures(self, draw: Pictures, step: int) -> None:
        """Queue pictures for all trackers. `draw` is called once, on the thread of the first tracker that needs
        them."""
        once = _Once(draw)
        self._all(lambda tracker: tracker.pictures(once(), step))

    def close(self, *, report: Callable[[], Path] | None = None) -> dict[str, TrackerCount]:
        """End the trackers, and wait until their queued calls were made, at most `timeout_s`. Returns for each tracker
        the number of calls that it did not get; {} if all calls were made. `report` writes the run's report and returns
        its path. `report` is called once, on a tracker's thread, for all trackers of KEEP_FILES."""
        if report is not None:
            once = _Once(report)
            for thread in self._threads:
                if thread.name in KEEP_FILES:
                    thread.put(lambda tracker: tracker.artifact(once()))
        for thread in self._threads:
            thread.finish()
        # All trackers were asked to end before the wait, so they share one deadline.
        deadline = time.monotonic() + self.timeout_s
        counts = {}
        for thread in self._threads:
            unfinished = thread.join(max(0.0, deadline - time.monotonic()))
            if unfinished:
                self._say(f"{thread.name} has not ended after {self.timeout_s:g} s: {unfinished} calls are given up")
            if thread.failed or thread.dropped or unfinished:
                counts[thread.name] = TrackerCount(failed=thread.failed, dropped=thread.dropped, unfinished=unfinished)
        return counts

    def _all(self, call: Call) -> None:
        for thread in self._threads:
            thread.put(call)

    def _say(self, text: str) -> None:
        log.warning("tracker %s", text)
        self.tell(f"tracker {text}")

    def _make(self, name: str) -> Tracker:
        place = TrackerPlace(
            project=self.config.project,
            run_name=self.run_dir.resolve().name,
            run_dir=self.run_dir,
            timeout_s=self.timeout_s,
            run_id=self._ids.get(name),
        )
        tracker = self.kinds[name].make(place)
        run_id = getattr(tracker, "run_id", None)
        if run_id is not None:
            with self._ids_lock:
                self._ids[name] = run_id
                # The ids are kept, so that a resumed run continues the same run in wandb and MLflow.
                (self.run_dir / IDS).write_text(json.dumps(self._ids))
        return tracker


class _Once(Generic[T]):
    """Calls `make` at its own first call, and returns the result at every call. An error of `make` is raised at every
    call."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._made = make, Future[T]()
        self._lock = threading.Lock()

    def __call__(self) -> T:
        with self._lock:
            if not self._made.done():
                try:
                    self._made.set_result(self._make())
                except Exception as error:
                    self._made.set_exception(error)
        return self._made.result()


def _stored_ids(run_dir: Path) -> dict[str, str]:
    try:
        found = json_in(run_dir / IDS)
    except (OSError, ValueError):
        return {}
    return {str(name): str(run_id) for name, run_id in found.items()} if isinstance(found, dict) else {}


# ---- values --------------------------------------------------------------------------------------------------------


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of each item of a nested mapping: {"a": {"b": 1}} gives ("a.b", 1)."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _mlflow_name(name: str) -> str:
    """Return `name` with only characters that MLflow accepts: letters, digits, _ - . / and spaces. `f1@0.5` becomes
    `f1_at_0.5`."""
    return "".join(char if char.isalnum() or char in "_-./ " else "_" for char in name.replace("@", "_at_"))


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "_-." else "_" for char in name)[:100]
