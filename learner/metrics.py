"""What a run measured, on disk: one JSON object per line in `metrics.jsonl`, and scalars in TensorBoard.

In: events (`step`, `timeline`, `eval`, `sync`, `rollout_call`, `note`) with numbers and strings. Out: files in the run
directory. Only rank 0 writes. A line is flushed as soon as it is written, so a killed run keeps what it had measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from learner.config.schema import LoggingConfig


class MetricsLog:
    """Append-only event log of a run: per line `event`, `time` (seconds since the epoch) and the event's own fields."""

    def __init__(self, run_dir: Path, logging: LoggingConfig, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()  # rollout calls are told by the thread that made them
        if not enabled:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._boards: list[Any] = []
        if logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._boards.append(SummaryWriter(str(run_dir / "tensorboard")))

    def write(self, event: str, fields: Mapping[str, Any] | Any, *, step: int | None = None) -> None:
        """Append one event. `fields` is a mapping or a dataclass; NaN becomes null. With `step`, its numbers are also
        scalars `event/name` of TensorBoard."""
        if not self.enabled:
            return
        values = dataclasses.asdict(fields) if dataclasses.is_dataclass(fields) else dict(fields)  # type: ignore[arg-type]
        line: dict[str, Any] = {"event": event, "time": round(time.time(), 3)}
        if step is not None:
            line["global_step"] = step
        text = json.dumps(_finite({**values, **line}), default=str) + "\n"
        with self._lock:
            self._file.write(text)
            self._file.flush()
        if step is not None:
            for name, value in _scalars(values):
                for board in self._boards:
                    board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        if self.enabled:
            self._file.close()
            for board in self._boards:
                board.close()


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class PhaseClock:
    """Wall seconds by phase (`rollout`, `learn`, `sync`, ...). Phases do not nest: what is not in one is `other`.

    `on_phase(name, begin, end)` hears of each phase as it ends, in Unix seconds.
    """

    def __init__(self, on_phase: Callable[[str, float, float], None] | None = None) -> None:
        self._on_phase = on_phase
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_at, started = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._on_phase is not None:
                self._on_phase(name, began_at, began_at + seconds)

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last read as `name_s`, with `other_s` and `step_s`; starts over."""
        now = time.perf_counter()
        total = now - self._started
        seconds = {f"{name}_s": value for name, value in self._seconds.items()}
        seconds["other_s"] = max(0.0, total - sum(self._seconds.values()))
        seconds["step_s"] = total
        self._started, self._seconds = now, {}
        return seconds
