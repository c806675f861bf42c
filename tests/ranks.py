"""A test module run once per rank, as torchrun would run it.

The ranks are forked from one process that has imported what they need: new ones spend most of a test on that.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

import torch

from shared.addresses import free_port

_IMPORTED = ("learner.run.checkpoint", "learner.policy.optim", "learner.policy.load", "learner.sync", "pytest", "respx")


def launch(
    module: str, world_size: int, *arguments: str, timeout_s: float = 120.0
) -> list[subprocess.CompletedProcess[str]]:
    """`python -m module arguments` as every rank of a group on this machine; what each printed, in rank order."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *_IMPORTED])
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(world_size)]
        processes = [
            context.Process(target=_run, args=(module, arguments, group, rank, *outputs[rank]))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        said = [[path.read_text() for path in paths] for paths in outputs]
    if None in codes:
        raise subprocess.TimeoutExpired(module, timeout_s, *map(str, said[codes.index(None)]))
    return [
        subprocess.CompletedProcess([module, *arguments], code or 0, *texts)
        for code, texts in zip(codes, said, strict=True)
    ]


def _run(module: str, arguments: tuple[str, ...], group: Mapping[str, str], rank: int, out: Path, err: Path) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(group, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
