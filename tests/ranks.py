"""A program run once per rank, as torchrun would run it: a test module, or the learner; forked (`bench.forked`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench import forked
from shared.addresses import free_port


def launch(
    module: str,
    world_size: int,
    *arguments: str,
    timeout_s: float = 120.0,
    loaded: tuple[str, ...] = forked.LEARNER,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python -m module arguments` as every rank of a group on this machine; return what each printed, in rank
    order."""
    return forked.finish(loaded, module, arguments, envs=list(_environments(world_size)), timeout_s=timeout_s)


def learner(
    config: Path,
    *,
    nproc: int = 1,
    loaded: tuple[str, ...] = forked.LEARNER,
    timeout_s: float = 200.0,
) -> subprocess.CompletedProcess[str]:
    """The learner on `nproc` ranks, to its end.

    What all ranks printed, in rank order, and the worst exit code.
    """
    ended = launch("learner", nproc, "--config", str(config), timeout_s=timeout_s, loaded=loaded)
    return subprocess.CompletedProcess(
        ended[0].args,
        max((one.returncode for one in ended), key=abs),
        "".join(one.stdout for one in ended),
        "".join(one.stderr for one in ended),
    )


def _environments(world_size: int) -> Iterator[dict[str, str]]:
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(world_size):
        yield {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
