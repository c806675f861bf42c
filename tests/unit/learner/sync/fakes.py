"""A rollout server's half of the weight sync, over respx and a broadcast group made of a queue.

`FakeServer` receives the buckets that it was told of, checks digests, keeps the tensors, and scores with them, so that
a canary really depends on the bytes that arrived.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import respx
import torch

from learner.records import EncodedPrompt
from learner.sync.canary import CanaryItem
from shared.errors import CanaryError, CommunicatorError, CoverageError, DigestError, ProjectError
from shared.sync.buckets import SEAL_BYTES, is_sealed, seal_key, spec_of, unpack
from shared.sync.calls import Operation
from shared.wire import ExpectScoresCall, TensorSpec, UpdateWeightsCall
from tests.unit.learner.rollout import fakes

PROMPT_IDS = (5, 6, 7)


class Weights:
    """A `WeightSource` of a few tensors; `step` changes them all."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "embed": torch.randn(40, 8, generator=generator),
            "layer.weight": torch.randn(8, 8, generator=generator),
            "layer.bias": torch.randn(8, generator=generator),
            "positions": torch.arange(5),
        }

    def step(self) -> None:
        for name in ("embed", "layer.weight", "layer.bias"):
            self.tensors[name] = self.tensors[name] + 0.25

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, _cast(tensor, dtype)) for name, tensor in self.tensors.items())

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return [spec_of(name, _cast(tensor, dtype)) for name, tensor in self.tensors.items()]


class Adapter:
    """An `AdapterSource` on one layer of some `Weights`, whose sum is that of what it adds when merged."""

    rank = 8

    def __init__(self, base: Weights) -> None:
        self.base, self.obstacle = base, ""
        self._added = torch.zeros(8, 8)

    def step(self) -> None:
        self._added = self._added + 0.5

    @property
    def merged(self) -> Weights:
        merged = Weights()
        merged.tensors = self.base.tensors | {"layer.weight": self.base.tensors["layer.weight"] + self._added}
        return merged

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer.lora_A.weight", self._added
        yield "layer.lora_B.weight", torch.zeros(8, 8)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.named_weights(dtype)]


