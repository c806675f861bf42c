"""What a pipeline tells about itself: totals for the step's metrics, and when its calls ran for the timeline."""

from __future__ import annotations

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
