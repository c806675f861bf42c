"""The result of a comparison of arms: metrics with intervals over scenes and seeds, as JSON and as a markdown table.

In: result files, one per run (`write_result`). Out: per arm its metrics, and its differences from continued `sft`. An
interval's draws take scenes with replacement, the same for all arms, and each arm's seeds with replacement. So it
covers what another test set and another seed would change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.figures import markdown_table
from bench.runs import read_events, steps_of
from learner.run.files import write_atomically
from learner.tasks.detection.metrics import COLUMNS, METRICS, columns_of

SHOWN = ("f1@0.5", "f1@miou", "recall@0.5", "precision@0.5", "duplicate_rate", "recall_any@0.5", "parse_rate")
COMPARED = ("f1@0.5", "f1@miou", "recall@0.5", "precision@0.5")
COMPARED_WITH = ("sft", "sft, equal time")
_DRAWS = 2000
_PHASES = ("step_s", "rollout_s", "learn_s", "sync_s", "data_s", "wait_s")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """One run: `scenes` [N, columns] in the order of `sample_ids`, for its final weights."""

    arm: str
    seed: int
    steps: int
    train_s: float
    medians: Mapping[str, float]
    sample_ids: tuple[str, ...]
    scenes: NDArray[np.float64]


def write_result(run_dir: Path, arm: str, seed: int, out: Path, *, at_start: bool = False) -> None:
    """Write what the report needs of a run. `at_start`: for the weights that it began with."""
    steps = [] if at_start else steps_of(read_events(run_dir))
    evaluations = sorted((run_dir / "eval").glob("step_*.jsonl"))
    scenes = [json.loads(line) for line in evaluations[0 if at_start else -1].read_text().splitlines()]
    result = {
        "arm": arm,
        "seed": seed,
        "steps": len(steps),
        "train_s": sum(step["step_s"] for step in steps),
        "medians": {name: median(step.get(name, 0.0) for step in steps) for name in _PHASES if steps},
        "course": [
            {name: step.get(name, 0.0) for name in ("matched", "missed", "spurious")} | {"loss": step["loss"]}
            for step in steps
        ],
        "scenes": {scene["id"]: scene["counts"] for scene in scenes},
    }
    write_atomically(out, json.dumps(result) + "\n")


def read_results(folder: Path) -> list[Result]:
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Result:
    result = json.loads(path.read_text())
    values = [[counts.get(column, 0.0) for column in COLUMNS] for counts in result["scenes"].values()]
    return Result(
        arm=result["arm"],
        seed=result["seed"],
        steps=result["steps"],
        train_s=result["train_s"],
        medians=result["medians"],
        sample_ids=tuple(result["scenes"]),
        scenes=np.array(values, dtype=np.float64),
    )


class Draws:
    """Bootstrap sums of arms whose runs have the same scenes. Deterministic in `seed`."""

    def __init__(self, num_scenes: int, *, num_draws: int = _DRAWS, seed: int = 0) -> None:
        self._seed, self._num_draws = seed, num_draws
        share = np.full(num_scenes, 1 / num_scenes)
        self._scenes = np.random.default_rng(seed).multinomial(num_scenes, share, size=num_draws)  # [D, N]

    def sums(self, arm: str, runs: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """[D, columns] of runs [N, columns], one per seed of the arm."""
        rng = np.random.default_rng([self._seed, *arm.encode()])
        seeds = rng.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size=self._num_draws)  # [D, S]
        return sum(seeds[:, i, None] * (self._scenes @ run) for i, run in enumerate(runs))  # type: ignore[return-value]


def summarize(results: Iterable[Result]) -> dict[str, Any]:
    """Return per arm its intervals, and its differences from the arms of COMPARED_WITH; as JSON values."""
    arms: dict[str, list[Result]] = {}
    for result in results:
        arms.setdefault(result.arm, []).append(result)
    if not arms:
        return {"arms": {}}
    sample_ids = next(iter(arms.values()))[0].sample_ids
    arms = {name: [r for r in runs if r.sample_ids == sample_ids] for name, runs in arms.items()}
    arms = {name: runs for name, runs in arms.items() if runs}
    draws = Draws(len(sample_ids))
    drawn = {name: draws.sums(name, [run.scenes for run in runs]) for name, runs in arms.items()}
    whole = {name: np.sum([run.scenes.sum(axis=0) for run in runs], axis=0) for name, runs in arms.items()}
    found = {}
    for name, runs in arms.items():
        found[name] = {
            "seeds": [run.seed for run in runs],
            "steps": median(run.steps for run in runs),
            "train_s": round(median(run.train_s for run in runs), 1),
            "medians": {key: round(median(run.medians[key] for run in runs), 4) for key in runs[0].medians},
            "metrics": {metric: _interval(whole[name], drawn[name], metric) for metric in SHOWN},
            "per_seed": {str(run.seed): _values(run.scenes.sum(axis=0)) for run in runs},
            "minus": {
                other: {m: _difference(whole, drawn, name, other, m) for m in COMPARED}
                for other in COMPARED_WITH
                if other in arms and other != name
            },
        }
    return {"scenes": len(sample_ids), "arms": found}


def _value(sums: NDArray[np.float64], metric: str) -> NDArray[np.float64]:
    return METRICS[metric](columns_of(sums))


def _values(sums: NDArray[np.float64]) -> dict[str, float]:
    return {metric: round(float(_value(sums, metric)), 4) for metric in SHOWN}


def _interval(whole: NDArray[np.float64], drawn: NDArray[np.float64], metric: str) -> dict[str, float]:
    return _rounded(float(_value(whole, metric)), _value(drawn, metric))


def _difference(
    whole: Mapping[str, NDArray[np.float64]], drawn: Mapping[str, NDArray[np.float64]], a: str, b: str, metric: str
) -> dict[str, float]:
    estimate = float(_value(whole[a], metric) - _value(whole[b], metric))
    return _rounded(estimate, _value(drawn[a], metric) - _value(drawn[b], metric))


def _rounded(estimate: float, values: NDArray[np.float64]) -> dict[str, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return {"value": round(estimate, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def markdown(summary: Mapping[str, Any], order: Sequence[str]) -> str:
    """Return one line per arm that has results, in `order`."""
    arms = summary["arms"]
    if not arms:
        return "no run has ended\n"
    head = ["arm", "seeds", "steps", "train s", *SHOWN, *(f"F1@0.5 minus {other}" for other in COMPARED_WITH)]
    title = f"{summary['scenes']} held-out scenes, greedy rollouts, 95% intervals over scenes and seeds"
    rows = [_cells(name, arms[name]) for name in order if name in arms]
    return "\n".join([title, "", *markdown_table(head, rows)]) + "\n"


def _cells(name: str, arm: Mapping[str, Any]) -> list[str]:
    minus = [arm["minus"].get(other) for other in COMPARED_WITH]
    return [
        name,
        str(len(arm["seeds"])),
        f"{arm['steps']:g}",
        f"{arm['train_s']:.0f}",
        *(shown(arm["metrics"][metric]) for metric in SHOWN),
        *(shown(other and other["f1@0.5"], sign="+") for other in minus),
    ]


def shown(value: Mapping[str, float] | None, *, sign: str = "") -> str:
    """Return a value with its interval; nothing where there is none."""
    if value is None:
        return ""
    return f"{value['value']:{sign}.3f} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