class Merged:
    """The `WeightSource` of what an adapter amounts to now."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._adapter.merged.tensors

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return self._adapter.merged.named_weights(dtype)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return self._adapter.merged.weight_specs(dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype or tensor.dtype) if tensor.is_floating_point() else tensor


def logprobs(tensors: dict[str, torch.Tensor], token_ids: Sequence[int]) -> list[float]:
    """Return some function of all weights and the tokens."""
    total = sum(float(tensor.double().sum()) for tensor in tensors.values())
    return [-abs(total) - 0.01 * token_id for token_id in token_ids]


def canary_items(n: int = 2) -> list[CanaryItem]:
    prompt = EncodedPrompt(token_ids=PROMPT_IDS, vision=None)
    return [CanaryItem(sample=fakes.sample(i), prompt=prompt, response_token_ids=(3, 4 + i)) for i in range(n)]


class FakeGroup:
    """Hands each broadcast to its server's queue and returns when the server took it."""

    def __init__(self, server: FakeServer, rank: int, world_size: int) -> None:
        self.server, self.rank, self.world_size = server, rank, world_size
        self.inbox: queue.Queue[tuple[torch.Tensor, threading.Event]] = queue.Queue()
        self.aborted = threading.Event()
        self.closed = False

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> Operation[None]:
        assert src == self.rank == self.world_size - 1, "the learner is the last rank, and the source"
        taken = threading.Event()
        if not self.server.drops_the_wire:
            self.inbox.put((tensor.clone(), taken))

        def until_taken() -> None:
            if self.server.drops_the_wire:
                raise CommunicatorError("peer closed the connection")
            while not taken.wait(0.005):
                if self.aborted.is_set():
                    raise CommunicatorError("aborted")

        return Operation(until_taken, 30.0, "broadcasting")

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeServer:
    """Set the fields below to make it misbehave; `log` says what came, in order."""

    router: respx.MockRouter
    base_url: str
    group_port: int
    world_size: int = 2
    backend: str = "tcp"  # that it expects the learner to ask for
    ver: int = 0
    dtype: str = ""
    max_lora_rank: int = 0
    refuses_adapter: ProjectError | None = None
    refuses_init: ProjectError | None = None
    refuses_update: ProjectError | None = None
    hangs: str = ""  # in this call: "init" or "update"
    fails_after_bucket: tuple[int, ProjectError] | None = None
    flips_a_bit: bool = False
    drops_the_wire: bool = False
    misses: str = ""  # a tensor that it does not load, in silence
    prompt_ids: tuple[int, ...] = PROMPT_IDS
    score_delta: float = 0.0
    log: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    num_inits: int = 0
    groups: list[FakeGroup] = field(default_factory=list)
    secrets: list[bytes] = field(default_factory=list)
    updates: list[UpdateWeightsCall] = field(default_factory=list)
    expected: ExpectScoresCall | None = None
    gate: str = "serving"
    server_id: str = "fake"

    def __post_init__(self) -> None:
        get, post, url = self.router.get, self.router.post, self.base_url
        get(f"{url}/health/").respond(200)
        get(f"{url}/status/").mock(side_effect=self._status)
        get(f"{url}/get_world_size/").respond(200, json={"world_size": self.world_size})
        post(f"{url}/init_communicator/").mock(side_effect=self._init)
        post(f"{url}/update_weights/").mock(side_effect=self._update)
        post(f"{url}/expect_scores/").mock(side_effect=self._expect)
        post(f"{url}/score/").mock(side_effect=self._score)
        post(f"{url}/close_communicator/").mock(side_effect=self._close)

    def _status(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=self._state())

    def _state(self) -> dict[str, Any]:
        state = {"ver": self.ver, "world_size": self.world_size, "dtype": self.dtype, "gate": self.gate}
        state["server_id"] = self.server_id
        return fakes.status(**state, max_lora_rank=self.max_lora_rank)

    async def _init(self, request: httpx.Request) -> httpx.Response:
        call = json.loads(request.content)
        assert (call["group_port"], call["first_rank"], call["world_size"]) == (self.group_port, 0, self.world_size + 1)
        assert call["backend"] == self.backend
        self.log.append("init")
        await self._hang("init")
        if self.refuses_init:
            return fakes.error(self.refuses_init)
        self.num_inits += 1
        while len(self.groups) < self.num_inits:  # open until the learner has joined
            await asyncio.sleep(0.005)
        return httpx.Response(200, json={})

    async def _update(self, request: httpx.Request) -> httpx.Response:
        call = UpdateWeightsCall.model_validate_json(request.content)
        self.updates.append(call)
        self.log.append(f"update {call.ver}")
        await self._hang("update")
        if self.refuses_update:
            return fakes.error(self.refuses_update)
        if call.mode == "adapter" and self.refuses_adapter:
            return fakes.error(self.refuses_adapter)
        try:
            received = await asyncio.to_thread(self._receive, call, len(self.groups))
        except ProjectError as error:
            return fakes.error(error)
        if call.mode == "full":  # takes the adapter off
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if ".lora_" not in name}
        self.tensors |= {name: tensor for name, tensor in received.items() if name != self.misses}
        scores = self._scores([item.response_token_ids for item in call.canary])
        try:
            await self._judge(call, scores["logprobs"])
        except ProjectError as error:
            return fakes.error(error)
        self.ver = call.ver
        num_bytes = sum(bucket.num_bytes for bucket in call.buckets)
        reply = {"ver": call.ver, "num_bytes": num_bytes, "num_tensors": len(received)}
        times = {"seconds": 0.1, "drain_s": 0.0, "pause_s": 0.01 * self.world_size}
        times |= {"load_s": 0.003 * self.world_size, "canary_s": 0.006 * self.world_size}
        return httpx.Response(200, json=reply | times | {"scores": {**scores, "ver": call.ver}})

    async def _hang(self, where: str) -> None:
        while self.hangs == where:
            await asyncio.sleep(0.01)

    async def _expect(self, request: httpx.Request) -> httpx.Response:
        self.expected = ExpectScoresCall.model_validate_json(request.content)
        return httpx.Response(200, json={})

    async def _judge(self, call: UpdateWeightsCall, found: list[list[float]]) -> None:
        """Compare the scores; only then does it serve the new version."""
        if call.base_of_adapter:
            return
        async with asyncio.timeout(60.0):
            while self.expected is None or (self.expected.incarnation, self.expected.ver) != (
                call.incarnation,
                call.ver,
            ):
                await asyncio.sleep(0.005)
        gaps = [
            abs(a - b)
            for ours, theirs in zip(found, self.expected.logprobs, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        if not sum(gaps) / len(gaps) <= self.expected.tolerance:
            raise CanaryError("the served model is not the learner's")

    def _receive(self, call: UpdateWeightsCall, num_groups: int) -> dict[str, torch.Tensor]:
        """Receive on a thread, which may begin late: the last of `num_groups` was left then."""
        received: dict[str, torch.Tensor] = {}
        inbox, key = self.groups[num_groups - 1].inbox, seal_key(self.secrets[num_groups - 1])
        for i, bucket in enumerate(call.buckets):
            if self.fails_after_bucket and self.fails_after_bucket[0] == i:
                raise self.fails_after_bucket[1]
            try:
                buffer, taken = inbox.get(timeout=0.9 * call.timeout_s)
            except queue.Empty:
                raise CommunicatorError("no bucket came") from None
            taken.set()
            if self.flips_a_bit:
                buffer[0] ^= 1
            assert buffer.numel() == bucket.num_bytes + SEAL_BYTES
            if not is_sealed(buffer, key=key, ver=call.ver, index=i):
                raise DigestError(f"bucket {i} differs")
            received |= {name: tensor.clone() for name, tensor in unpack(buffer, bucket.tensors)}
        if not received:
            raise CoverageError("nothing was written")
        return received

    def _score(self, request: httpx.Request) -> httpx.Response:
        items = json.loads(request.content)["items"]
        return httpx.Response(200, json=self._scores([item["response_token_ids"] for item in items]))

    def _scores(self, answers: Sequence[Sequence[int]]) -> dict[str, Any]:
        scores = [[p + self.score_delta for p in logprobs(self.tensors, answer)] for answer in answers]
        return {"ver": self.ver, "logprobs": scores, "prompt_token_ids": [self.prompt_ids] * len(answers)}

    def _close(self, request: httpx.Request) -> httpx.Response:
        self.log.append("close")
        return httpx.Response(200, json={})


def joiner(servers: Sequence[FakeServer]) -> Any:
    """Return a `shared.sync.group.start_join` into the fake servers' queues."""
    by_port = {server.group_port: server for server in servers}

    def start_join(
        backend: str,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: Any = "cpu",
        *,
        secret: bytes,
        allow_shared_gpu: bool = False,
    ) -> Operation[FakeGroup]:
        server = by_port[port]
        assert (rank, world_size) == (server.world_size, server.world_size + 1)
        assert host == httpx.URL(server.base_url).host
        made = FakeGroup(server, rank, world_size)
        server.groups.append(made)
        server.secrets.append(secret)
        return Operation(lambda: made, timeout_s, "joining")

    return start_join
