"""All CUDA tests on the GPUs that are there, one is enough: `python -m tests.gpu --out FILE`.

First those run that look at the memory of the whole GPU. Then lanes of tests run beside each other, on all GPUs. Out:
FILE, with the machine, the versions, each test's outcome and seconds, and the most memory that was in use; and the
lanes' logs in `STEM-logs` beside it. Exit code 1 if a test failed, or a lane did not end in time.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from xml.etree import ElementTree

import typer

from bench.figures import circumstances
from bench.watch import gpu_use

ROOT = Path(__file__).parents[2]
# Each in a process: only one engine of a process may sleep.
ALONE = ("test_colocate_cuda.py",)
# Each takes one to three minutes, most of it in starting servers and ranks; the last lane has all other files.
LANES = (
    ("test_sync_cuda.py",),
    ("test_servers_cuda.py",),
    ("test_parallel_cuda.py",),
    ("test_nccl.py",),
    ("test_fsdp_cuda.py",),
)
_GPU_EVERY_MS = 200
_INTERRUPTED_S = 30.0
_SAID = 400  # characters of why a test failed


class Case(NamedTuple):
    file: str
    name: str
    outcome: str  # passed, failed or skipped
    seconds: float
    why: str = ""


def lanes() -> list[list[list[str]]]:
    """Return files of each lane, for each part of the time."""
    found = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
    own = [list(lane) for lane in LANES]
    rest = [name for name in found if name not in ALONE and not any(name in lane for lane in own)]
    return [*([[name]] for name in ALONE), [*own, rest]]


def read_cases(report: Path, files: Sequence[str]) -> Iterator[Case]:
    """The tests of a lane. A lane that ended without a report, or without a test, has failed."""
    found = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    if not found:
        yield Case(" ".join(files), "", "failed", 0.0, "no test ran: the lane did not end in time, or did not start")
    for case in found:
        if case.get("name") is None:
            yield Case(" ".join(files), "", "failed", 0.0, "the lane was cut off in this test")
            continue
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                why = " ".join((child.get("message") or child.text or "").split())[:_SAID]
        file = case.get("classname", "").rpartition(".")[2]
        yield Case(file, case.get("name", ""), outcome, float(case.get("time", 0.0)), why)


def run(files: Sequence[Sequence[str]], logs: Path, deadline: float) -> list[Case]:
    """Run lanes beside each other, until `deadline` on the monotonic clock."""
    started = []
    for lane in files:
        report, log = logs / f"{Path(lane[0]).stem}.xml", logs / f"{Path(lane[0]).stem}.log"
        report.unlink(missing_ok=True)
        paths = [str(Path("tests/gpu") / name) for name in lane]
        argv = [sys.executable, "-m", "pytest", "-rA", "--durations=0", f"--junitxml={report}", *paths]
        with log.open("wb") as out:
            process = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        started.append((process, report, lane))
    cases: list[Case] = []
    for process, report, lane in started:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            end(process)
        cases += read_cases(report, lane)
    return cases


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupted, pytest stops the servers that it started; killed, it would leave them."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_INTERRUPTED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def summary(cases: Sequence[Case], seconds: float, memory_mib: float) -> str:
    counts = {outcome: sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped")}
    found = circumstances()
    lines = [f"{name}: {found[name]}" for name in ("date", "commit", "hardware", "versions")]
    lines.append(", ".join(f"{number} {outcome}" for outcome, number in counts.items()) + f" in {seconds:.0f} s")
    lines.append(f"memory of the first GPU in use, at most: {memory_mib / 1024:.1f} GiB")
    lines += ["", f"{'outcome':8}{'s':>7}  test"]
    for case in sorted(cases, key=lambda case: (case.outcome != "failed", case.file)):
        lines.append(f"{case.outcome:8}{case.seconds:7.1f}  {case.file} {case.name}")
        if case.why:
            lines.append(f"{'':17}{case.why}")
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Summary.")],
    seconds: Annotated[float, typer.Option(help="Tests that have not ended by then have failed.")] = 480.0,
) -> None:
    """Run all CUDA tests, and write what each did."""
    logs = out.with_name(f"{out.stem}-logs").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    cases: list[Case] = []
    with gpu_use(_GPU_EVERY_MS) as used:
        for part in lanes():
            cases += run(part, logs, began + seconds)
    memory_mib = max((use.memory_mib for use in used.values()), default=0.0)
    out.write_text(summary(cases, time.monotonic() - began, memory_mib))
    print(out.read_text())
    sys.exit(any(case.outcome == "failed" for case in cases))


if __name__ == "__main__":
    typer.run(main)
