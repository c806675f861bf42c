"""Watch what happens around a run: how busy each GPU is, what processes hold and write, and new large files.

In: process ids, folders, GPUs. Out: objects that are complete after their `with` block. A
program's numbers include all its descendants. Bytes written are those given to any write call (`wchar` in
/proc/PID/io), on any file system. They would include weights that travel as files. Without a GPU they also include what
gloo writes to its sockets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

_MEMORY_EVERY_S = 0.25
_SAMPLE_EVERY_S = 0.5
_GPU_EVERY_MS = 200
_SMI_ENDS_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """The use of one GPU, over its samples."""

    busy_mean: float  # share of the time in which a kernel ran, by NVML
    busy_median: float
    memory_mib: float  # the most that was in use


@dataclass(kw_only=True, slots=True)
class Watched:
    gpus: dict[int, GpuUse] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)  # bytes by program
    new_files: dict[str, int] = field(default_factory=dict)  # large ones that were not there before, with their size


@contextmanager
def watch(programs: Mapping[str, int], folders: Sequence[Path], large_bytes: int) -> Iterator[Watched]:
    """Watch what `programs` (name -> process id) do meanwhile, and files of at least `large_bytes` in `folders`."""
    seen = Watched()
    before = dict(_large_files(folders, large_bytes))
    at_first = dict(_written_by(programs))
    written = dict(at_first)

    def look() -> None:
        written.update(_written_by(programs))
        for path, size in _large_files(folders, large_bytes):
            if before.get(path) != size:
                seen.new_files[path] = size

    with gpu_use(_GPU_EVERY_MS) as seen.gpus, _again_and_again(look, _SAMPLE_EVERY_S):
        yield seen
    for name in programs:
        seen.written[name] = sum(n - at_first.get(key, 0) for key, n in written.items() if key[0] == name)


@contextmanager
def peak_memory(programs: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the most bytes that each program (name -> process id) held at once, sampled four times a second."""
    peaks = dict.fromkeys(programs, 0)

    def look() -> None:
        for name, pid in programs.items():
            peaks[name] = max(peaks[name], resident_bytes(pid))

    with _again_and_again(look, _MEMORY_EVERY_S):
        yield peaks


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


@contextmanager
def _again_and_again(look: Callable[[], None], every_s: float) -> Iterator[None]:
    ended = threading.Event()

    def loop() -> None:
        while True:
            look()
            if ended.wait(every_s):
                return

    thread = threading.Thread(target=loop, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


def _written_by(programs: Mapping[str, int]) -> Iterator[tuple[tuple[str, int], int]]:
    for name, root in programs.items():
        for pid in family(root):
            try:
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            except OSError:  # it has ended meanwhile
                continue
            yield (name, pid), next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _large_files(folders: Sequence[Path], large_bytes: int) -> Iterator[tuple[str, int]]:
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for path in (Path(parent) / name for name in names):
                try:
                    size = path.lstat().st_size
                except OSError:  # it is gone again
                    continue
                if size >= large_bytes:
                    yield str(path), size
