"""A full sync over a slow link against the changes alone (`sync.delta`), at the shares of values that steps change.

Two network namespaces are joined by a link of 1 Gbit/s in each direction (`tc`, a token bucket). The learner is in one,
a rollout server in the other. Both are the real ones from `Sync.sync()` down to the worker that receives, checks and
applies. What is not real is the model: the weights have Qwen3's shapes and random values, the engine only copies them
into tensors of its own, as vLLM does on a GPU, and both sides score their canary by a checksum of all weights. So what
vLLM's load and the canary's forward passes take, which is the same in both kinds of sync, is in none of the figures.

A sync's changes are values at random places, as many as one step of training changes at a learning rate
(`results/changed-cpu-2026-11-25.json`; the way of training that changes most, the whole model in float32). Real changes
lie closer together, and take fewer bytes. First syncs of each kind warm up and do not count.

Roles of this module's own program: `serve HOST`, `learn SETTINGS` (JSON).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from bench import chaos_server
from bench.figures import Figure, median, sampled
from bench.models import Size, text_config
from bench.namespaces import network
from bench.runs import last_words, say
from deploy.launch import supervised
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.canary_scores import CanaryScores
from learner.policy.parallel import Ranks
from learner.policy.weights import checksum
from learner.records import EncodedPrompt, Sample, SyncReceipt
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import Canary, CanaryItem
from learner.sync.server_delivery import ServerDelivery
from learner.sync.sync import Sync
from shared.errors import DeadlineError, ServerError
from shared.generation import Scores, checked_scores
from shared.sync.buckets import spec_of
from shared.waits import Deadline
from shared.wire import RolloutInferRequest, TensorSpec

# One step changes these shares of all values that travel.
SHARES: Mapping[str, float] = {"1e-6": 0.0066, "1e-5": 0.0525, "1e-4": 0.214}
WANTED = 0.10  # share of a full sync's seconds, at the first of these rates
LINK = "tbf rate 1gbit burst 1mb latency 100ms"
PORT, GROUP_PORT = 8000, 51216
_TOKEN = "bench"
_TIMEOUT_S = 600.0
_RUN_TIMEOUT_S = 1500.0
_ANSWER = (3, 4)


def measure(folder: Path, *, size: Size = "0.6B", rounds: int = 5, full_rounds: int = 3) -> Iterator[Figure]:
    """Raises NoNamespacesError, ServerError."""
    program = [sys.executable, "-m", "bench.deltas"]
    with network(["server", "learner"]) as (_, nodes), supervised() as processes:
        server, learner = nodes["server"], nodes["learner"]
        for node in (server, learner):
            node.slow(LINK)
        log = folder / "delta-server.log"
        processes.start("server", [*server.enter, *program, "serve", server.address], log=log)
        settings = {"host": server.address, "size": size, "rounds": rounds, "full_rounds": full_rounds}
        say("syncing over a link of 1 Gbit/s")
        command = [*learner.enter, *program, "learn", json.dumps(settings)]
        # As the server: on two cores a thread that waits busily would keep the other program off its core.
        passive = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_RUN_TIMEOUT_S, env=passive)
        if done.returncode:
            raise ServerError("the learner of bench.deltas failed", found=f"exit {done.returncode}; {last_words(log)}")
        yield from figures(json.loads(done.stdout.splitlines()[-1]))


def figures(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Figure]:
    """Figures of the syncs by kind: `full`, and each of SHARES."""
    full = [sync["seconds"] for sync in found["full"]]
    num_bytes = found["full"][0]["num_bytes"]
    made = [
        sampled(f"full sync of {num_bytes / 1e9:.2f} GB over 1 Gbit/s", full, "s"),
        Figure(name="the same as a rate", value=num_bytes * 8 / 1e9 / median(full), unit="Gbit/s"),
    ]
    for rate, share in SHARES.items():
        seconds = [sync["seconds"] for sync in found[rate]]
        sent = median([sync["sent_bytes"] for sync in found[rate]]) / num_bytes
        ratio = median(seconds) / median(full)
        name = f"changes of a step at {rate} ({share:.1%} of the values)"
        wanted = WANTED if rate == next(iter(SHARES)) else None
        made += [
            sampled(f"{name}: sync", seconds, "s"),
            Figure(name=f"{name}: against a full sync", value=ratio, unit="ratio", wanted=wanted, at_least=False),
            Figure(name=f"{name}: bytes, against a full sync's", value=sent, unit="ratio"),
            sampled(f"{name}: pause of the server", [sync["pause_s"] for sync in found[rate]], "s"),
        ]
    pauses = [sync["pause_s"] for sync in found["full"]]
    return [*made, sampled("pause of the server in a full sync", pauses, "s")]


def logprobs(sums: Iterable[torch.Tensor]) -> list[float]:
    """Return the log-probabilities that weights with these checksums give to the answer."""
    total = sum(map(int, sums))
    return [-1.0 - (total // 1000**i) % 1000 for i in range(len(_ANSWER))]


# ---- the server ----------------------------------------------------------------------------------------------------


class CopiedInPlace:
    """A `worker.Load` into tensors that stay where they are, as vLLM's on a GPU."""

    runs_meanwhile = False

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors, self._num_loaded = tensors, 0

    def open(self) -> None:
        """Nothing to do."""

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._tensors.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            self._num_loaded += 1

    def finish(self) -> int:
        return self._num_loaded

    def close(self) -> None:
        """Nothing is half done."""


