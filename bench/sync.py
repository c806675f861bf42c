"""Seconds of a weight sync with every check, from the learner's `sync()` to verified and serving.

The learner is this process; servers are processes. Weights change before every sync, so a server that kept old weights
fails its canary. First syncs warm up and do not count.

- `full`: full syncs between GPUs of a text model of real size. The learner has the first GPU, each server one of the
  next. Figures: seconds, gigabytes per second, and their share of the raw broadcast. The raw broadcast sends as many
  bytes in buckets of the same size with the product's own communicator, from the first GPU to the second, and does
  nothing else. With one server also the pause of the server, and TRL's client and server, in the same run on the same
  GPUs. With more servers also the time for all at once against one.
- `adapters`: adapter sync against full sync on the demo's model: seconds and bytes of both, with one server and the
  same LoRA policy. First merged weights, then the adapter alone. Sending the base weights does not count.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.figures import Figure, median, sampled
from bench.models import Size, demo_model, demo_scenes, text_model
from bench.runs import Server, TrlServer, serve, served_by, start_server
from bench.training import demo_run
from deploy.launch import Processes, supervised
from learner.config.load import load_config
from learner.config.schema import RunConfig
from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.data.splits import load_samples
from learner.policy.canary_scores import CanaryScorer
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.records import Sample, SyncReceipt
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CANARY_SAMPLES, Canary, CanaryItem
from learner.sync.server_delivery import ServerDelivery
from learner.sync.sync import Sync
from learner.tasks.detection.task import DetectionTask
from learner.wiring.connect import connect_sync
from shared.addresses import free_port
from shared.config.parse import write_yaml
from shared.sync.group import Communicator, start_join

WANTED_S = 0.050
WANTED_AGAINST_TRL = 1.8
WANTED_OF_ONE_SERVER = 1.5
WARM_UP, ROUNDS = 3, 12
BUCKET_BYTES = 512 << 20
KV_CACHE_BYTES = 16 << 30


def full(folder: Path, *, size: Size = "4B", servers: int = 1) -> Iterator[Figure]:
    """Syncs to one server, and to `servers` at once if that is more than one."""
    model = text_model(folder, size)
    with supervised() as processes:
        starting = [_start_server(processes, folder, model, i) for i in range(servers)]
        # TRL's server shares the first server's GPU. Neither works while the other is measured.
        trl = _start_trl(processes, folder, model) if servers == 1 and TrlServer.is_installed() else None
        config = ModelConfig(path=str(model), dtype="bfloat16")
        policy = load_policy(config, device=torch.device("cuda:0"), bf16=True)
        num_parameters = sum(p.numel() for p in policy.model.parameters())
        rates = raw_rates(2 * num_parameters, BUCKET_BYTES)
        for server in starting:
            server.wait_ready()
        plain = _full_syncs(policy, starting[:1])
        found = full_figures(f"{num_parameters / 1e9:.2f}B", plain, rates)
        yield from found
        if servers == 1:
            yield sampled("pause of the server", [receipt.pause_s for receipt in plain], "s")
        if servers > 1:
            yield several_figure(found[0], _full_syncs(policy, starting), servers)
        if trl is not None:
            yield from trl_figures(found[0], _time_trl(trl, policy))


def _start_server(processes: Processes, folder: Path, model: Path, index: int) -> Server:
    settings = {
        "model": str(model),
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.4,
        "engine_args": {"kv_cache_memory_bytes": KV_CACHE_BYTES},
    }
    return start_server(processes, folder, f"sync-server-{index}", settings, devices=[1 + index])


def _start_trl(processes: Processes, folder: Path, model: Path) -> TrlServer:
    log = folder / "trl-sync.log"
    return TrlServer(processes, model, device=1, max_num_seqs=128, kv_cache_bytes=KV_CACHE_BYTES, log=log)


def _full_syncs(policy: Policy, servers: Sequence[Server]) -> list[SyncReceipt]:
    vllm = served_by(*servers, sync={"bucket_bytes": BUCKET_BYTES})
    vllm["server"]["timeout_s"] = 120.0
    backend = ServerBackend(RolloutMatchingConfig.model_validate({"vllm": vllm}), run_seed=0)
    backend.connect()
    config = backend.config.vllm
    items = [_canary(policy, i) for i in range(CANARY_SAMPLES)]
    scorer = CanaryScorer(policy, [(item.prompt, item.response_token_ids) for item in items])
    canary = Canary(items=items, scorer=scorer, tolerance=config.sync.canary_tolerance)
    sync = Sync(ServerDelivery(backend, config, canary=canary, ranks=Ranks(), device=policy.device), policy)
    receipts = []
    try:
        for _ in range(WARM_UP + ROUNDS):
            _change_all(policy)
            receipts.append(sync.sync())
        return receipts[WARM_UP:]
    finally:
        sync.close()
        backend.close()


def _canary(policy: Policy, index: int) -> CanaryItem:
    messages = ({"role": "user", "content": f"{index}: name every digit, and where it is."},)
    sample = Sample(sample_id=str(index), messages=messages, images=(), objects=(), width=1, height=1)
    return CanaryItem(sample=sample, prompt=policy.encoder.encode(sample), response_token_ids=tuple(range(20, 84)))


@torch.no_grad()
def _change_all(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    torch.cuda.synchronize()


def full_figures(name: str, receipts: Sequence[SyncReceipt], rates: Sequence[float]) -> list[Figure]:
    """Figures of syncs to one server. `rates`: of the raw broadcast, in GB/s."""
    seconds = [receipt.seconds for receipt in receipts]
    gaps = [receipt.canary_gap for receipt in receipts]
    rate = receipts[0].num_bytes / median(seconds) / 1e9
    return [
        sampled(f"sync, {name} to one server, all checks included", seconds, "s", at_most=WANTED_S),
        Figure(name="the same as a rate", value=rate, unit="GB/s"),
        sampled("raw broadcast of as many bytes", rates, "GB/s"),
        Figure(name="what the whole sync keeps of the raw broadcast", value=rate / median(rates), unit="share"),
        Figure(name="canary gap, worst", value=max(gaps), unit="nats per token", samples=gaps),
    ]


def several_figure(one: Figure, receipts: Sequence[SyncReceipt], num_servers: int) -> Figure:
    ratios = [receipt.seconds / one.value for receipt in receipts]
    name = f"sync to {num_servers} servers at once, against one"
    return sampled(name, ratios, "times", at_most=WANTED_OF_ONE_SERVER)


def _time_trl(server: TrlServer, policy: Policy) -> list[float]:
    client: Any = server.client()
    client.init_communicator(device=policy.device)
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        _change_all(policy)
        begin = time.perf_counter()
        client.update_model_params(policy.model)
        client.reset_prefix_cache()
        seconds.append(time.perf_counter() - begin)
    client.close_communicator()
    server.stop()
    return seconds[WARM_UP:]


def trl_figures(ours: Figure, seconds: Sequence[float]) -> list[Figure]:
    ratio = median(seconds) / ours.value
    return [
        sampled("TRL's update of the model, nothing checked", seconds, "s"),
        Figure(name="TRL's seconds over ours", value=ratio, unit="times", wanted=WANTED_AGAINST_TRL),
    ]


# ---- the raw broadcast ---------------------------------------------------------------------------------------------

_JOIN_TIMEOUT_S = 120.0


def raw_rates(num_bytes: int, bucket_bytes: int, *, passes: int = 6) -> list[float]:
    """Return GB/s of each pass after the first, which warms up. The receiver is a process of its own."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    num_buckets = -(-num_bytes // bucket_bytes)
    peer = context.Process(target=_receive, args=(port, num_buckets, bucket_bytes, passes, there), daemon=True)
    peer.start()
    group = start_join("nccl", "127.0.0.1", port, 1, 2, _JOIN_TIMEOUT_S, "cuda:0", secret=b"raw").result()
    seconds = []
    for _ in range(passes):
        assert here.recv() == "ready"
        begin = time.perf_counter()
        _broadcast(group, num_buckets, bucket_bytes)
        seconds.append(time.perf_counter() - begin)
    group.close()
    peer.join(_JOIN_TIMEOUT_S)
    return [num_buckets * bucket_bytes / s / 1e9 for s in seconds[1:]]


