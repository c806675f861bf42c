"""TRL's server and client (`vllm serve` behind `trl.generation.vllm_client`), the same model on the same kind of GPU.

In: a model folder and a device. Out: a client that is connected, to be timed by `sync.py` and `infer.py`. TRL's client
checks nothing that it sends. Needs `trl` installed; without it the comparison is left out, and said to be.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from bench.gpu.devices import visible
from deploy.launch import Processes
from shared.addresses import free_ports


def is_installed() -> bool:
    return importlib.util.find_spec("trl") is not None


class TrlServer:
    """Starts at once; `client` waits until it serves."""

    def __init__(
        self, processes: Processes, model: Path, *, device: int, max_num_seqs: int, kv_cache_bytes: int, log: Path
    ) -> None:
        from trl.scripts.vllm_serve import ScriptArguments, build_command

        self._port, self._group_port = free_ports(2)
        arguments = ScriptArguments(
            model=str(model), host="127.0.0.1", port=self._port, max_model_len=2048, gpu_memory_utilization=0.4
        )
        more = ["--max-num-seqs", str(max_num_seqs), "--kv-cache-memory-bytes", str(kv_cache_bytes)]
        # As TRL's own command does before it becomes vLLM's: its clients need the development endpoints.
        os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        self._process = processes.start("trl", build_command(arguments, more), devices=visible(device), log=log)

    def client(self, timeout_s: float) -> Any:
        """A `VLLMClient`, once the server answers."""
        from trl.generation.vllm_client import VLLMClient

        return VLLMClient(
            base_url=f"http://127.0.0.1:{self._port}", group_port=self._group_port, connection_timeout=timeout_s
        )

    def stop(self) -> None:
        """At once: asked to end, it takes half a minute."""
        self._process.stop(timeout_s=1.0)