class WorkerEngine(chaos_server.TensorEngine):
    """An engine whose only worker is the real one."""

    dtype = "bfloat16"

    def __init__(self) -> None:
        super().__init__()
        from rollout_server.engine import WorkerReply  # the worker's module imports vLLM
        from rollout_server.worker import SyncWorker

        class Worker(SyncWorker):
            device, rank = torch.device("cpu"), 0
            vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0, world_size=1))
            model_runner = SimpleNamespace(kv_caches=[])
            tensors = self.tensors

            def _load(self, mode: str) -> CopiedInPlace:
                return CopiedInPlace(self.tensors)

        self._worker, self._read = Worker(), WorkerReply.model_validate_json

    async def on_workers(self, method: str, *args: object) -> list[Any]:
        reply = self._read(await asyncio.to_thread(getattr(self._worker, method), *args))
        if reply.error is not None:
            raise reply.error.to_exception()
        return [reply]

    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores:
        return checked_scores([1], logprobs(map(checksum, self.tensors.values())))


# ---- the learner ---------------------------------------------------------------------------------------------------


class Values:
    """A `WeightSource` with a model's shapes and random bfloat16 values."""

    def __init__(self, size: Size) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text_config(size), dtype=torch.bfloat16)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=self._generator)
            for name, shape in shapes.items()
        }

    def change(self, share: float) -> None:
        """Move values at random places to their neighbours."""
        for tensor in self.tensors.values():
            words = tensor.view(-1).view(torch.int16)
            places = (torch.rand(words.shape, generator=self._generator) < share).nonzero().view(-1)
            words[places] ^= 1

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.tensors.items()]

    def scores(self, dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        sums = {name: checksum(tensor) for name, tensor in self.tensors.items()}
        found = [logprobs(sums.values())]
        return CanaryScores(read=lambda: found, merge_gap=0.0, checksums=sums)


def learn(*, host: str, size: Size, rounds: int, full_rounds: int) -> dict[str, list[dict[str, float]]]:
    """The syncs that count, by kind."""
    values = Values(size)
    url = f"http://{host}:{PORT}"
    _await(url)
    found: dict[str, list[dict[str, float]]] = {"full": _sync(url, values, "off", [(0.01, full_rounds)])[0]}
    kinds = _sync(url, values, "on", [(share, rounds) for share in SHARES.values()])
    return found | dict(zip(SHARES, kinds, strict=True))


def _sync(url: str, values: Values, delta: str, kinds: Sequence[tuple[float, int]]) -> list[list[dict[str, float]]]:
    server = {"servers": [{"base_url": url, "group_port": GROUP_PORT}], "timeout_s": _TIMEOUT_S}
    vllm = {"mode": "server", "server": server, "sync": {"delta": delta, "canary_samples": 1}}
    backend = ServerBackend(RolloutMatchingConfig.model_validate({"vllm": vllm}), run_seed=0, token=_TOKEN)
    backend.connect()
    messages = ({"role": "user", "content": "0"},)
    sample = Sample(sample_id="0", messages=messages, images=(), objects=(), width=1, height=1)
    prompt = EncodedPrompt(token_ids=(1,), vision=None)
    canary = Canary(
        items=[CanaryItem(sample=sample, prompt=prompt, response_token_ids=_ANSWER)],
        scorer=values.scores,
        tolerance=0.01,
    )
    device = torch.device("cpu")
    sync = Sync(ServerDelivery(backend, backend.config.vllm, canary=canary, ranks=Ranks(), device=device), values)
    found = []
    try:
        sync.sync()
        for share, rounds in kinds:
            receipts = []
            for _ in range(1 + rounds):
                values.change(share)
                receipts.append(sync.sync())
                say(f"{delta} {share:.2%}: {receipts[-1].seconds:.2f} s, {receipts[-1].sent_bytes} bytes")
            found.append([_numbers(receipt) for receipt in receipts[1:]])
    finally:
        sync.close()
        backend.close()
    return found


def _numbers(receipt: SyncReceipt) -> dict[str, float]:
    return {name: getattr(receipt, name) for name in ("seconds", "num_bytes", "sent_bytes", "pause_s")}


def _await(url: str) -> None:
    deadline, said = Deadline(_TIMEOUT_S), ""
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while not deadline.is_over():
            try:
                if client.get(f"{url}/health/").status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError as error:
                said = str(error)
            time.sleep(0.2)
    raise DeadlineError("the server of bench.deltas did not come up", found=said, wanted=f"{url}/health/ answers")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        # All cores, as a server on a machine of its own: learner and server mostly take turns.
        threads = os.cpu_count() or 1
        sys.exit(chaos_server.serve(PORT, WorkerEngine(), host=sys.argv[2], token=_TOKEN, num_threads=threads))
    print(json.dumps(learn(**json.loads(sys.argv[2]))))
