"""What one `generate` call did, for the step's metrics and the log (R15, R30). Written by `server.py`, read by the
trainer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """One `/infer/` call as it ended; `error` is empty where it was answered."""

    base_url: str
    seed: int  # of its first request
    first_req_idx: int  # over all ranks
    num_requests: int
    seconds: float
    error: str = ""


@dataclass(kw_only=True, slots=True)
class RolloutCallLog:
    """What one `generate` did, for the step's metrics (R15, R30). `splits` are (first_req_idx, requests) sent again."""

    global_step: int
    micro_step_idx: int
    first_req_idx: int
    num_requests: int
    chunk: int  # requests that this rank may have in flight
    ver: int | None = None
    seconds: float = 0.0
    calls: list[CallRecord] = field(default_factory=list)
    splits: list[tuple[int, int]] = field(default_factory=list)
