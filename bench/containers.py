"""How NCCL joins two containers of one machine: `python -m bench.containers --out FILE` (two GPUs, vLLM).

Two processes, one per GPU, join a sync's group and broadcast 1 GiB. In turn they are plain processes, and processes as
Compose's containers are: with a network (a bridge), host names and IPC of their own. Host names differ, as in
compose.yaml, or are the same; with one name also with settings that change how NCCL shares memory. Out: FILE with the
transport that NCCL_DEBUG=INFO names, and the median GB/s; or the error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import typer

from bench.figures import circumstances, markdown_table
from bench.namespaces import NoNamespacesError, network
from learner.run.files import write_atomically

BROADCASTS = 7
LIMIT_S = 60.0
NAMES = ("server-0", "learner")
ONE_NAME = ("machine", "machine")
CASES: Mapping[str, tuple[bool, Sequence[str], Mapping[str, str]]] = {  # name -> containers?, host names, settings
    "no containers": (False, (), {}),
    "containers, host names differ (compose.yaml)": (True, NAMES, {}),
    "containers, one host name": (True, ONE_NAME, {}),
    "containers, one host name, NCCL_CUMEM_ENABLE=0": (True, ONE_NAME, {"NCCL_CUMEM_ENABLE": "0"}),
    "containers, one host name, NCCL_P2P_DISABLE=1": (True, ONE_NAME, {"NCCL_P2P_DISABLE": "1"}),
    "containers, host names differ, one NCCL_HOSTID": (True, NAMES, {"NCCL_HOSTID": "one"}),
}


def member(rank: int, host: str, port: int, size_mib: int, device: str) -> None:
    """Join the group as `rank` of 2, and broadcast from rank 1, the learner. Prints the seconds as JSON."""
    import torch

    from shared.sync.group import start_join

    backend: Literal["tcp", "nccl"] = "tcp" if device == "cpu" else "nccl"
    group = start_join(backend, host, port, rank, 2, LIMIT_S / 2, device, secret=b"containers").result()
    tensor = torch.full((size_mib << 20,), rank, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(BROADCASTS):
        began = time.monotonic()
        group.broadcast(tensor, 1)
        seconds.append(time.monotonic() - began)
    assert bool((tensor == 1).all())
    print("SECONDS", json.dumps(seconds), flush=True)
    group.close()


def run(containers: bool, names: Sequence[str], settings: Mapping[str, str], device: str, port: int) -> dict[str, Any]:
    """Run both ranks. Returns what NCCL said of its transports, and GB/s; or the error's last line."""
    size_mib = 64 if device == "cpu" else 1024
    with ExitStack() as stack:
        nodes = stack.enter_context(network(NAMES))[1] if containers else {}
        host = nodes[NAMES[0]].address if nodes else "127.0.0.1"
        processes = []
        for rank, node in enumerate(NAMES):
            command = [sys.executable, "-m", "bench.containers", "--member", str(rank), "--host", host]
            command += ["--port", str(port), "--size-mib", str(size_mib), "--device", device]
            if nodes:
                inside = 'hostname "$0" && exec "$@"'
                command = [*nodes[node].enter, "unshare", "--uts", "--ipc", "sh", "-c", inside, names[rank], *command]
            own = {"CUDA_VISIBLE_DEVICES": str(rank), "NCCL_DEBUG": "INFO", **settings}
            pipe = subprocess.PIPE
            started = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=pipe, stderr=subprocess.STDOUT, text=True
            )
            processes.append(started)
        said = []
        for process in processes:
            try:
                said.append(process.communicate(timeout=LIMIT_S)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(process.communicate()[0] + "\nno end within the limit")
    result: dict[str, Any] = {"transports": sorted(set(re.findall(r"via (\S+)", said[1])))}
    if times := re.search(r"SECONDS (.*)", said[1]):
        result["gb_per_s"] = round((size_mib << 20) / 1e9 / median(json.loads(times[1])[2:]), 2)
    else:
        lines = [line for text in said for line in text.splitlines() if "NCCL INFO" not in line]
        result["error"] = [line[-200:] for line in lines[-12:]]
    result["said"] = [line[-160:] for line in said[1].splitlines() if "NCCL INFO" in line and "hannel" in line][:4]
    return result


def main(
    out: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    device: Annotated[str, typer.Option(help="cpu: TCP instead of NCCL, to try the script.")] = "cuda:0",
    member_rank: Annotated[int, typer.Option("--member", hidden=True)] = -1,
    host: Annotated[str, typer.Option(hidden=True)] = "",
    port: Annotated[int, typer.Option(help="The group's port; each case takes the next.")] = 29611,
    size_mib: Annotated[int, typer.Option(hidden=True)] = 1,
) -> None:
    if member_rank >= 0:
        member(member_rank, host, port, size_mib, device)
        return
    results = {}
    for number, (name, (containers, names, settings)) in enumerate(CASES.items()):
        try:
            results[name] = run(containers, names, settings, device, port + number)
        except NoNamespacesError as error:
            results[name] = {"error": [str(error)]}
        print(name, results[name], flush=True)
        if out:
            write_atomically(out, json.dumps({**circumstances(), "cases": results}, indent=1) + "\n")
    rows = [
        [name, ", ".join(case.get("transports", [])), str(case.get("gb_per_s", ""))] for name, case in results.items()
    ]
    print("\n".join(markdown_table(["case", "NCCL's transport", "GB/s"], rows)))


if __name__ == "__main__":
    typer.run(main)
