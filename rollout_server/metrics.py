"""`/metrics/` in Prometheus' text format. Counters are moved by `app.py`; the rest is read when somebody asks.

Names begin with `rollout_`; units are in the names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollout_server.gate import Turnstile
from rollout_server.updates import WeightSync

_STATES = ("serving", "draining", "updating", "poisoned")
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1200)


class Metrics:
    def __init__(self, turnstile: Turnstile, sync: WeightSync) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "rollout_requests", "Rollouts asked for, by how they ended", ["outcome"], registry=self._registry
        )
        self.prompt_tokens = Counter("rollout_prompt_tokens", "Prompt tokens of rollouts", registry=self._registry)
        self.response_tokens = Counter("rollout_response_tokens", "Tokens generated", registry=self._registry)
        self.infer_seconds = Histogram(
            "rollout_infer_seconds",
            "Time of /infer/ calls, waiting included",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._read("rollout_calls_in_flight", "Calls that generate or score", lambda: turnstile.gate.in_flight)
        self._read("rollout_calls_waiting", "Calls that wait for an update", lambda: turnstile.waiting)
        self._read("rollout_weights_version", "The version served", lambda: turnstile.gate.ver)
        self._read("rollout_syncs_completed", "Weight syncs", lambda: sync.totals.completed)
        self._read("rollout_syncs_failed", "Weight syncs that poisoned the server", lambda: sync.totals.failed)
        self._read("rollout_sync_bytes", "Bytes received in all syncs", lambda: sync.totals.num_bytes)
        self._read("rollout_sync_seconds", "Time of all syncs", lambda: sync.totals.seconds)
        self._read("rollout_sync_last_seconds", "Time of the last sync", lambda: _last_seconds(sync))
        states = Gauge("rollout_gate_state", "1 for the state that holds", ["state"], registry=self._registry)
        for state in _STATES:
            states.labels(state).set_function(functools.partial(_is_in, turnstile, state))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _read(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        Gauge(name, documentation, registry=self._registry).set_function(value)


def _last_seconds(sync: WeightSync) -> float:
    return sync.totals.last.seconds if sync.totals.last is not None else 0.0


def _is_in(turnstile: Turnstile, state: str) -> float:
    return float(turnstile.gate.state == state)
