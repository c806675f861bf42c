"""Runs torchrun on one machine, and says in one line why it ended: `python -m learner.run.torchrun N -m learner ...`.

The recipe starts the N ranks of its stages with this module. Users start `deploy.torchrun`, which also has options.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared.private import locked_folder
from shared.processes import describe, exit_code, without_working_directory

# Seconds from torchrun's SIGTERM to its SIGKILL of the ranks, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set. The number
# is above `training.stop_timeout_s`, so that a checkpoint can be written. It is below the timeout of `deploy.launch`,
# which kills torchrun: the ranks would live on.
SHUTDOWN_TIMEOUT_S = 28


def run_ranks(nproc: int, command: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run `command` on `nproc` ranks, and return the exit code. torchrun installs signal handlers, so only the main
    thread can call this. `max_restarts`: how often torchrun starts all ranks again after one has failed."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    if max_restarts:
        # Each restart gets a new store. In the old store the ranks would find the addresses of ranks that have ended.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if command[:1] == ["-m"]:
        os.environ |= without_working_directory(os.environ)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun's own report of a failure is hidden. Ranks log in their own processes, so their logs stay.
    logging.disable(logging.ERROR)
    try:
        numbers = ["--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
        # torchrun writes its ranks' error files into this folder. If torchrun is killed, the next start removes the
        # folder.
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


if __name__ == "__main__":
    sys.exit(run_ranks(int(sys.argv[1]), sys.argv[2:]))
