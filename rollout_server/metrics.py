"""`/metrics/` in Prometheus' text format. The service counts requests and tokens. All other values are read again for
each call of `/metrics/`.

Names begin with `rollout_`, and units are in the names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollout_server.gate import WaitingGate
from rollout_server.updates import SyncTotals

_STATES = ("serving", "draining", "updating", "poisoned")
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1200)


class Metrics:
    def __init__(self, waiting_gate: WaitingGate, totals: SyncTotals) -> None:
        gate = waiting_gate.gate
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "rollout_requests", "Requested rollouts, by outcome", ["outcome"], registry=self._registry
        )
        self.openai_calls = Counter("rollout_openai_calls", "Calls to /v1/", ["outcome"], registry=self._registry)
        self.prompt_tokens = Counter("rollout_prompt_tokens", "Prompt tokens of rollouts", registry=self._registry)
        self.response_tokens = Counter("rollout_response_tokens", "Tokens generated", registry=self._registry)
        self.infer_seconds = Histogram(
            "rollout_infer_seconds",
            "Time of /infer/ calls, with waiting",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._read("rollout_calls_in_flight", "Calls being generated or scored", lambda: gate.in_flight)
        self._read("rollout_calls_waiting", "Calls waiting for an update", lambda: waiting_gate.waiting)
        self._read("rollout_weights_version", "The version served", lambda: gate.ver)
        self._read("rollout_syncs_completed", "Weight syncs", lambda: totals.completed)
        self._read("rollout_syncs_failed", "Weight syncs that poisoned the server", lambda: totals.failed)
        self._read("rollout_sync_bytes", "Bytes received in all syncs", lambda: totals.num_bytes)
        self._read("rollout_sync_seconds", "Time of all syncs", lambda: totals.seconds)
        self._read(
            "rollout_group_strangers",
            "Connections to the group's port without its secret, dropped",
            lambda: totals.num_strangers,
        )
        self._read("rollout_sync_last_seconds", "Time of the last sync", lambda: totals.last_seconds)
        self._read(
            "rollout_sync_pause_seconds",
            "Time in which syncs let no call in though none was in flight",
            lambda: totals.pause_seconds,
        )
        self._read("rollout_sync_last_pause_seconds", "The same of the last sync", lambda: totals.last_pause_seconds)
        self._read(
            "rollout_sync_last_load_seconds",
            "Of the pause of the last sync, until all weights were loaded",
            lambda: totals.last_load_seconds,
        )
        self._read(
            "rollout_sync_last_canary_seconds",
            "Of the pause of the last sync, from then until the canary's scores were there",
            lambda: totals.last_canary_seconds,
        )
        states = Gauge("rollout_gate_state", "1 for the present state", ["state"], registry=self._registry)
        for state in _STATES:
            states.labels(state).set_function(functools.partial(lambda name: float(gate.state == name), state))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _read(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        Gauge(name, documentation, registry=self._registry).set_function(value)
