"""What goes on around a run while it goes on: how busy each GPU is, what processes write, which large files appear.

In: the programs' process ids, the folders to look into, and a size. Out, once it has been left: `gpus`, `written` and
`new_files`. Bytes are those given to any write call (`wchar` of /proc/PID/io), whatever the file system; weights that
travelled as files would be among them (and without a GPU those that gloo writes to its sockets are). Called by
`topologies.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import IO

_SAMPLE_EVERY_S = 0.5
_GPU_EVERY_MS = 200
_SMI_ENDS_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """Over the samples of one GPU."""

    busy_mean: float  # share of the time in which some kernel ran, as NVML tells
    busy_median: float
    memory_mib: float  # the most


@dataclass
class Watch:
    """Use as a context. `large_bytes`: files of at least this size are told of."""

    programs: Mapping[str, int]  # name -> process id
    folders: Sequence[Path]
    large_bytes: int
    gpus: dict[int, GpuUse] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)  # by program, with all its descendants
    new_files: dict[str, int] = field(default_factory=dict)  # large ones that were not there before

    def __enter__(self) -> Watch:
        self._before = dict(self._large_files())
        self._at_first = dict(self._wchar_of_all())
        self._wchar = dict(self._at_first)
        self._ended = threading.Event()
        self._said = tempfile.TemporaryFile("w+")  # a pipe that nobody reads meanwhile would be full after minutes
        self._smi = _start_smi(self._said)
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        for name in self.programs:
            self.written[name] = sum(n - self._at_first.get(key, 0) for key, n in self._wchar.items() if key[0] == name)
        if self._smi is not None:
            self._smi.terminate()
            self._smi.wait(_SMI_ENDS_S)
            self._said.seek(0)
            self.gpus = read_smi(self._said.read())
        self._said.close()

    def _watch(self) -> None:
        while True:
            self._wchar |= self._wchar_of_all()
            for path, size in self._large_files():
                if self._before.get(path) != size:
                    self.new_files[path] = size
            if self._ended.wait(_SAMPLE_EVERY_S):
                return

    def _wchar_of_all(self) -> Iterator[tuple[tuple[str, int], int]]:
        for name, root in self.programs.items():
            for pid in family(root):
                if (wchar := bytes_written(pid)) is not None:
                    yield (name, pid), wchar

    def _large_files(self) -> Iterator[tuple[str, int]]:
        for folder in self.folders:
            for parent, _, names in os.walk(folder):
                for path in (Path(parent) / name for name in names):
                    try:
                        size = path.lstat().st_size
                    except OSError:  # it is gone again
                        continue
                    if size >= self.large_bytes:
                        yield str(path), size


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        lists = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile
        return [pid]
    return [pid, *(member for children in lists for child in children for member in family(int(child)))]


def bytes_written(pid: int) -> int | None:
    """Bytes that a process has given to write calls; None where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _start_smi(said: IO[str]) -> subprocess.Popen[str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=index,utilization.gpu,memory.used"
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop-ms={_GPU_EVERY_MS}"]
    return subprocess.Popen(argv, stdout=said, stderr=subprocess.DEVNULL, text=True)


def read_smi(said: str) -> dict[int, GpuUse]:
    """Lines of `index, utilization, memory`, of all GPUs again and again; a last line may be cut off."""
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
