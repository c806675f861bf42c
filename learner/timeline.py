"""What ran when, on every rank and server: the bars of the report's timeline.

In: the learner's phases, and the rollout calls as they end. Out: one `timeline` event per optimizer step, with all
ranks' spans. A span is in the event of the step in which it ended; a call that runs ahead may have begun long before.
Times are Unix seconds of each rank's own clock. `phase` and `call` may be called from any thread. Made by `build`, read
by the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from learner.policy.parallel import Ranks
from learner.rollout.call_log import RolloutCallLog

SAME_S = 1e-3  # spans of one kind with less than this between them are drawn as one


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One bar. `lane` is where it ran: `rank 0`, `rank 0 rollouts`, or a server's URL."""

    lane: str
    name: str
    begin_s: float
    end_s: float


class Timeline:
    """The spans of rank `rank` since the last event."""

    def __init__(self, rank: int) -> None:
        self._lane = f"rank {rank}"
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._began_s = time.time()

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        """A phase of the thread that learns has ended."""
        self._add(Span(lane=self._lane, name=name, begin_s=begin_s, end_s=end_s))

    def call(self, record: RolloutCallLog) -> None:
        """A `generate` has ended: one bar of the rank, and one for each of its calls on the server's lane."""
        if not record.began_at:
            return
        begin, end = record.began_at, record.began_at + record.seconds
        self._add(Span(lane=f"{self._lane} rollouts", name="rollout", begin_s=begin, end_s=end))
        for call in record.calls:
            name = "failed" if call.error else "rollout"
            begin, end = call.began_at, call.began_at + call.seconds
            self._add(Span(lane=call.base_url, name=name, begin_s=begin, end_s=end))

    def event(self, ranks: Ranks, global_step: int) -> Mapping[str, Any]:
        """All ranks' spans since the last event; collective. `spans` are [lane, name, begin, end], in seconds after
        `origin`, where this window of `seconds` begins."""
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

    def _add(self, span: Span) -> None:
        with self._lock:
            last = self._spans[-1] if self._spans else None
            same = last is not None and (last.lane, last.name) == (span.lane, span.name)
            if last is not None and same and 0.0 <= span.begin_s - last.end_s < SAME_S:
                self._spans[-1] = replace(last, end_s=span.end_s)
            else:
                self._spans.append(span)
