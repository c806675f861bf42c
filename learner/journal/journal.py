"""Writes the events of a run to all logs that users read.

The logs are `metrics.jsonl` and the trackers (`log`), the timeline of the report (`timeline`), the terminal
(`console`), and on rank 0 the files of the newest answers (`answers`) and of the groups of `grpo` (`groups`), if the
run writes them. `clock` measures the seconds of a step's phases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

from learner.journal.answers import AnswersLog
from learner.journal.console import Console
from learner.journal.groups_log import GroupsLog
from learner.journal.log import MetricsLog, PhaseClock, Timeline
from learner.journal.no_progress import ProgressWatch
from learner.journal.retained import changes
from learner.journal.spikes import SpikeWatch, spiking_samples
from learner.journal.trackers import Pictures
from learner.policy.parallel import Ranks
from learner.records import LearnedRow, Sample, ServerChange, StepResult, SyncReceipt
from shared.errors import OutputError

Ending = Literal["finished", "stopped", "failed"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The logs of one rank. Most logs write on rank 0 only; on other ranks their methods do nothing."""

    ranks: Ranks
    log: MetricsLog
    timeline: Timeline
    clock: PhaseClock
    console: Console
    answers: AnswersLog | None = None
    groups: GroupsLog | None = None
    progress: ProgressWatch = field(default_factory=ProgressWatch)
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    samples: Sequence[Sample] = ()  # training samples, whose labels are written if a step's loss leaps
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first evaluation of this process

    def note(self, text: str) -> None:
        """Print one line on the terminal."""
        self.console.note(text)

    def begin(self, *, step: int, total_steps: int) -> None:
        """Write that training begins, or is resumed, after `step`."""
        self.console.begin(step)
        self.log.write("begin", {"global_step": step, "total_steps": total_steps})

    def end(self, how: Ending, because: str, *, step: int) -> None:
        """Write how the run ended. If the write fails, no error is raised."""
        # An error here would hide the error that ended the run.
        with suppress(OutputError):
            self.log.write("end", {"global_step": step, "how": how, "because": because})

    def step(self, result: StepResult, receipt: SyncReceipt | None, rows: Sequence[LearnedRow] = ()) -> None:
        """Write the result of an optimizer step. `receipt`: of the sync before the step. `rows`: the packed rows that
        all ranks have learned in the step. Collective."""
        self.log.write("step", result, step=result.global_step)
        self.log.write("timeline", self.timeline.event(self.ranks, result.global_step))
        self.console.step(result, receipt)
        self.warn(result)
        self.spike(result, rows)
        if self.answers is not None:
            self.answers.write(result.global_step)
        if self.groups is not None:
            self.groups.write(result.global_step)

    def warn(self, result: StepResult) -> None:
        """Write the warnings that follow from this step (`no_progress.py`) to `metrics.jsonl`, the terminal and the log
        file."""
        for warning in self.progress.after(result):
            self.log.write("warning", {"global_step": result.global_step, **asdict(warning)})
            self.console.note(str(warning))
            if self.ranks.is_main:
                log.warning("step %d: %s", result.global_step, warning)

    def spike(self, result: StepResult, rows: Sequence[LearnedRow]) -> None:
        """If the loss or the gradient norm has leapt in this step, write the samples that were learned in it to
        `metrics.jsonl`."""
        for spike in self.spikes.after(result):
            samples = spiking_samples(rows, self.samples)
            self.log.write("spike", {"global_step": result.global_step, **asdict(spike), "samples": samples})

    def sync(self, receipt: SyncReceipt, *, step: int) -> None:
        """Write the receipt of a completed weight sync, before which `step` steps were done."""
        self.log.write("sync", receipt, step=step)
        self.console.sync(receipt)

    def server(self, change: ServerChange, *, step: int) -> None:
        """Write that a rollout server was added, lost, refused or removed, or has joined."""
        self.log.write("server", change, step=step)
        self.timeline.server(change.base_url, serves=change.what == "joined", is_member=change.what != "removed")
        self.console.server(change)

    def labels(self, completion: Mapping[str, object], text: str, *, step: int) -> None:
        """Write how the samples' labels were completed (`labels.complete`). `text` is printed on the terminal."""
        self.log.write("labels", completion, step=step)
        self.note(text)

    def evaluation(self, metrics: Mapping[str, float], *, step: int, reason: tuple[str, str] | None = None) -> None:
        """Write the metrics of an evaluation, and the seconds since the last step. `reason`: (why the score is near 0,
        remedy); None: the score is not near 0, or the reason is not known."""
        self.log.write("eval", {"metrics": metrics, **self.clock.read()}, step=step)
        self.console.evaluation(step, metrics, name="eval")
        self._explain("the score is near 0", reason, step)
        if not self.first:
            self.first.update(metrics)
        elif found := changes(self.first, metrics):
            self.note(f"since the first evaluation, {found[0].metric}: {', '.join(map(str, found))}")

    def test(self, metrics: Mapping[str, float], *, step: int, reason: tuple[str, str] | None = None) -> None:
        """Write the metrics of the test samples, and the seconds that testing took. `reason` is as in `evaluation`."""
        self.log.write("test", {"metrics": metrics, **self.clock.read()}, step=step)
        self.console.evaluation(step, metrics, name="test")
        self._explain("the score of the test samples is near 0", reason, step)

    def _explain(self, what: str, reason: tuple[str, str] | None, step: int) -> None:
        """Write the reason for a score near 0, if there is one, to the terminal, and as a warning to `metrics.jsonl`,
        for the live page and the report."""
        if reason is None:
            return
        why, remedy = reason
        self.log.write("warning", {"global_step": step, "what": f"{what}: {why}", "steps": 0, "remedy": remedy})
        self.console.note(f"warning: {what}: {why}; {remedy}")

    def pictures(self, pictures: Pictures, *, step: int) -> None:
        """Give the pictures of an evaluation to the trackers."""
        self.log.pictures(pictures, step=step)

    def early_stop(self, metric: str | None, *, best_step: int | None, step: int) -> None:
        """Write that the run ends after `step`, because `metric` has not improved since `best_step`."""
        self.log.write("early_stop", {"global_step": step, "best_step": best_step})
        self.note(f"early stop at step {step}: {metric} was best at step {best_step}")

    def leftovers(self, sample_ids: Sequence[str]) -> None:
        """Write the ids of the samples that have rollouts, but were not learned before the run ended."""
        self.log.write("note", {"carried_and_not_learned": sample_ids})
        self.note(f"{len(sample_ids)} samples were still in the packing buffer when training ended (not learned)")
