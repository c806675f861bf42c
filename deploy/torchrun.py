"""torchrun for one machine, with readable messages at the end: `python -m deploy.torchrun --nproc N -- -m learner ...`.

In: a number of ranks, and after `--` what each of them runs (a module with `-m`, or a script). Out: the ranks' own
output, and an exit code: 0, or that of the rank that failed first (128 + signal if a signal ended it). Instead of
torchrun's traceback there is one line. SIGTERM and SIGINT reach the ranks. Ranks that still run after
SHUTDOWN_TIMEOUT_S are killed. With `--max-restarts N` all ranks are started again after one has failed, at most N
times; a learner then goes on from its newest checkpoint.

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

# This is longer than `training.stop_timeout_s`, so that a checkpoint is written; shorter than the timeout of
# `deploy.launch`, whose SIGKILL would not reach the ranks. The variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides it.
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
    """`command` on `nproc` ranks. Installs torchrun's signal handlers, so only the main thread can call it."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    if max_restarts:
        # Every start has a store of its own. In a shared one, ranks find the addresses of those that are gone.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if command[:1] == ["-m"]:
        os.environ |= without_working_directory(os.environ)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # hides torchrun's own report of a failure; ranks log in their own processes
    try:
        numbers = ["--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
        # Torchrun makes a folder for its ranks' error files, and a killed one leaves it.
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

    Without them Python looks for modules in the working directory first, and a folder `shared`, `deploy` or `learner`
    there hides ours. In a clone, the clone is named instead, because its packages may not be installed.
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
