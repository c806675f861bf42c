"""Measure what the processes of a long run hold, and whether it grows.

In: the programs that live now (name -> process id, asked at every sample, because killed ones are started again) and
folders. Out: a line of JSON per sample in `out`, written at once, and figures from all lines.

A process is named after its program and the kernel's name of it. It has resident memory, open descriptors and threads.
Each value is judged over the life of one process. What is started again begins anew, so only processes that lived for
at least half of the time are judged. After the first fifth of a life it must not grow by more than 5%: the median of
the last fifth against that of the second one. Connections come and go, so single samples say little. The same holds
for the number of files in each folder. A process that outlives its program counts as left.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.watch import family

MAX_GROWTH = 0.05
JUDGED_FROM = 0.5  # share of the time: a shorter life is not judged
_LEFT_AFTER_S = 15.0  # a killed server's children may need a while
_MIN_SAMPLES = 10  # two in a fifth
Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The resources that one process holds at one time."""

    name: str
    began: int  # clock ticks after the machine's start: two processes of one number differ in it
    resident_mib: float
    descriptors: int
    threads: int


VALUES = ("resident_mib", "descriptors", "threads")


def held(pid: int) -> Held | None:
    """Return what a process holds; None if it has ended."""
    try:
        proc = Path(f"/proc/{pid}")
        stat = (proc / "stat").read_text()
        # has the fields from the third one on; the name before may hold anything
        fields = stat.rpartition(")")[2].split()
        resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors = len(list((proc / "fd").iterdir()))
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    name = stat.partition("(")[2].rpartition(")")[0]
    mib = round(resident / 2**20, 2)
    return Held(name=name, began=int(fields[19]), resident_mib=mib, descriptors=descriptors, threads=int(fields[17]))


def num_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


@contextmanager
def sampling(
    programs: Callable[[], Mapping[str, int]], folders: Mapping[str, Path], every_s: float, out: Path
) -> Iterator[None]:
    """Write a sample to `out` every `every_s` seconds during the block."""
    ended = threading.Event()
    began_s = time.monotonic()
    lines = out.open("w", buffering=1, encoding="utf-8")

    def loop() -> None:
        seen: dict[tuple[int, int], float] = {}  # processes, and when their program was last there
        while not ended.wait(every_s):
            sample = _look(programs(), folders, seen)
            lines.write(json.dumps({"at_s": round(time.monotonic() - began_s, 1), **sample}) + "\n")

    thread = threading.Thread(target=loop, name="sampling", daemon=True)
    with lines:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(60.0)


def _look(
    programs: Mapping[str, int], folders: Mapping[str, Path], seen: dict[tuple[int, int], float]
) -> dict[str, Any]:
    now, processes = time.monotonic(), {}
    for program, root in programs.items():
        for pid in family(root):
            if (found := held(pid)) is not None:
                processes[str(pid)] = {**asdict(found), "name": f"{program}: {found.name}"}
                seen[pid, found.began] = now
    left = []
    for (pid, began), last_s in list(seen.items()):
        found = held(pid)
        if found is None or found.began != began:
            del seen[pid, began]
        elif now - last_s > _LEFT_AFTER_S:
            left.append(f"{pid} {found.name}")
    files = {name: num_files(path) for name, path in folders.items()}
    return {"processes": processes, "files": files, "left": left}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def figures_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what every judged process and folder held, with its growth; how many lives each program had."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        for pid, found in sample["processes"].items():
            lives.setdefault((pid, found["began"]), []).append({"at_s": sample["at_s"], **found})
    whole_s = samples[-1]["at_s"] - samples[0]["at_s"] if samples else 0.0
    judged = []
    for (pid, _), life in lives.items():
        lived_s = life[-1]["at_s"] - life[0]["at_s"]
        if lived_s >= JUDGED_FROM * whole_s and len(life) >= _MIN_SAMPLES:
            values = {value: _summary([look[value] for look in life]) for value in VALUES}
            judged.append({"name": life[-1]["name"], "pid": int(pid), "lived_s": round(lived_s, 1), **values})
    names = [life[0]["name"].partition(":")[0] for life in lives.values()]
    folders = samples[-1]["files"] if samples else {}
    return {
        "seconds": round(whole_s, 1),
        "samples": len(samples),
        "processes_seen": {name: names.count(name) for name in sorted(set(names))},
        "processes": sorted(judged, key=lambda row: (row["name"], row["pid"])),
        "files": {name: _summary([sample["files"][name] for sample in samples]) for name in folders},
        "left": sorted({one for sample in samples for one in sample["left"]}),
    }


def grown(figures: Mapping[str, Any]) -> list[str]:
    """Return what is not flat, in words."""
    found = [f"process {one} outlived its program" for one in figures["left"]]
    if not figures["processes"]:
        found.append("no process lived long enough to be judged")
    for row in figures["processes"]:
        for value in VALUES:
            found += _said(f"{value} of {row['name']} ({row['pid']})", row[value])
    for name, summary in figures["files"].items():
        found += _said(f"files in {name}", summary)
    return found


def _summary(values: Sequence[float]) -> dict[str, Any]:
    """Return medians of the second fifth and the last one, their relation, the most, and 30 values for a curve."""
    fifth = max(1, len(values) // 5)
    before, after = statistics.median(values[fifth : 2 * fifth] or values), statistics.median(values[-fifth:])
    growth = after / before - 1.0 if before else (1.0 if after else 0.0)
    curve = values[:: max(1, len(values) // 30)]
    return {"before": before, "after": after, "growth": round(growth, 4), "most": max(values), "curve": list(curve)}


def _said(what: str, summary: Mapping[str, Any]) -> list[str]:
    if summary["growth"] <= MAX_GROWTH:
        return []
    return [f"{what} grew by {summary['growth']:.1%}, from {summary['before']:g} to {summary['after']:g}"]
