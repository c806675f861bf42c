"""The rollout server's configuration: a YAML file in, a frozen `ServerConfig` out, or every mistake at once (R16).

The bearer token is not part of the configuration, because secrets do not belong in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shared.addresses import is_loopback
from shared.config.kinds import for_program
from shared.config.model import Mistake, Section, key
from shared.config.parse import load_yaml, parse
from shared.errors import ConfigError
from shared.families import check_folder
from shared.tokens import TOKEN_VARIABLE

if TYPE_CHECKING:
    from shared.images import ImageRules

SERVER_ID_VARIABLE = "ROLLOUT_SERVER_ID"  # environment variable with the id that a server reports about itself
_IMAGE_CACHE_BYTES = 256 << 20  # max bytes of fetched images in memory
Folder = Annotated[Path, Field(strict=False)]  # pydantic's strict mode would refuse a path that is given as a string

# Arguments of vLLM that `engine_args` may not set: another key sets them, or the server does.
RESERVED_ENGINE_ARGS = frozenset(
    {
        "calculate_kv_scales",  # vLLM computes the scales from the first request, so they are wrong for later weights
        "data_parallel_size",
        "disable_log_stats",
        "dtype",
        "enable_log_requests",
        "enable_lora",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_seqs",
        "model",
        # `quantization` is refused. An FP8 model's scores may differ from the learner's by 0.3 nats per token, so the
        # check after a sync (canary) would have to tolerate such a difference. A small model with a wrong layer can
        # differ by less, and would pass the check.
        "quantization",
        "quantization_config",
        "seed",
        "served_model_name",
        "tensor_parallel_size",
        "trust_remote_code",
        "worker_extension_cls",
    }
)


class ServerConfig(Section):
    """The served model, the devices it runs on, where the server listens, limits on requests, and deadlines."""

    model: str = key("a checkpoint's folder, or a name on the Hugging Face hub", min_length=1)
    served_model_name: str = key(
        "what `/v1/models` and answers call the model; empty: the folder's name, or the name on the hub",
        "",
        max_length=512,
    )
    allow_untested_family: bool = key("try a family of models that docs/models.md does not list", False)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key(
        "dtype of the served weights; `auto`: the checkpoint's", "auto"
    )
    max_model_len: int | None = key("longest prompt plus answer; null: the model's limit", None, unit="tokens", ge=1)
    trust_remote_code: bool = key("run Python code from the checkpoint's folder", False)

    tensor_parallel_size: int = key("devices per replica of the model", 1, req="R23", ge=1)
    data_parallel_size: int = key("replicas of the model", 1, req="R23", ge=1)
    gpu_memory_utilization: float = key("share of each device that vLLM may use", 0.9, unit="share", gt=0.0, le=1.0)
    max_num_seqs: int = key("most sequences that one replica decodes at once", 128, unit="sequences", ge=1)
    enforce_eager: bool = key("no compilation and no CUDA graphs: starts faster, decodes slower", False)
    enable_lora: bool = key(
        "accept adapters too (a learner's `sync.mode: adapter`); decodes slightly slower", False, req="R08"
    )
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 512] = key("highest rank of an adapter", 16, req="R08")
    cpu_kv_cache_gib: int = key(
        "memory of the KV cache without a GPU; `engine_args: {kv_cache_memory_bytes: ...}` goes before it",
        1,
        unit="GiB",
        ge=1,
    )
    cpu_threads: int | None = key(
        "CPU threads without a GPU; null: one per core. With 1 the server starts in 60% of the time",
        None,
        unit="threads",
        ge=1,
    )
    engine_args: dict[str, Any] = key("further arguments of vLLM's `AsyncEngineArgs`", {})

    host: str = key("address to listen on; any but a loopback address needs a token", "127.0.0.1")
    port: int = key("TCP port of the HTTP endpoints", 8000, ge=1, le=65535)
    url_prefix: str = key(
        "prefix of all endpoints, such as `/rollout`", "", req="R06", pattern=r"^(/[A-Za-z0-9._~-]+)*$"
    )
    communicator_host: str = key(
        "address where learners join for weight syncs; empty: `host`; any but a loopback address needs a token",
        "",
        req="R09",
    )

    min_pixels: int | None = key(
        "smaller images are enlarged to it; null: the checkpoint's limit. As for the learner's `model.min_pixels`",
        None,
        unit="pixels",
        ge=1,
    )
    max_pixels: int | None = key(
        "larger images are shrunk to it; null: the checkpoint's limit. As for the learner's `model.max_pixels`",
        None,
        unit="pixels",
        ge=1,
    )
    allowed_image_roots: list[Folder] = key("folders with local images; empty: no local paths", [])
    allowed_image_hosts: list[str] = key("hosts of image URLs; empty: no URLs", [])
    max_image_pixels: int = key("largest image, width x height", 64_000_000, unit="pixels", ge=1)
    max_images_per_request: int = key("most images of one request", 8, unit="images", ge=1)
    max_body_bytes: int = key("largest body of one HTTP call", 128 << 20, unit="bytes", ge=1)
    max_connections: int = key(
        "most HTTP calls at once, a connection each; further calls get 503. Less if the limit on open files is lower",
        1024,
        unit="connections",
        ge=16,
    )
    max_requests_per_call: int = key(
        "most requests of one `/infer/`, `/score/` or `/v1/` call", 4096, unit="requests", ge=1
    )

    queue_timeout_s: float = key(
        "longest wait of a call for a weight update to end, or of its images for memory", 60.0, unit="s", gt=0.0
    )
    drain_timeout_s: float = key(
        "longest wait of a weight update for calls in flight", 300.0, unit="s", req="R10", gt=0.0
    )
    engine_stall_s: float = key(
        "an engine that answers nothing for so long counts as stopped: calls and probes get 503. Ten times as long if "
        "its processes work: it may compile, or share its cores",
        20.0,
        unit="s",
        ge=1.0,
    )
    shutdown_timeout_s: float = key(
        "longest wait for calls in flight after SIGTERM, Ctrl-C or SIGHUP", 30.0, unit="s", gt=0.0
    )

    openai_api: bool = key("serve `/v1/models`, `/v1/chat/completions` and `/v1/completions`", True, req="R13")

    log_dir: Folder | None = key("folder of the log file; null: log to the console", None)

    @property
    def model_name(self) -> str:
        """Return the model's name for clients, which contains no path of this machine."""
        return self.served_model_name or (Path(self.model).resolve().name if Path(self.model).is_dir() else self.model)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def image_rules(self) -> ImageRules:
        from shared.images import ImageRules

        return ImageRules(
            roots=tuple(self.allowed_image_roots),
            hosts=tuple(self.allowed_image_hosts),
            max_pixels=self.max_image_pixels,
            cache_bytes=_IMAGE_CACHE_BYTES,
            keys="the server's ",
        )

    @property
    def group_host(self) -> str:
        return self.communicator_host or self.host

    @property
    def base_url(self) -> str:
        """The URL under which this machine reaches the endpoints."""
        return self.base_url_for({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    def base_url_for(self, host: str) -> str:
        """Return the URL of the endpoints for a machine that reaches this machine at `host`."""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.url_prefix}"

    @property
    def is_public(self) -> bool:
        """True if other machines can reach the HTTP port or the port of the group."""
        return not (is_loopback(self.host) and is_loopback(self.group_host))


def load_server_config(path: str | Path, *, has_token: bool = True, overrides: Sequence[str] = ()) -> ServerConfig:
    """Return the configuration of a file. Raises ConfigErrors, which lists every mistake. Without a token
    (ROLLOUT_SERVER_TOKEN), an address that other machines can reach is a mistake."""
    rules = (_check_family, _check_hosts, _check_engine_args, _check_roots)
    document = for_program(load_yaml(path, overrides=overrides), "server")
    return parse(ServerConfig, document, rules=rules if has_token else (*rules, _check_token))


def _check_family(config: ServerConfig) -> Iterator[Mistake]:
    try:
        check_folder(config.model, key="model", allow_untested=config.allow_untested_family)
    except ConfigError as error:
        yield Mistake.of(error, "model")


def _check_hosts(config: ServerConfig) -> Iterator[Mistake]:
    host = config.group_host
    if host in {"0.0.0.0", "::", ""}:
        key = "communicator_host" if config.communicator_host else "host"
        yield Mistake(
            path=key,
            found=f"{host!r}, every interface",
            wanted="one address for the weight sync",
            remedy="set communicator_host to the address of this machine that learners can reach",
        )


def _check_token(config: ServerConfig) -> Iterator[Mistake]:
    if config.is_public:
        name = "communicator_host" if is_loopback(config.host) else "host"
        yield Mistake(
            path=name,
            found=f"{getattr(config, name)!r}, which other machines can reach, and no {TOKEN_VARIABLE}",
            wanted=f"a bearer token in {TOKEN_VARIABLE}, or 127.0.0.1",
            remedy=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) for both programs, or remove the key",
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