def _receive(port: int, num_buckets: int, bucket_bytes: int, passes: int, parent: Connection) -> None:
    group = start_join("nccl", "127.0.0.1", port, 0, 2, _JOIN_TIMEOUT_S, "cuda:1", secret=b"raw").result()
    for _ in range(passes):
        parent.send("ready")
        _broadcast(group, num_buckets, bucket_bytes)
    group.close()


def _broadcast(group: Communicator, num_buckets: int, bucket_bytes: int) -> None:
    buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device) for _ in range(3)]
    sent = [group.start_broadcast(buffers[i % len(buffers)], src=1) for i in range(num_buckets)]
    for operation in sent:
        operation.result()


# ---- adapters ------------------------------------------------------------------------------------------------------

ADAPTER_WARM_UP = 2
RANK = 16
# The server can adapt the language model, not the vision tower.
_TARGETS = r".*language_model.*_proj"


def adapters(folder: Path, *, num_syncs: int = 15) -> list[Figure]:
    """`num_syncs` syncs of each kind."""
    model, data = demo_model(folder), demo_scenes(folder)
    settings = {"model": str(model), "enable_lora": True, "max_lora_rank": RANK, "allowed_image_roots": [str(data)]}
    with supervised() as processes:
        server = serve(processes, folder, "adapters-server", settings)
        configs = [adapter_run(mode, model, data, folder, server) for mode in ("full", "adapter")]
        policy = load_policy(configs[0].model, device=torch.device("cpu"), bf16=True)
        full_syncs, adapter_syncs = (_syncs(config, policy, num_syncs) for config in configs)
    return adapter_figures(full_syncs, adapter_syncs)


