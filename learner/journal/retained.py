"""Compares what a run has gained on its own data with what it has lost on other data (`data.retain`, R44).

In: the metrics of two evaluations. Metrics on the other ("retained") annotations are named `retain/NAME/METRIC`. Out:
one `RetainedChange` for the run's own data, and one for each NAME, with the change of the main metric. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

RETAIN = "retain/"
OWN = "own data"
_MAIN = ("f1@0.5", "f1")


class RetainedChange(NamedTuple):
    """The change of a metric between two evaluations. `data`: the name of the annotations that were evaluated on: a key
    of `data.retain`, or `OWN` for the run's own data."""

    data: str
    metric: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.data} {self.before:.3f} -> {self.after:.3f} ({self.after - self.before:+.3f})"


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[RetainedChange]:
    """Return the change of the main metric on each kind of data, the run's own first; [] without `data.retain`."""
    names = dict.fromkeys(key.split("/")[1] for key in after if key.startswith(RETAIN))
    found = []
    for data, prefix in [(OWN, ""), *((name, f"{RETAIN}{name}/") for name in names)] if names else []:
        own = {key.removeprefix(prefix): key for key in after if key.startswith(prefix) and key in before}
        metric = next((name for name in _MAIN if name in own), next(iter(own), None))
        if metric is not None:
            found.append(RetainedChange(data, metric, before[own[metric]], after[own[metric]]))
    return found
