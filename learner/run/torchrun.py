"""Runs torchrun on one machine, and says in one line why it ended: `python -m learner.run.torchrun N -m learner ...`.

The recipe starts the N ranks of its stages with this module. Users start `deploy.torchrun`, which also has options.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from shared.private import locked_folder
from shared.processes import children, describe, exit_code, without_working_directory

# Seconds from torchrun's SIGTERM to its SIGKILL of the ranks, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set. The number
# is above `training.stop_timeout_s`, so that a checkpoint can be written. The number is below the timeout of
# `deploy.launch`, which then kills torchrun: otherwise the ranks would outlive torchrun.
SHUTDOWN_TIMEOUT_S = 28
_KILL_TIMEOUT_S = 5.0  # seconds that a killed rank may take to end: a process inside a driver call ends late or never


def run_ranks(nproc: int, command: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run `command` on `nproc` ranks, and return the exit code. torchrun installs signal handlers, so only the main
    thread can call this. `max_restarts`: how often torchrun starts all ranks again after one has failed."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    if max_restarts:
        # Each restart gets a new store (torch's rendezvous server). In the old store the new ranks would find addresses
        # of ended ranks.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if command[:1] == ["-m"]:
        os.environ |= without_working_directory(os.environ)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    others = children(os.getpid())
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
        _end_ranks(error.sigval, others)
        print(f"torchrun: stopped by {error.sigval.name}", file=sys.stderr)
        return exit_code(-error.sigval)
    return 0


def _end_ranks(signum: signal.Signals, others: Collection[int]) -> None:
    """Send `signum` to the ranks that torchrun has left running, and SIGKILL to the ranks that do not end in time.
    `others`: children of this process that are no ranks."""
    # torchrun ends the ranks that it knows. torchrun knows no rank before all have been started, so a signal between
    # two starts leaves the first rank running. A third signal also ends torchrun's wait for ranks that save a
    # checkpoint.
    for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(handled, signal.SIG_IGN)
    # A descriptor always means the same process, while a process id may be reused. The descriptor is readable when the
    # rank has ended.
    ranks = {os.pidfd_open(pid): pid for pid in children(os.getpid()) - set(others)}
    timeout_s = float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    for signum_sent, limit_s in ((signum, timeout_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        for pid in ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signum_sent)
        end_s = time.monotonic() + limit_s
        while ranks and (left_s := end_s - time.monotonic()) > 0:
            for ended in select.select(list(ranks), [], [], left_s)[0]:
                os.close(ended)
                del ranks[ended]


if __name__ == "__main__":
    sys.exit(run_ranks(int(sys.argv[1]), sys.argv[2:]))
