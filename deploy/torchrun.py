"""torchrun for one machine, with readable messages at the end: `python -m deploy.torchrun --nproc N -- -m learner ...`.

In: a number of ranks, and after `--` the module (`-m`) or script that each rank runs. Out: the ranks' output, and an
exit code: 0, or that of the rank that failed first (128 + signal if a signal ended it). One line replaces torchrun's
traceback. SIGTERM and SIGINT reach the ranks. Ranks that still run after SHUTDOWN_TIMEOUT_S are killed. With
`--max-restarts N` all ranks are restarted after one has failed, at most N times; a learner then resumes from its newest
checkpoint.

This is `torch.distributed.run --standalone` in this process. For several nodes call `torchrun` itself, whose flags
(--nnodes, --rdzv-endpoint, ...) all work with `-m learner`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from shared.private import locked_folder
from shared.version import Version

# Longer than `training.stop_timeout_s`, so that a checkpoint is written, and shorter than the timeout of
# `deploy.launch`, whose SIGKILL would not reach the ranks. TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides this value.
SHUTDOWN_TIMEOUT_S = 28


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    command: Annotated[list[str], typer.Argument(help="After `--`: -m MODULE or SCRIPT, and its arguments.")],
    nproc: Annotated[int, typer.Option(help="Number of ranks.")] = 1,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often all ranks are started again.")] = 0,
    version: Version = False,
) -> None:
    """Run the ranks of one machine to their end."""
    if nproc < 1:
        raise typer.BadParameter(f"found {nproc}, wanted 1 or more", param_hint="--nproc")
    raise typer.Exit(run_ranks(nproc, command, max_restarts=max_restarts))


def run_ranks(nproc: int, command: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run `command` on `nproc` ranks, and return the exit code. Call it in the main thread: it sets signal handlers."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    if max_restarts:
        # Every start gets a new store, because a shared store holds the addresses of ended ranks.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if command[:1] == ["-m"]:
        os.environ |= without_working_directory(os.environ)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # hides torchrun's report of a failure; ranks log in other processes
    try:
        numbers = ["--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
        # torchrun makes a folder for its ranks' error files. After SIGKILL the next start removes the folder.
        folder = locked_folder("torchrun-", Path(tempfile.gettempdir()))
        run.run(run.parse_args(["--standalone", *numbers, "--log-dir", folder, *command]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"torchrun: rank {rank} {describe(failure.exitcode)}", file=sys.stderr)
        return exit_code(failure.exitcode)
    except SignalException as error:
        print(f"torchrun: stopped by {error.sigval.name}", file=sys.stderr)
        return exit_code(-error.sigval)
    return 0


def without_working_directory(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a Python process that runs one of our modules with `-m`.

    Without these variables Python searches the working directory first, where a folder `shared`, `deploy` or `learner`
    would hide our package. In a clone they name the clone, because its packages may not be installed.
    """
    root = Path(__file__).resolve().parents[1]
    safe = {"PYTHONSAFEPATH": "1"}
    if not (root / "pyproject.toml").exists():
        return safe
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(root)]
    return safe | {"PYTHONPATH": os.pathsep.join([str(root), *others])}


def exit_code(returncode: int) -> int:
    """Return a shell's exit code for a `Popen.returncode`: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """Return how a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"


if __name__ == "__main__":
    app(prog_name="deploy.torchrun")
