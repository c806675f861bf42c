"""The files that a run writes about itself: metrics, the timeline, log files, and the link `latest`.

`MetricsLog`. In: events (`step`, `timeline`, `eval`, `sync`, `server`, `rollout_call`, `note`) with numbers and
strings. Out: one JSON object per line in `metrics.jsonl`, and scalars in the trackers (`trackers.py`). Only rank 0
writes. Each line is flushed at once, so a killed run loses no event.

`Timeline` collects what every rank and server did at what time, for a drawing in the report. In: the phases of
learning, and each rollout call when it has ended. Out: one `timeline` event per optimizer step, with the spans of all
ranks. A span (one activity, with begin and end) belongs to the step in which it ended, even if it began many steps
earlier. Times are Unix seconds of each rank's clock. `phase` and `call` may be called from any thread.

`log_to_file` and `point_latest`. In: the run directory and this process's rank. Out: `learner_rank{r}.log`, with
everything that libraries would print to the console, and the link `latest` next to the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub.utils
import transformers

from learner.config.sections.logging import LoggingConfig
from learner.journal.trackers import Pictures, Trackers
from learner.policy.parallel import Ranks
from learner.records import Activity, RolloutCallLog
from learner.run.files import AppendedLines, writing
from shared.errors import OutputError
from shared.masking import masked, masked_in
from shared.private import unlinked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class MetricsLog:
    """Appends the events of a run to `metrics.jsonl`. Each line is a JSON object with `event` (the event's kind),
    `time` (Unix seconds) and the event's own fields.

    `enabled` False: nothing is written. `settings`: the configuration's values, for the trackers. `write_report` writes
    the run's report into the run directory; the trackers get it at the end.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingConfig,
        *,
        enabled: bool = True,
        settings: Mapping[str, object] | None = None,
        write_report: Callable[[Path], Path] | None = None,
    ) -> None:
        self.enabled = enabled
        self.tell: Callable[[str], None] = lambda _: None  # gets the text of each error of a tracker or of the file
        self._lock = threading.Lock()  # a lock, because several threads call `write`
        if not enabled:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._report = None if write_report is None else partial(write_report, run_dir)
        self._lines = AppendedLines(run_dir / "metrics.jsonl", tell=lambda text: self.tell(text))
        self._trackers = Trackers(logging, run_dir, tell=lambda text: self.tell(text))
        if settings is not None:
            self._trackers.begin(settings)

    def write(self, event: str, fields: Mapping[str, object] | DataclassInstance, *, step: int | None = None) -> None:
        """Append one event with the `fields` of a mapping or a dataclass. NaN becomes null. With `step`, the numbers of
        the fields go to the trackers too, named `event/field`. Raises OutputError."""
        if not self.enabled:
            return
        values = fields if isinstance(fields, Mapping) else dataclasses.asdict(fields)
        line: dict[str, object] = {"event": event, "time": round(time.time(), 3)}
        if step is not None:
            line["global_step"] = step
        # `line` comes last, so a field in `values` cannot replace the event's kind or time.
        text = json.dumps(masked_in(_finite({**values, **line})), default=lambda one: masked(str(one)))
        with self._lock:
            self._lines.append(text)
        if step is not None:
            self._trackers.scalars({f"{event}/{name}": value for name, value in _numbers(values)}, step)

    def pictures(self, draw: Pictures, *, step: int) -> None:
        """Give the trackers the pictures of an evaluation, which `draw` returns. One of the trackers' threads calls
        `draw` later."""
        if self.enabled:
            self._trackers.pictures(draw, step)

    def close(self) -> None:
        """Wait a few seconds until the trackers have got everything, and close the file. The last
        event, `trackers`, counts the log calls that did not reach a tracker."""
        if not self.enabled:
            return
        lost = self._trackers.close(report=self._report)
        if lost:
            # The run is ending, and an error of a full disk must not hide the reason.
            with contextlib.suppress(OutputError):
                self.write("trackers", {name: dataclasses.asdict(count) for name, count in lost.items()})
        self._lines.close()