def adapter_figures(full: Sequence[SyncReceipt], adapter: Sequence[SyncReceipt]) -> list[Figure]:
    """Figures of the syncs that count."""
    sides = {"full sync, merged": full, f"adapter sync, rank {RANK}": adapter}
    seconds = {name: [receipt.seconds for receipt in side] for name, side in sides.items()}
    ratio = adapter[0].num_bytes / full[0].num_bytes
    gap = max(receipt.canary_gap for receipt in adapter)
    return [
        *(sampled(name, found, "s") for name, found in seconds.items()),
        *(Figure(name=f"{name}: bytes", value=side[0].num_bytes / 2**20, unit="MiB") for name, side in sides.items()),
        Figure(name="bytes of an adapter sync against a full one", value=ratio, unit="ratio"),
        Figure(name="largest canary gap of an adapter sync", value=gap, unit="nats per token"),
    ]


def _syncs(config: RunConfig, policy: Policy, num_syncs: int) -> list[SyncReceipt]:
    """The receipts of syncs after the warm-up, with a new connection."""
    task = DetectionTask(config.task, policy.tokenizer)
    samples = load_samples(config.data, config.data.train, task)
    backend = ServerBackend(config.rollout_matching, run_seed=config.training.seed)
    try:
        backend.connect()
        sync = connect_sync(config, policy, backend, task, samples)
        receipts = []
        for _ in range(ADAPTER_WARM_UP + num_syncs):
            _change_trainable(policy)
            receipts.append(sync.sync())
        sync.close()
    finally:
        backend.close()
    return receipts[ADAPTER_WARM_UP:]


@torch.no_grad()
def _change_trainable(policy: Policy) -> None:
    for _, parameter in policy.trainable:
        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def adapter_run(mode: str, model: Path, data: Path, folder: Path, server: Server) -> RunConfig:
    vllm = served_by(server, enable_lora=True, sync={"mode": mode, "fallback_to_full": False})
    config = demo_run(model, data, folder / "run", vllm, steps=1, batch_size=1)
    config["model"]["lora"] = {"r": RANK, "target_modules": _TARGETS}
    path = folder / f"adapters-{mode}.yaml"
    write_yaml(path, config, "bench")
    return load_config(str(path), world_size=1, env={})
