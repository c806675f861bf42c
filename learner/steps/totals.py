"""The sums of one optimizer step: over its rows, then over ranks, then as a `StepResult`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from learner.data.batches import Shortfall
from learner.policy.loss import RowLoss
from learner.policy.parallel import Ranks
from learner.policy.policy_gradient import policy_metrics
from learner.records import Channel, LearnedRow, PackedRow, StepResult
from learner.tasks.rewards import TOTAL, mean_rewards

# Counts that are fields of `StepResult`, or used to compute them. All other counts are metrics under their names.
_COUNTS = ("loss", "weight", "supervised", "segments", "rows", "tokens")


@dataclass
class StepTotals:
    """The sums over the rows that one optimizer step has learned so far. `counts` are by name, and include the sums of
    the segments' statistics (matched, missed, `drop/...`). A row counts as `underfilled` if less than the fraction
    `min_fill` of it is filled. `min_fill` None: each row holds one segment, and no row is counted as `underfilled`."""

    min_fill: float | None = None
    counts: dict[str, float] = field(default_factory=dict)
    rows: list[LearnedRow] = field(default_factory=list)

    def add(self, row: PackedRow, loss: RowLoss) -> None:
        """Count one row that was learned: its contents, and its summed weighted loss."""
        counted = {
            "loss": loss.loss_sum,
            "weight": loss.weight_sum,
            "supervised": loss.num_supervised,
            "segments": len(row.segments),
            "rows": 1 if row.segments else 0,
            "tokens": row.num_tokens,
        }
        if self.min_fill is not None:
            counted["underfilled"] = 1 if row.segments and row.fill < self.min_fill else 0
        if row.segments and loss.weight_sum:
            ids = tuple(segment.sample_id for segment in row.segments)
            self.rows.append(LearnedRow(loss.loss_sum / loss.weight_sum, ids))
        for counts in (counted, loss.counts, *(segment.stats for segment in row.segments)):
            self._merge(counts)

    @property
    def weight(self) -> float:
        """The sum of all loss weights, by which the step's gradient is divided."""
        return self.counts.get("weight", 0.0)

    def share_of(self, shortfall: Shortfall | None) -> float:
        """Return the factor of the step's update. An epoch's last step may have fewer samples. The factor of a short
        step is smaller in proportion, so that each sample counts as much as in other steps. The factor of other steps
        is 1."""
        if shortfall is None:
            return 1.0
        return min(1.0, self.counts.get("segments", 0.0) / shortfall.whole)

    def reduced(self, ranks: Ranks) -> StepTotals:
        """Return the sums over all ranks."""
        if ranks.world_size == 1:
            return self
        total = StepTotals()
        # Sums are exchanged by name, because ranks may have different statistics.
        for counts, rows in ranks.all_gather_object((self.counts, self.rows)):
            total._merge(counts)
            total.rows += rows
        return total

    def _merge(self, counts: Mapping[str, float]) -> None:
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value

    def result(
        self,
        *,
        global_step: int,
        channel: Channel,
        grad_norm: float,
        learning_rate: float,
        ver: int,
        seconds: Mapping[str, float],
        capacity: int,
        extra: Mapping[str, float] | None = None,
    ) -> StepResult:
        """Return the step's record. `extra`: metrics in addition to the metrics that follow from the counts."""
        counts = dict.fromkeys(_COUNTS, 0.0) | self.counts
        metrics = {**seconds, **(extra or {})}
        metrics["tokens_per_s"] = counts["tokens"] / seconds["step_s"]
        metrics["packing_fill"] = counts["tokens"] / (max(1, counts["rows"]) * capacity)
        metrics.update({name: float(value) for name, value in counts.items() if name not in _COUNTS})
        metrics.pop(TOTAL, None)
        metrics.update(mean_rewards(counts))
        metrics.update(policy_metrics(counts))
        if "matched" in counts:
            metrics["match_rate"] = counts["matched"] / max(1.0, counts["matched"] + counts["missed"])
        return StepResult(
            global_step=global_step,
            channel=channel,
            loss=counts["loss"] / counts["weight"] if counts["weight"] else 0.0,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_segments=int(counts["segments"]),
            num_rows=int(counts["rows"]),
            num_tokens=int(counts["tokens"]),
            num_supervised=int(counts["supervised"]),
            ver=ver,
            metrics=metrics,
        )
