"""Every HTTP body between learner and rollout server. Unknown fields are refused; images are strings.

`/infer/` takes ms-swift's `RolloutInferRequest` and `RequestConfig`, and nearly answers its `RolloutOutput`.
Each request of an infer call carries a `uuid`; a server that has answered that uuid answers the same again, so a
retry after a lost reply never makes a second rollout.
"""

from __future__ import annotations

import uuid as uuid_module
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from shared.errors import ProjectError, error_classes

PROTOCOL_VERSION = 2
TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"  # the environment variable that holds the servers' bearer token


class WireModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorBody(WireModel):
    """A `ProjectError` as JSON; `error` is the class name."""

    error: str
    what: str
    found: str = ""
    wanted: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, error: ProjectError) -> ErrorBody:
        return cls(
            error=type(error).__name__, what=error.what, found=error.found, wanted=error.wanted, remedy=error.remedy
        )

    def to_exception(self) -> ProjectError:
        """The error that was raised on the other side (its base class where this side does not know the name)."""
        cls = error_classes().get(self.error, ProjectError)
        return cls(self.what, found=self.found, wanted=self.wanted, remedy=self.remedy)


# ---- /infer/ -------------------------------------------------------------------------------------------------------


class ContentPart(WireModel):
    type: Literal["text", "image"]
    text: str | None = None
    image: str | None = None


class Message(WireModel):
    """One chat turn. A string may name images by the placeholder `<image>`, in the order of the request's `images`."""

    role: Literal["system", "user", "assistant"]
    content: str | list[ContentPart]


class RolloutInferRequest(WireModel):
    """One sample to roll out. `images` are local paths, data URLs, base64 strings or http(s) URLs."""

    messages: list[Message] = Field(min_length=1)
    images: list[str] = []
    uuid: str = Field(default_factory=lambda: uuid_module.uuid4().hex)
    data_dict: dict[str, Any] = {}


class RequestConfig(WireModel):
    """How to decode. `seed` is that of the call's first request; request `i` is seeded with `seed + i` mod 2**31-1."""

    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)  # -1 and 0: off
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    seed: int | None = Field(default=None, ge=0)
    stop: list[str] = []
    n: Literal[1] = 1


class InferCall(WireModel):
    infer_requests: list[RolloutInferRequest]
    request_config: RequestConfig = RequestConfig()


class ChatMessage(WireModel):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(WireModel):
    index: int = 0
    message: ChatMessage
    finish_reason: str  # "stop", "length"
    token_ids: list[int]


class Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletionResponse(WireModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    usage: Usage


class RolloutInfos(WireModel):
    ver: int
    seed: int | None
    server_id: str
    uuid: str


class RolloutOutput(WireModel):
    """One rollout. `response_token_ids` are stop-trimmed; `prompt_token_ids` are those that the engine consumed."""

    response: ChatCompletionResponse
    response_token_ids: list[int]
    prompt_token_ids: list[int]
    rollout_infos: RolloutInfos


# ---- weight sync ---------------------------------------------------------------------------------------------------


class ScoreItem(WireModel):
    request: RolloutInferRequest
    response_token_ids: list[int] = Field(min_length=1)


class ScoreCall(WireModel):
    items: list[ScoreItem] = Field(min_length=1)


class ScoreReply(WireModel):
    """`logprobs[i][j]`: natural log-probability of `items[i].response_token_ids[j]` given all before it."""

    ver: int
    logprobs: list[list[float]]
    prompt_token_ids: list[list[int]]


class InitCommunicatorCall(WireModel):
    """Join the group of one learner (the last rank) and the workers of its servers on this machine, server by server.

    They meet at `group_port` of the server's own configured address, where rank 0 listens; the call returns when all
    have joined.
    """

    incarnation: str  # a random id of this group, and its name where it meets; a new one replaces the old group
    group_port: int = Field(ge=1, le=65535)
    first_rank: int = Field(default=0, ge=0)  # of this server's workers
    world_size: int = Field(ge=2)  # of the group, learner included
    backend: Literal["nccl", "gloo"]
    timeout_s: float = Field(gt=0)


class TensorSpec(WireModel):
    name: str  # as in the checkpoint (Hugging Face name); an adapter's: `{module}.lora_A.weight`, `.lora_B.weight`
    dtype: str  # "bfloat16", "float32", ...
    shape: list[int]


class Bucket(WireModel):
    """Tensors that travel as one contiguous byte string, in order, with a seal behind them (`weights.py`)."""

    tensors: list[TensorSpec]
    num_bytes: int  # without the seal


BUCKETS = TypeAdapter(list[Bucket])


class UpdateWeightsCall(WireModel):
    incarnation: str
    ver: int = Field(ge=0)  # the version served once this call returned
    mode: Literal["full", "adapter"] = "full"  # `adapter`: on the base weights that the last full update brought
    buckets: list[Bucket]
    canary: list[ScoreItem] = []  # to be scored with the new weights, before anyone else is served
    timeout_s: float = Field(gt=0)


class UpdateWeightsReply(WireModel):
    ver: int
    num_bytes: int
    num_tensors: int
    seconds: float
    drain_s: float  # waiting for calls in flight
    transfer_s: float  # caches, receive, digest, load, coverage, canary
    scores: ScoreReply  # of the canary


class CloseCommunicatorCall(WireModel):
    incarnation: str


# ---- state ---------------------------------------------------------------------------------------------------------


class WorldSizeReply(WireModel):
    world_size: int = Field(ge=1)  # tensor-parallel size x data-parallel size


class ServerStatus(WireModel):
    protocol: int = PROTOCOL_VERSION
    server_id: str
    model: str
    dtype: str = ""  # of the served weights, as in `TensorSpec`; "": not told, and weights travel as they are trained
    architecture: dict[str, str] = {}  # sizes of the model, see `architecture.py`; {}: not told
    vocab_size: int
    max_model_len: int
    gate: Literal["serving", "draining", "updating", "poisoned"]
    poisoned_because: str = ""
    ver: int
    incarnation: str = ""
    world_size: int
    group_host: str = ""  # where its workers meet a learner; "": not told, and it gets a group of its own
    gpus: list[str] = []  # its workers', by their UUIDs; []: none
    max_lora_rank: int = 0  # of an adapter that the server takes; 0: it takes none
    in_flight: int
    waiting: int
    versions: dict[str, str]  # python, torch, vllm, transformers, cuda, nccl
