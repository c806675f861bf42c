"""torchrun for one machine, with readable messages at the end: `python -m deploy.torchrun --nproc N -- -m learner ...`.

In: a number of ranks, and after `--` what each of them runs (a module with `-m`, or a script). Out: the ranks' own
output, and an exit code: 0, or that of the rank that failed first (128 + signal if a signal ended it). Instead of
torchrun's traceback there is one line. SIGTERM and SIGINT reach the ranks. Ranks that still run after
SHUTDOWN_TIMEOUT_S are killed. A failed rank is not restarted: a resume is the user's decision.

This is `torch.distributed.run --standalone` in this process. For several nodes call `torchrun` itself, whose flags
(--nnodes, --rdzv-endpoint, ...) all work with `-m learner`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

# Longer than `training.stop_timeout_s`, so that a checkpoint is written; shorter than the timeout of `deploy.launch`,
# whose SIGKILL would not reach the ranks. The variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides it.
SHUTDOWN_TIMEOUT_S = 28


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="deploy.torchrun", description="Run the ranks of one machine.")
    parser.add_argument("--nproc", type=int, default=1, help="number of ranks")
    parser.add_argument("command", nargs="+", help="after `--`: -m MODULE or SCRIPT, and its arguments")
    args = parser.parse_args(argv)
    if args.nproc < 1:
        parser.error(f"--nproc: found {args.nproc}, wanted 1 or more")
    return run_ranks(args.nproc, args.command)


def run_ranks(nproc: int, command: Sequence[str]) -> int:
    """`command` on `nproc` ranks. Installs torchrun's signal handlers, so only the main thread can call it."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # hides torchrun's own report of a failure; ranks log in their own processes
    try:
        run.run(run.parse_args(["--standalone", "--nproc-per-node", str(nproc), *command]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"torchrun: rank {rank} {describe(failure.exitcode)}", file=sys.stderr)
        return exit_code(failure.exitcode)
    except SignalException as error:
        print(f"torchrun: stopped by {error.sigval.name}", file=sys.stderr)
        return exit_code(-error.sigval)
    return 0


def exit_code(returncode: int) -> int:
    """A shell's exit code for a `Popen.returncode`: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"


if __name__ == "__main__":
    sys.exit(main())
