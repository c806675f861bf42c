"""The rollout server's configuration: a YAML file in, a frozen `ServerConfig` out, or every mistake at once (R16).

Called by `__main__.py` and by the launcher. The bearer token is no part of it: secrets do not belong into files.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shared.config.model import Mistake, Section, key
from shared.config.parse import load_yaml, parse

if TYPE_CHECKING:
    from shared.images import ImageRules

TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"
Folder = Annotated[Path, Field(strict=False)]  # strict: a string would be none

# What this configuration has a key for, or what the server must decide itself.
RESERVED_ENGINE_ARGS = frozenset(
    {
        "data_parallel_size",
        "disable_log_stats",
        "dtype",
        "enable_log_requests",
        "enable_lora",
        "enforce_eager",
        "gpu_memory_utilization",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_seqs",
        "model",
        "seed",
        "tensor_parallel_size",
        "trust_remote_code",
        "worker_extension_cls",
    }
)


class ServerConfig(Section):
    """One served model, on what it runs, where it listens, what requests may ask for and how long anything waits."""

    model: str = key("a checkpoint's folder, or a name on the Hugging Face hub", min_length=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key("dtype of the served weights", "auto")
    seed: int = key("the engine's own; requests bring their seeds", 0)
    max_model_len: int | None = key("longest prompt + answer; null: the model's own", None, unit="tokens", ge=1)
    trust_remote_code: bool = key("run Python code that comes with the model", False)

    tensor_parallel_size: int = key("devices that one replica is split over", 1, req="R23", ge=1)
    data_parallel_size: int = key("replicas of the model", 1, req="R23", ge=1)
    gpu_memory_utilization: float = key("share of each device that vLLM may use", 0.9, unit="share", gt=0.0, le=1.0)
    max_num_seqs: int = key("decoded at once by one replica, at most", 128, unit="sequences", ge=1)
    enforce_eager: bool = key("no compilation, no CUDA graphs: starts sooner, decodes slower", False)
    enable_lora: bool = key(
        "take adapters too (a learner's `sync.mode: adapter`); decodes a little slower", False, req="R08"
    )
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 512] = key("rank of an adapter, at most", 16, req="R08")
    cpu_kv_cache_gib: int = key("memory of the KV cache where there is no GPU", 1, unit="GiB", ge=1)
    cpu_threads: int | None = key(
        "where there is no GPU; null: one per core. With 1 the server starts in 60% of the time",
        None,
        unit="threads",
        ge=1,
    )
    engine_args: dict[str, Any] = key("further arguments of vLLM's `AsyncEngineArgs`", {})

    host: str = key("address to listen on; others than this machine's own need a token", "127.0.0.1")
    port: int = key("TCP port of the HTTP endpoints", 8000, ge=1, le=65535)
    url_prefix: str = key(
        "all endpoints are below it, such as `/rollout`", "", req="R06", pattern=r"^(/[A-Za-z0-9._~-]+)*$"
    )
    communicator_host: str = key("address at which learners join for weight syncs; empty: `host`", "", req="R09")

    min_pixels: int | None = key(
        "smaller images are enlarged to it; null: the checkpoint's own limit. As the learner's `model.min_pixels`",
        None,
        unit="pixels",
        ge=1,
    )
    max_pixels: int | None = key(
        "larger images are shrunk to it; null: the checkpoint's own limit. As the learner's `model.max_pixels`",
        None,
        unit="pixels",
        ge=1,
    )
    allowed_image_roots: list[Folder] = key("local images may lie below these folders; empty: no local paths", [])
    allowed_image_hosts: list[str] = key("images may be fetched from these hosts; empty: no URLs", [])
    image_timeout_s: float = key("for fetching one image", 10.0, unit="s", gt=0.0)
    image_cache_bytes: int = key("fetched images that are kept in memory; 0: none", 256 << 20, unit="bytes", ge=0)
    max_image_bytes: int = key("size of one encoded image, at most", 32 << 20, unit="bytes", ge=1)
    max_image_pixels: int = key("width x height of one image, at most", 64_000_000, unit="pixels", ge=1)
    max_images_per_request: int = key("images of one request, at most", 8, unit="images", ge=1)
    max_body_bytes: int = key("size of one HTTP call's body, at most", 512 << 20, unit="bytes", ge=1)

    queue_timeout_s: float = key("how long a call waits for a weight update to end", 60.0, unit="s", gt=0.0)
    drain_timeout_s: float = key(
        "how long a weight update waits for calls in flight", 300.0, unit="s", req="R10", gt=0.0
    )
    shutdown_timeout_s: float = key("how long SIGTERM waits for calls in flight", 30.0, unit="s", gt=0.0)
    answer_cache_size: int = key(
        "answers kept, so that a retry gets the same one", 4096, unit="rollouts", req="R12", ge=0
    )

    log_dir: Folder | None = key("folder of the log file; null: everything to the console", None)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def image_rules(self) -> ImageRules:
        from shared.images import ImageRules

        return ImageRules(
            roots=tuple(self.allowed_image_roots),
            hosts=tuple(self.allowed_image_hosts),
            timeout_s=self.image_timeout_s,
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            cache_bytes=self.image_cache_bytes,
            keys="the server's ",
        )

    @property
    def group_host(self) -> str:
        return self.communicator_host or self.host

    @property
    def base_url(self) -> str:
        """Under which this machine itself reaches the endpoints."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.url_prefix}"

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach the HTTP port."""
        return not _is_loopback(self.host)


def load_server_config(path: str | Path, *, has_token: bool = True) -> ServerConfig:
    """Raises ConfigErrors, which lists every mistake of the file.

    Without a token (ROLLOUT_SERVER_TOKEN) a host that others can reach is one of them.
    """
    rules = (_check_hosts, _check_engine_args, _check_roots)
    return parse(ServerConfig, load_yaml(path), rules=rules if has_token else (*rules, _check_token))


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


def _check_token(config: ServerConfig) -> Iterator[Mistake]:
    if config.is_public:
        yield Mistake(
            path="host",
            found=f"{config.host!r}, which others than this machine can reach, and no {TOKEN_VARIABLE}",
            wanted=f"a bearer token in {TOKEN_VARIABLE}, or host 127.0.0.1",
            remedy=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) for server and learner, or remove the key",
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
