"""torchrun for one machine, with endings that a user can read: `python -m deploy.torchrun --nproc N -- -m learner ...`.

In: a number of ranks, and after `--` what each of them runs (a module with `-m`, or a script). Out: the ranks' own
output, and an exit code: 0, or that of the rank that failed first (128 + signal, where a signal ended it), with one
line where torchrun prints its own traceback. SIGTERM and SIGINT reach the ranks; those that still run after
SHUTDOWN_TIMEOUT_S are killed. A failed rank is not started again: a resume is the user's decision.

This is `torch.distributed.run --standalone` in this process. For several nodes call `torchrun` itself, whose flags
(--nnodes, --rdzv-endpoint, ...) all work with `-m learner`. Called by `make learn` and `deploy.launch`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

# Above `training.stop_timeout_s`, so that a checkpoint is written; below the patience of `deploy.launch`, whose SIGKILL
# would not reach the ranks. The environment's TORCH_ELASTIC_SHUTDOWN_TIMEOUT stands above it.
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

    logging.disable(logging.ERROR)  # torchrun's own words about a failure; the ranks log in processes of their own
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
    """A shell's exit code for a `Popen.returncode`: a process that signal n ended has 128 + n."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"


if __name__ == "__main__":
    sys.exit(main())
