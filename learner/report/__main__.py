"""python -m learner.report RUN_DIR [--out FILE] [--compare RUN_DIR2]

Writes RUN_DIR/report.html and prints where it is. Exit codes: 0 written, 2 the directory is no run or
cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from learner.report.page import render
from learner.report.read import RunSet, read_runs
from learner.run.files import write_atomically
from shared.errors import ProjectError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m learner.report", description="Write a run's report as one HTML file."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run, or a directory of runs such as runs/demo")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    parser.add_argument("--compare", type=Path, metavar="RUN_DIR2", help="another run, shown beside it")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_dir, out=options.out, compare=options.compare))
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write_report(run_dir: Path, *, out: Path | None = None, compare: Path | None = None) -> Path:
    """Write the report and return its path. Raises DataError if there is no run, OutputError if the
    file cannot be written: then the report of before is still there."""
    runs = read_runs(run_dir)
    if compare is not None:
        others = read_runs(compare)
        runs = RunSet(title=runs.title, runs=(*runs.runs, *others.runs), summary=runs.summary)
    target = out or run_dir / "report.html"
    write_atomically(target, render(runs))
    return target


if __name__ == "__main__":
    sys.exit(main())
