"""A test module run once per rank, as torchrun would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shared.ports import free_port

ROOT = Path(__file__).parents[1]


def launch(
    module: str, world_size: int, *arguments: str, timeout_s: float = 120.0
) -> list[subprocess.CompletedProcess[str]]:
    """`python -m module arguments` as every rank of a group on this machine; what each printed, in rank order."""
    port = free_port()
    processes = []
    for rank in range(world_size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        environment = os.environ | {k: str(v) for k, v in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", module, *arguments]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [p.communicate(timeout=timeout_s) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *o) for p, o in zip(processes, outputs, strict=True)]
