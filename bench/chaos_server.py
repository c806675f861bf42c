"""A rollout server without a model, for fault injection: `python -m bench.chaos_server PORT`.

Everything above the engine is the real server: HTTP, gate, service, weight updates. The engine holds tensors instead of
a model. It joins the real groups, receives real buckets and checks their seals. An answer's tokens name the request,
the seed and the weights that made it, so whoever reads an answer can tell which weights it came from. Scores are a
function of the weights too, so a canary means something.

It imports no vLLM, so it starts in seconds, and in milliseconds where it is forked (`serve`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from rollout_server import service, serving
from rollout_server.__main__ import _bind
from rollout_server.config import ServerConfig
from rollout_server.engine import WorkerReply
from rollout_server.openai_api import OpenAICall
from shared.errors import CommunicatorError, DigestError
from shared.generation import Generation, Scores, checked_scores
from shared.sync.buckets import SEAL_BYTES, is_sealed, unpack
from shared.sync.calls import Operation
from shared.sync.group import Communicator, start_join
from shared.wire import (
    BUCKETS,
    Bucket,
    InitCommunicatorCall,
    RequestConfig,
    RolloutInferRequest,
    ScoreItem,
    UpdateWeightsCall,
)

Tensors = Mapping[str, torch.Tensor]


def fingerprint(tensors: Tensors) -> int:
    """Return a number that stands for weights by their content, below 2**31."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found & 0x7FFFFFFF


NAN_TOKEN = 999  # stands for a token to which the weights give no number


def logprobs(tensors: Tensors, token_ids: list[int]) -> list[float]:
    """Return the log-probabilities that these weights give to an answer's tokens: some function of all of them."""
    total = sum(float(tensor.double().sum()) for tensor in tensors.values())
    return [math.nan if token_id == NAN_TOKEN else -abs(total) - 0.01 * token_id for token_id in token_ids]


# arguments: a request, its seed and the weights' fingerprint
Answer = Callable[[RolloutInferRequest, int, int], Generation]


def plain_answer(request: RolloutInferRequest, seed: int, weights: int) -> Generation:
    """Answer plainly: prompt token 1; the answer is the request's number (the last word of its text), the seed and the
    weights."""
    content = request.messages[0].content
    assert isinstance(content, str)
    tokens = [int(content.split()[-1]), seed, weights]
    return Generation(prompt_token_ids=[1], response_token_ids=tokens, text=str(tokens), finish_reason="stop")