def _numbers(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each finite number in a nested mapping: {"a": {"b": 1}} gives ("a/b", 1.0)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def _finite(value: object) -> object:
    """Return `value` with None in place of each NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    # JSON has neither NaN nor infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class PhaseClock:
    """Measures the wall seconds of a step's phases (`rollout`, `learn`, `sync`, ...). Phases do not nest. Time outside
    all phases counts as `other`.

    `on_phase(name, begin, end)` is called when a phase ends; `begin` and `end` are Unix seconds.
    """

    def __init__(self, on_phase: Callable[[str, float, float], None] | None = None) -> None:
        self._on_phase = on_phase
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # Unix time jumps when the clock is set, so seconds are measured by another clock.
        began_at, started = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._on_phase is not None:
                self._on_phase(name, began_at, began_at + seconds)

    def read(self) -> dict[str, float]:
        """Return how the seconds since the last `read` were spent: `NAME_s` for each phase, `other_s`, and their sum
        `step_s`."""
        now = time.perf_counter()
        total = now - self._started
        seconds = {f"{name}_s": value for name, value in self._seconds.items()}
        seconds["other_s"] = max(0.0, total - sum(self._seconds.values()))
        seconds["step_s"] = total
        self._started, self._seconds = now, {}
        return seconds


SAME_S = 1e-3  # spans of the same lane and name are joined if the gap between them is shorter


class Timeline:
    """Collects this rank's spans until the next `timeline` event."""

    def __init__(self, rank: int) -> None:
        self._lane = f"rank {rank}"
        self._lock = threading.Lock()
        self._spans: list[Activity] = []
        self._out: dict[str, float] = {}  # URL of a server that does not serve -> begin of its next span (Unix seconds)
        self._began_s = time.time()

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        """Add a span for a phase of learning that has ended. Times are Unix seconds."""
        self._add(Activity(self._lane, name, begin_s, end_s))

    def call(self, record: RolloutCallLog) -> None:
        """Add spans for a rollout call that has ended: one span of this rank, and one span for each call to a
        server."""
        if not record.began_at:
            return
        begin, end = record.began_at, record.began_at + record.seconds
        self._add(Activity(f"{self._lane} rollouts", "rollout", begin, end))
        for call in record.calls:
            name = "failed" if call.error else "rollout"
            begin, end = call.began_at, call.began_at + call.seconds
            self._add(Activity(call.base_url, name, begin, end))

    def server(self, base_url: str, *, serves: bool, is_member: bool) -> None:
        """Note that from now on a server `serves`, or does not serve. While a member does not serve, it has a span
        `out`."""
        now_s = time.time()
        began_s = self._out.pop(base_url, None)
        if began_s is not None:
            self._add(Activity(base_url, "out", began_s, now_s))
        if is_member and not serves:
            self._out[base_url] = now_s

    def event(self, ranks: Ranks, global_step: int) -> Mapping[str, object]:
        """Return the fields of the step's `timeline` event, with all ranks' spans since the last event. Each span is
        [lane, name, begin, end], in seconds after `origin`: the Unix time of the last event. `seconds`: time since that
        event. Collective."""
        # A span is written when it ends. So open spans are ended here and begun anew: each step then shows its part of
        # the time that a server was out.
        for base_url in tuple(self._out):
            self.server(base_url, serves=False, is_member=True)
        # The gather below waits for other ranks, so it is made without the lock.
        with self._lock:
            mine, self._spans = self._spans, []
        begin, self._began_s = self._began_s, time.time()
        spans = [span for part in ranks.all_gather_object(mine) for span in part]
        return {
            "global_step": global_step,
            "origin": round(begin, 4),
            "seconds": round(self._began_s - begin, 4),
            "spans": [[s.lane, s.name, round(s.begin_s - begin, 4), round(s.end_s - begin, 4)] for s in spans],
        }

    def _add(self, span: Activity) -> None:
        with self._lock:
            last = self._spans[-1] if self._spans else None
            same = last is not None and (last.lane, last.name) == (span.lane, span.name)
            if last is not None and same and 0.0 <= span.begin_s - last.end_s < SAME_S:
                self._spans[-1] = replace(last, end_s=span.end_s)
            else:
                self._spans.append(span)


LATEST = "latest"
_LOGGERS = ("learner", "shared", "transformers", "huggingface_hub", "peft", "torch", "vllm", "py.warnings")

log = logging.getLogger(__name__)


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # The whole formatted text is masked, because the traceback in it may hold a secret too.
        return masked(super().format(record))


class _LogFile(WatchedFileHandler):
    """A log file whose failed writes are ignored. If the file is removed, a new one is made as soon as its folder
    exists."""

    def _open(self) -> TextIOWrapper:
        # In a shared folder the name may be somebody's link to another file.
        file = BufferedWriter(FileIO(self.baseFilename, self.mode, opener=unlinked))
        return TextIOWrapper(file, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        # Errors of a full disk are ignored here: writing the run's other files reports them.
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the standard library's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to_file(run_dir: Path, rank: int) -> Path:
    """Write the logs and warnings of this process to a file instead of the console from now on. Return the file's path.
    Raises OutputError if the file cannot be opened."""
    path = run_dir / f"learner_rank{rank}.log"
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path)
    handler.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for other in list(logger.handlers):  # libraries add handlers that write to the console
            logger.removeHandler(other)
        logger.addHandler(handler)
        # The root logger's handlers print on the console.
        logger.propagate = False
    logging.getLogger("learner").setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("default")  # a warning is logged once for each line of code that raises it
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    return path


def point_latest(run_dir: Path) -> None:
    """Make `latest`, in the folder of `run_dir`, a link to `run_dir`. An old link is replaced.

    If `latest` is a file or folder, it is not replaced.
    """
    link = run_dir.absolute().parent / LATEST
    if run_dir.name == LATEST or (link.exists() and not link.is_symlink()):
        log.warning("%s is not a link, so it will not point to the newest run", link)
        return
    work = link.with_name(f".{LATEST}.{os.getpid()}")
    work.unlink(missing_ok=True)
    work.symlink_to(run_dir.absolute().name)
    # The old link is replaced in one step, so that there is a link at every moment.
    work.replace(link)
