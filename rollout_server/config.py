"""The rollout server's configuration: a YAML file in, a frozen `ServerConfig` out, or every mistake at once (R16).

Called by `__main__.py` and by the launcher. The bearer token is no part of it: secrets do not belong into files.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.config_errors import Mistake
from shared.config_io import load_yaml, parse

# What this configuration has a key for, or what the server must decide itself.
RESERVED_ENGINE_ARGS = frozenset(
    {
        "data_parallel_size",
        "disable_log_stats",
        "dtype",
        "enable_log_requests",
        "enforce_eager",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "model",
        "seed",
        "tensor_parallel_size",
        "trust_remote_code",
        "worker_extension_cls",
    }
)


class ServerConfig(BaseModel):
    """One key per line; units in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # What is served
    model: str = Field(min_length=1)  # a checkpoint's folder, or a name on the Hugging Face hub
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    seed: int = 0  # the engine's own; requests bring their seeds
    max_model_len: int | None = Field(default=None, ge=1)  # tokens, prompt and answer; None: the model's own
    trust_remote_code: bool = False

    # On what
    tensor_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    max_num_seqs: int = Field(default=128, ge=1)  # sequences that one engine decodes at once
    enforce_eager: bool = False
    cpu_kv_cache_gib: int = Field(default=1, ge=1)  # without a GPU only
    cpu_threads: int | None = Field(default=None, ge=1)  # without a GPU only; None: as many as there are cores
    engine_args: dict[str, Any] = {}  # further arguments of vLLM's AsyncEngineArgs

    # Where it listens
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    url_prefix: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")  # "/rollout": all endpoints below it
    communicator_host: str = ""  # the address at which learners join for weight syncs; empty: `host`

    # What a request may ask for
    allowed_image_roots: list[Path] = []  # folders below which local images may lie; none: no local paths
    allowed_image_hosts: list[str] = []  # hosts that images may be fetched from over http(s); none: no URLs
    image_timeout_s: float = Field(default=10.0, gt=0)  # for fetching one
    max_image_bytes: int = Field(default=32 << 20, ge=1)
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    max_images_per_request: int = Field(default=8, ge=1)
    max_body_bytes: int = Field(default=512 << 20, ge=1)

    # How long it waits, what it remembers
    queue_timeout_s: float = Field(default=60.0, gt=0)  # a call, for an update to end
    drain_timeout_s: float = Field(default=300.0, gt=0)  # an update, for calls in flight to end
    shutdown_timeout_s: float = Field(default=30.0, gt=0)  # SIGTERM, for calls in flight to end
    answer_cache_size: int = Field(default=4096, ge=0)  # answers kept for retries

    log_dir: Path | None = None  # None: everything to the console

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def group_host(self) -> str:
        return self.communicator_host or self.host

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach the HTTP port."""
        return not _is_loopback(self.host)


def load_server_config(path: str | Path) -> ServerConfig:
    """Raises ConfigErrors, which lists every mistake of the file."""
    return parse(ServerConfig, load_yaml(path), path, rules=(_check_hosts, _check_engine_args, _check_roots))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_hosts(config: ServerConfig) -> Iterator[Mistake]:
    host = config.group_host
    if host in {"0.0.0.0", "::", ""}:
        key = "communicator_host" if config.communicator_host else "host"
        yield Mistake(
            path=key,
            found=f"{host!r}, every interface",
            wanted="one address for the weight sync",
            remedy="set communicator_host to the address of this machine that the learners reach",
        )


def _check_engine_args(config: ServerConfig) -> Iterator[Mistake]:
    for name in sorted(RESERVED_ENGINE_ARGS & config.engine_args.keys()):
        yield Mistake(
            path=f"engine_args.{name}",
            found="an argument that the server sets itself",
            wanted="other arguments of vLLM's AsyncEngineArgs",
            remedy=f"use the key {name!r} of this file" if name in ServerConfig.model_fields else "remove it",
        )


def _check_roots(config: ServerConfig) -> Iterator[Mistake]:
    for i, root in enumerate(config.allowed_image_roots):
        if not root.is_dir():
            yield Mistake(
                path=f"allowed_image_roots[{i}]",
                found=str(root),
                wanted="a folder that exists",
                remedy="create it, or remove the entry (paths are relative to the working directory)",
            )
