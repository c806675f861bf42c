"""Watch what happens around a run: how busy each GPU is, and what memory processes hold.

In: process ids, GPUs. Out: objects that are complete after their `with` block. A program's numbers include all its
descendants.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

_MEMORY_EVERY_S = 0.25
_SMI_ENDS_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """The use of one GPU, over its samples."""

    busy_mean: float  # share of the time in which a kernel ran, by NVML
    busy_median: float
    memory_mib: float  # the most that was in use


@contextmanager
def peak_memory(programs: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the most bytes that each program (name -> process id) held at once, sampled four times a second."""
    peaks = dict.fromkeys(programs, 0)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for name, pid in programs.items():
                peaks[name] = max(peaks[name], resident_bytes(pid))
            ended.wait(_MEMORY_EVERY_S)

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


@contextmanager
def gpu_use(every_ms: int, devices: Sequence[str] = ()) -> Iterator[dict[int, GpuUse]]:
    """The use of each GPU by its index on the host, once the block has ended; empty without nvidia-smi. `devices`: the
    host's names, or all."""
    use: dict[int, GpuUse] = {}
    if shutil.which("nvidia-smi") is None:
        yield use
        return
    argv = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    argv += [f"--loop-ms={every_ms}", *(["-i", ",".join(devices)] if devices else [])]
    with tempfile.TemporaryFile("w+") as said:  # a pipe that nobody reads would be full after minutes
        smi = subprocess.Popen(argv, stdout=said, stderr=subprocess.DEVNULL, text=True)
        try:
            yield use
        finally:
            smi.terminate()
            smi.wait(_SMI_ENDS_S)
        said.seek(0)
        use.update(read_smi(said.read()))


def read_smi(said: str) -> dict[int, GpuUse]:
    """Read lines of `index, utilization, memory`, of all GPUs again and again; a last line may be cut off."""
    busy: dict[int, list[float]] = {}
    memory: dict[int, float] = {}
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            continue
        index = int(parts[0])
        busy.setdefault(index, []).append(int(parts[1]) / 100)
        memory[index] = max(memory.get(index, 0.0), float(parts[2]))
    return {
        index: GpuUse(busy_mean=mean(shares), busy_median=median(shares), memory_mib=memory[index])
        for index, shares in busy.items()
    }


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        lists = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile
        return [pid]
    return [pid, *(member for children in lists for child in children for member in family(int(child)))]


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, a shared page counted in proportion (PSS), as far as they
    still run."""
    return sum(map(_resident_bytes, family(pid)))


def _resident_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