@dataclass
class _Receiving:
    """One update on its way in."""

    call: UpdateWeightsCall
    buckets: list[Bucket]
    index: int = 0
    buffer: torch.Tensor | None = None
    arriving: Operation[None] | None = None
    seals: list[bytes] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class TensorEngine:
    """`token_s`: how long an answer takes. See `rollout_server.engine.Engine`."""

    model, dtype, vocab_size, max_model_len = "tensors", "", 1000, 100_000
    architecture: dict[str, str] = {}
    gpus: list[str] = []
    weights = "of the checkpoint"

    def __init__(self, answer: Answer = plain_answer, *, answer_s: float = 0.02) -> None:
        self.dead = False
        self.tensors: dict[str, torch.Tensor] = {}
        self._answer, self._answer_s = answer, answer_s
        self._joining: Operation[Communicator] | None = None
        self._receiving: _Receiving | None = None

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        before = fingerprint(self.tensors)
        await asyncio.sleep(self._answer_s)
        return [self._answer(request, seed or 0, before)]

    def text_of(self, token_ids: list[int]) -> str:
        return str(token_ids)

    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores:
        prompt = self._answer(request, 0, 0).prompt_token_ids
        return checked_scores(prompt, logprobs(self.tensors, response_token_ids))

    async def models(self) -> bytes:
        return b"{}"

    async def complete(self, call: OpenAICall, ver: int) -> bytes:
        return b"{}"

    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
        work: Callable[..., WorkerReply] = getattr(self, f"_{method}", lambda *_: WorkerReply())
        return [await asyncio.to_thread(work, *args)]

    async def reset_caches(self) -> None: ...

    def together(self, items: Sequence[ScoreItem]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def serve_adapter(self, name: str | None) -> None: ...

    def check_answers(self) -> None: ...

    async def watch(self) -> None: ...

    def shutdown(self) -> None:
        self.dead = True

    # ---- as `SyncWorker` -------------------------------------------------------------------------------------------

    def _sync_join(self, init_call: str, host: str) -> WorkerReply:
        self._sync_leave("another learner opened the group")
        call = InitCommunicatorCall.model_validate_json(init_call)
        place = (call.backend, host, call.group_port, call.first_rank, call.world_size, call.timeout_s)
        self._joining = start_join(*place, secret=bytes.fromhex(call.secret))
        return WorkerReply()

    def _sync_poll_join(self, slice_s: float) -> WorkerReply:
        return WorkerReply(done=self._joined().done(slice_s))

    def _sync_start(self, update: str, buckets: str) -> WorkerReply:
        call = UpdateWeightsCall.model_validate_json(update)
        self._receiving = _Receiving(call, BUCKETS.validate_json(buckets))
        self.tensors = {}  # stands for a model that is loaded in place: nobody knows what it holds until all is there
        self._ask()
        return WorkerReply(done=False)

    def _sync_poll(self, slice_s: float) -> WorkerReply:
        receiving, until = self._receiving, time.monotonic() + slice_s
        if receiving is None:
            raise CommunicatorError("no update is under way")
        while receiving.arriving is not None:
            if not receiving.arriving.done(max(0.0, until - time.monotonic())):
                return WorkerReply(done=False)
            self._load(receiving)
        self.tensors = receiving.tensors
        weights = hashlib.blake2b(b"".join(receiving.seals), digest_size=16).hexdigest()
        return WorkerReply(num_tensors=len(receiving.tensors), weights=weights)

    def _sync_leave(self, because: str) -> WorkerReply:
        joining, self._joining, self._receiving = self._joining, None, None
        if joining is not None:
            joining.cancel(CommunicatorError(because))
            if joining.future.exception() is None:
                joining.result().abort()
        return WorkerReply()

    def _joined(self) -> Operation[Communicator]:
        if self._joining is None:
            raise CommunicatorError("this worker is in no group")
        return self._joining

    def _ask(self) -> None:
        receiving = self._receiving
        assert receiving is not None
        receiving.arriving = None
        if receiving.index < len(receiving.buckets):
            communicator = self._joined().result()
            size = receiving.buckets[receiving.index].num_bytes + SEAL_BYTES
            receiving.buffer = torch.empty(size, dtype=torch.uint8)
            receiving.arriving = communicator.start_broadcast(
                receiving.buffer, communicator.world_size - 1, receiving.call.timeout_s
            )

    def _load(self, receiving: _Receiving) -> None:
        buffer, communicator = receiving.buffer, self._joined().result()
        assert buffer is not None
        if not is_sealed(buffer, key=communicator.seal_key, ver=receiving.call.ver, index=receiving.index):
            raise DigestError(f"bucket {receiving.index} arrived with other bytes")
        receiving.seals.append(bytes(buffer[-SEAL_BYTES:].tolist()))
        tensors = unpack(buffer, receiving.buckets[receiving.index].tensors)
        receiving.tensors |= {name: tensor.clone() for name, tensor in tensors}
        receiving.index += 1
        self._ask()


def serve(
    port: int,
    engine: TensorEngine | None = None,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    num_threads: int = 1,
) -> int:
    """Serve in this process until a signal."""
    torch.set_num_threads(num_threads)
    service._versions = dict  # vLLM's would have to be imported
    config = ServerConfig(
        model="tensors", host=host, port=port, shutdown_timeout_s=1.0, queue_timeout_s=10.0, drain_timeout_s=10.0
    )
    listener = _bind(config)
    return asyncio.run(serving.serve(engine or TensorEngine(), config, token, listener, sys.stderr))


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
