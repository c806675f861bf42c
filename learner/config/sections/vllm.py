"""The section `vllm` of the rollouts: the engine, and how trained weights reach it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from learner.config.modes import ROLLOUT, Rule, sync_mode
from learner.config.sections.servers import ServerClientConfig
from shared.config.model import Mistake, Section, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class SyncConfig(Section):
    """The sync of trained weights to the rollout engine, in memory."""

    mode: Literal["full", "adapter", "auto"] = key(
        "`full`: merged weights; `adapter`: the adapter only; `auto`: `adapter` if `enable_lora` is true, else `full`",
        "full",
        req="R08",
    )
    fallback_to_full: bool = key(
        "if an adapter sync fails, repeated or not, warn and use full syncs for the rest of the run (a resumed "
        "run tries adapters again); false: stop the run",
        True,
        req="R08",
    )
    # Sending a 4B model over NCCL took 0.027 s in buckets of 512 MiB, and 0.034 s in buckets of 64 MiB (two H200).
    bucket_bytes: int = key(
        "tensors are sent in pieces of this size, up to three at a time", 512 * 2**20, unit="bytes", req="R09", ge=1
    )
    # After correct syncs of a 5M model the difference was 0.0000 in float32, and at most 0.061 in bfloat16.
    canary_tolerance: float | None = key(
        "largest mean difference between the learner's and the server's scores; null: 0.01 if both compute in "
        "float32, otherwise 0.1",
        None,
        unit="nats per token",
        req="R09",
        gt=0.0,
    )


class VllmConfig(Section):
    """vLLM, which makes the rollouts: inside the learner's job, or on rollout servers."""

    mode: Literal["colocate", "server"] = key(
        "`colocate`: on the training devices; `server`: on rollout servers", "colocate", req="R02"
    )
    enable_lora: bool = key(
        "the engine accepts adapters; with `mode: server` also set the servers' `enable_lora`", False, req="R08"
    )
    # R04 gives this default and the next one.
    gpu_memory_utilization: float = key(
        "`colocate`: share of each device that vLLM may use", 0.45, unit="share", req="R04", gt=0.0, le=1.0
    )
    tensor_parallel_size: int = key(
        "`colocate`: devices per engine, a divisor of the number of ranks; if unset, one rank alone uses 1",
        4,
        req="R04",
        ge=1,
    )
    max_model_len: int | None = key(
        "`colocate`: longest prompt + answer; null: the model's own limit", None, unit="tokens", ge=1
    )
    enforce_eager: bool = key(
        "`colocate`: no compilation and no CUDA graphs; starts sooner, decodes slower", False, req="R04"
    )
    # vLLM's compiler takes 27 to 50 s of a start with empty caches, and 5 s with full caches.
    compile: bool = key(
        "`colocate`: vLLM compiles its model. `false`: it has CUDA graphs for decoding only, and starts sooner, most "
        "of all where its caches are empty",
        True,
        req="R04",
    )
    # The first sleep of a 4B model takes 4.5 s, because 8.9 GB of page-locked memory must be allocated for it.
    sleep: Literal["auto", "always"] = key(
        "colocated, on CUDA: the engine gives its memory back while the learner computes. `auto`: only where that is "
        "needed; where training is estimated, or was seen, to leave enough memory free, the engine stays awake, and "
        "syncs are faster",
        "auto",
        req="R04",
    )
    cpu_kv_cache_gib: int = key(
        "`colocate` without a GPU: memory of each rank's KV cache", 1, unit="GiB", req="R04", ge=1
    )
    server: ServerClientConfig = key("`mode: server`: where the servers are", ServerClientConfig(), req="R05")
    sync: SyncConfig = key("weight sync", SyncConfig(), req="R08")


def adapter_sync(config: RunConfig) -> Iterator[Mistake]:
    """Adapter sync needs `vllm.enable_lora`. Adapter sync also needs `model.lora`, or an adapter's folder as
    `model.path`. DoRA also needs `sync.fallback_to_full` (R08)."""
    vllm, lora = config.rollout_matching.vllm, config.model.lora
    if config.rollout_matching.rollout_backend != "vllm" or sync_mode(config) != "adapter":
        return
    path = f"{ROLLOUT}.vllm.sync.mode"
    if not vllm.enable_lora:
        remedy = f"set {ROLLOUT}.vllm.enable_lora: true, or sync.mode: full"
        yield Mistake(path=path, found="adapter with enable_lora: false", wanted="enable_lora: true", remedy=remedy)
    if lora is None and not (Path(config.model.path) / "adapter_config.json").is_file():
        remedy = "add model.lora, or set sync.mode: full"
        yield Mistake(path=path, found="adapter sync of a model without adapter", wanted="model.lora", remedy=remedy)
    elif lora is not None and lora.type == "dora" and not vllm.sync.fallback_to_full:
        remedy = "set sync.mode: full, or fallback_to_full: true"
        found = "adapter sync of a DoRA adapter, with fallback_to_full: false"
        yield Mistake(path=path, found=found, wanted="plain LoRA: vLLM does not apply DoRA", remedy=remedy)


RULES: tuple[Rule, ...] = (adapter_sync,)
