"""What a pipeline tells about itself: totals for the step's metrics, and when its calls ran for the timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from learner.pipeline.protocol import Call, Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSpan:
    """One generation call, from its permission to its rows. Seconds of the pipeline's clock (monotonic)."""

    call: Call
    started_s: float
    ended_s: float
    num_rows: int  # 0: it failed


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStats:
    """One rank's pipeline at one moment. `counts` are totals since its start."""

    ver: int
    depth: int  # packs queued, all of them fresh
    samples_in_flight: int
    counts: Counts

    def metrics(self) -> Mapping[str, float]:
        """This rank's numbers by metric name; totals add up over ranks."""
        counts = self.counts
        return {
            "stage2_ab/async/queue_depth": float(self.depth),
            "stage2_ab/async/packs_made": float(counts.packs_made),
            "stage2_ab/async/packs_learned": float(counts.packs_learned),
            "stage2_ab/async/packs_dropped_oldest": float(counts.packs_dropped_oldest),
            "stage2_ab/async/packs_dropped_stale": float(counts.packs_dropped_stale),
            "stage2_ab/async/samples_returned": float(counts.samples_returned),
            "stage2_ab/async/age_versions": counts.age_versions / max(1, counts.packs_learned),
        }
