"""Prints the progress of a run: a bar with the time left, and one line per optimizer step.

Only rank 0 prints. The lines appear above the bar. Without a terminal there is no bar. Everything printed here is in
`metrics.jsonl` too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from learner.config.schedule import B_STEP_SKIPPED
from learner.config.sections.training import ESTIMATED
from learner.journal.run_end import ends_by_time
from learner.records import ServerChange, StepResult, SyncReceipt
from shared.masking import masked


class Console:
    """Prints the progress and the lines of one run. Progress is counted in steps, or in minutes if `max_minutes` will
    end the run. `plain`: the run learns no rollouts."""

    def __init__(
        self,
        *,
        total_steps: int,
        name: str,
        enabled: bool,
        max_minutes: float | None = None,
        plain: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled, self._plain = enabled, plain
        self._max_minutes, self._clock = max_minutes, clock
        self._begun_step, self._begun_s = 0, clock()
        self._rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._name, self._total_steps = name, total_steps
        if enabled and self._rich.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[far]}"),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=self._rich,
            )
            self._bar = self._progress.add_task(name, total=total_steps, far="")
            self._progress.start()

    def begin(self, step: int) -> None:
        """Note that training begins now, or is resumed, after `step`. Time is measured from now on."""
        self._begun_step, self._begun_s = step, self._clock()

    def note(self, text: str) -> None:
        """Print a line with `text`, after the run's name."""
        if self._enabled:
            self._rich.print(f"[dim]{escape(self._name)}[/] {escape(masked(text))}")

    def step(self, result: StepResult, sync: SyncReceipt | None) -> None:
        if not self._enabled:
            return
        far, done, total = self._far(result.global_step)
        self._rich.print(step_line(result, sync, far, plain=self._plain))
        if self._progress is not None:
            self._progress.update(self._bar, completed=done, total=total, far=far.strip())

    def _far(self, step: int) -> tuple[str, float, float]:
        """Return the run's progress: as text, what is done, and the total. The numbers are steps, or minutes if
        `max_minutes` will end the run."""
        seconds, steps = self._clock() - self._begun_s, self._total_steps
        done, limit = step - self._begun_step, self._max_minutes
        if limit is not None and ends_by_time(
            done=done, total_steps=steps - self._begun_step, seconds=seconds, minutes=limit
        ):
            return f"{step}, {seconds / 60:.1f}/{limit:.1f} min", seconds / 60, limit
        return f"{step:>{len(str(steps))}}/{steps}", step, steps

    def sync(self, receipt: SyncReceipt) -> None:
        """Print a note if this sync replaced adapter syncs by full syncs, because an adapter sync failed. Other syncs
        are shown in the line of their step."""
        if receipt.fallback:
            self.note(f"full weight syncs from here on, as adapter sync failed: {receipt.fallback}")

    def server(self, change: ServerChange) -> None:
        """Print what has changed about a rollout server: it was lost, added, removed or refused, or has joined."""
        because = f": {change.because}" if change.because else ""
        self.note(f"rollout server {change.base_url} {change.what} ({change.serving} serve){because}")

    def evaluation(self, global_step: int, metrics: Mapping[str, float], *, name: str) -> None:
        usual = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "parse_rate", "duplicate_rate", "reward")
        shown = [name for name in usual if name in metrics] if "f1@0.5" in metrics else list(metrics)[:6]
        texts = [f"{name} {metrics[name]:.3f}" for name in shown]
        # If labels have gaps, runs are compared by this score, so the estimate comes first in the line.
        if ESTIMATED in metrics:
            low, high = (metrics[ESTIMATED.replace("@", f"_{end}@")] for end in ("low", "high"))
            texts.insert(0, f"{ESTIMATED} {metrics[ESTIMATED]:.3f} ({low:.3f} to {high:.3f})")
        self.note(f"{name} at step {global_step}: " + "  ".join(texts))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def step_line(result: StepResult, sync: SyncReceipt | None, far: str, *, plain: bool = False) -> str:
    """Return the line that is printed for a step: progress, channel, loss, results of the rollouts, seconds of each
    phase, and the sync before the step. `far`: the progress as text. `plain`: without channel and sync, for a run that
    learns no rollouts."""
    m = result.metrics
    parts = [
        f"step {far}",
        *([f"{result.channel} (no packs for B)" if m.get(B_STEP_SKIPPED) else result.channel] if not plain else []),
        f"loss {result.loss:6.4f}",
        f"grad {result.grad_norm:5.2f}",
        f"lr {result.learning_rate:.1e}",
    ]
    if "match_rate" in m:
        parts.append(f"match {m['match_rate']:.2f} FN {m['missed']:.0f}")
    if "reward" in m:
        parts.append(f"reward {m['reward']:.3g}")
    if "rollout_buffer/window" in m:
        window, m_step, age = (m[f"rollout_buffer/{name}"] for name in ("window", "m_step", "rollout_age"))
        parts.append(f"window {window:.0f} m-step {m_step:.0f} age {age:.0f}")
    parts += _ahead(m)
    # Shorter phases are left out, because they would be shown as 0.00.
    seconds = " ".join(f"{name} {m[key]:.2f}" for name, key in _PHASES if m.get(key, 0.0) >= 0.005)
    parts.append(f"{seconds} s")
    parts.append(f"{m['tokens_per_s']:.0f} tok/s")
    if sync is not None and not plain:
        parts.append(f"ver {sync.ver} gap {sync.canary_gap:.4f}")
    return "  ".join(parts)


def _ahead(m: Mapping[str, float]) -> list[str]:
    """Return a list with one text about rollouts that are made ahead of learning, in packs (rollouts of a few samples):
    how many packs wait per rank, how old the learned packs were (in weight versions and in updates), and how many were
    dropped. The list is empty if no rollouts are made ahead."""
    if f"{_ASYNC}queue_depth" not in m:
        return []
    parts = [f"queue {m[f'{_ASYNC}queue_depth']:.3g}"]
    if f"{_ASYNC}age_versions" in m:
        parts.append(f"age {m[f'{_ASYNC}age_versions']:.2g} ({m[f'{_ASYNC}age_updates']:.2g} updates)")
    if dropped := sum(m[f"{_ASYNC}packs_dropped_{why}"] for why in ("stale", "oldest", "unwanted")):
        parts.append(f"dropped {dropped:.0f}")
    return [" ".join(parts)]


_ASYNC = "stage2_ab/async/"
_PHASES = (
    ("rollout", "rollout_s"),
    ("wait", "wait_s"),  # seconds in which learning waited for rollouts that are made ahead
    ("learn", "learn_s"),
    ("sync", "sync_s"),
    ("data", "data_s"),
)
