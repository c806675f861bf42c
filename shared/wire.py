"""Every HTTP body between learner and rollout server. Unknown fields are refused; images are strings.

`/infer/` takes ms-swift's `RolloutInferRequest` and `RequestConfig` as its clients write them (null stands for a field
that was left out). `/infer/` answers ms-swift's `RolloutOutput`: a list in request order, or with `Accept:
application/x-ndjson` one `AnswerLine` per request, as soon as the request ends. A field that this server does not
support must be empty. Each request of an infer call carries a `uuid`. A server that has answered a uuid gives the same
answer again, so a retry after a lost reply never makes a second rollout.
"""

from __future__ import annotations

import uuid as uuid_module
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, model_validator

from shared.errors import ProjectError, error_classes

# Raise this number with every new field. Both sides refuse unknown fields, but only an error about this number names
# the real cause: different versions.
PROTOCOL_VERSION = 8
NDJSON = "application/x-ndjson"  # media type of an answer with one JSON object per line

T = TypeVar("T")
# Validation stops at the first wrong item: one error per item of a long wrong list would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
Name = Annotated[str, Field(max_length=512)]
MAX_RANKS = 4096  # max ranks of one broadcast group
MAX_ANSWERS = 1024  # max answers to one request of `/infer/`
MAX_PARTS = 4096  # max turns of one request, and max parts of one turn
MAX_TIMEOUT_S = 86_400.0


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
        """Return the error that was raised on the other side; a ProjectError if this side does not know its class."""
        cls = error_classes().get(self.error, ProjectError)
        return cls(self.what, found=self.found, wanted=self.wanted, remedy=self.remedy)


# ---- /infer/ -------------------------------------------------------------------------------------------------------


def _document_nulls(schema: dict[str, Any], model: type[ClientModel]) -> None:
    """Say in the JSON schema of a `ClientModel` which fields may be null."""
    schema["additionalProperties"] = {"type": "null"}
    properties = schema.get("properties", {})
    for name in filter(model.may_be_absent, properties):
        own = {key: properties[name].pop(key) for key in ("default", "description") if key in properties[name]}
        properties[name] = {"anyOf": [properties[name], {"type": "null"}], **own}


class ClientModel(WireModel):
    """A body that other programs write too: null stands for a field that was left out, unless null has a meaning in
    that field. Unknown fields may be null too, because newer clients have more fields."""

    model_config = ConfigDict(json_schema_extra=_document_nulls)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or not cls.may_be_absent(key)}

    @classmethod
    def may_be_absent(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        # ms-swift 4.6.0 sends `add_eos: null`, which earlier versions did not have.
        return field is None or (not field.is_required() and type(None) not in get_args(field.annotation))


NoItems = Annotated[list[object], Field(max_length=0)]  # must be empty: this server does not support the field
TemplateValue = bool | int | FiniteFloat | Annotated[str, Field(max_length=4096)] | None


class ImageUrl(ClientModel):
    url: str
    detail: Literal["auto", "low", "high"] = Field(default="auto", description="no effect")


class ContentPart(ClientModel):
    type: Literal["text", "image", "image_url"]
    text: str | None = None
    image: str | None = Field(default=None, description="without it, the next one of the request's `images`")
    image_url: str | ImageUrl | None = None

    @property
    def source(self) -> str | None:
        """The image that the part itself holds. None: the part shows the next image of the request's `images`."""
        if self.type == "image":
            return self.image
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url


class Message(ClientModel):
    """One chat turn. A string may name images by the placeholder `<image>`, in the order of the request's `images`."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[Items[ContentPart], Field(max_length=MAX_PARTS)]


class RolloutInferRequest(ClientModel):
    """One sample to roll out. `images` are local paths, data URLs, base64 strings or http(s) URLs."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_PARTS)
    images: Items[str] = []
    uuid: str = Field(
        default_factory=lambda: uuid_module.uuid4().hex,
        max_length=128,
        description="of this request; a repeat of it gets the same answer. By default a random one",
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="of its first answer; without it, it follows from the call's"
    )
    pixels: bool = Field(default=False, description="also what the vision tower is fed of the images")
    data_dict: dict[str, object] = Field(default={}, description="no effect")
    chat_template_kwargs: dict[Name, TemplateValue] = Field(
        default={}, description="variables of the model's chat template, such as `enable_thinking`"
    )
    audios: NoItems = []
    videos: NoItems = []
    tools: NoItems = []
    objects: dict[str, object] = Field(default={}, max_length=0)
    add_eos: Literal[False] = False


class RequestConfig(ClientModel):
    """Settings for decoding. `seed`: the seed of the call's first answer. Answer `j` to request `i` is seeded with the
    request's own seed + `j`, or, if it has none, with `seed + i * n + j`, mod 2**31-1."""

    max_tokens: int | None = Field(
        default=512, ge=1, le=2**31 - 1, description="null: as many as the model's context has room for"
    )
    temperature: FiniteFloat = Field(default=0.0, ge=0.0, le=2.0, description="0: greedy")  # vLLM's max is 2 too
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, le=2**31 - 1, description="-1 and 0: off")
    min_p: FiniteFloat = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: FiniteFloat = Field(default=1.0, gt=0.0)
    presence_penalty: FiniteFloat = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: FiniteFloat = Field(default=0.0, ge=-2.0, le=2.0)
    stop_repetitions: int | None = Field(
        default=None,
        ge=2,
        le=64,
        description="end an answer after the same 8 to 128 tokens so often in a row, as `length`; null: never",
    )
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Items[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default=[], max_length=64)
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS, description="answers to each request")
    logprobs: bool = Field(
        default=False, description="log-probability of each sampled token, before temperature, penalties and truncation"
    )
    return_details: bool = Field(default=False, description="no effect: token ids are always returned")
    num_beams: Literal[1] = 1
    stream: Literal[False] = Field(default=False, description="ask with `Accept: application/x-ndjson` instead")
    top_logprobs: Literal[0] = Field(default=0, description="`/v1/chat/completions` has them")
    prompt_logprobs: None = Field(default=None, description="`/score/` has them")
    best_of: None = None
    length_penalty: FiniteFloat = Field(default=1.0, ge=1.0, le=1.0)
    structured_outputs_regex: None = None


class InferCall(ClientModel):
    infer_requests: Items[RolloutInferRequest]
    request_config: RequestConfig = RequestConfig()
    metrics: NoItems = []
    use_tqdm: bool = Field(default=False, description="no effect")
    adapter_request: None = Field(default=None, description="the learner decides which adapter is served")


class ChatMessage(WireModel):
    role: Literal["assistant"] = "assistant"
    content: str


class TokenLogprob(WireModel):
    token: str
    bytes: list[int] = Field(description="of `token`")
    logprob: float = Field(description="natural logarithm")
    top_logprobs: list[object] = []


class ChoiceLogprobs(WireModel):
    content: list[TokenLogprob]


class WeightVersionSpan(WireModel):
    """Tokens from `start` up to `end` were sampled with the weights of this version, in vLLM's form."""

    version: str
    start: int
    end: int


class Choice(WireModel):
    index: int = 0
    message: ChatMessage
    finish_reason: str = Field(description='"stop", "length"')
    token_ids: list[int]
    logprobs: ChoiceLogprobs | None = Field(default=None, description="of `token_ids`; only if asked for")
    stop_token_id: int | None = Field(default=None, description="that ended the answer; `token_ids` are without it")
    stop_logprob: float | None = Field(default=None, description="of that token; only if asked for")
    weight_versions: list[WeightVersionSpan] = Field(
        default=[], description="of `token_ids`: always one, `rollout_infos.ver`"
    )


class Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletionResponse(WireModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="seconds since the epoch")
    model: str
    choices: list[Choice]
    usage: Usage


class ProcessedImage(WireModel):
    """One image as an image processor made it, see `pixels.py`."""

    digest: str = Field(description="of all values")
    grid: list[int] = Field(description="patches in time, height, width")
    values: list[float] = Field(description="some of them")


class ProcessedImages(WireModel):
    """The images of one request in the form that the vision tower gets, before they are copied to the device."""

    images: list[ProcessedImage]
    dtype: Literal["uint8", "bfloat16", "float16", "float32"] = Field(
        description="of the values; uint8: not normalized yet"
    )
    settings: dict[str, str] = Field(description="of the processor, and versions of the libraries that it uses")


class ServedWeights(WireModel):
    """The weights that a server serves, or served last."""

    ver: int
    incarnation: str = Field(
        default="",
        description='of the learner that sent the weights; "": the checkpoint that the server was started with',
    )
    weights: str = Field(default="", description="a digest of what they came in, the same on all servers of a sync")


class RolloutInfos(ServedWeights):
    """The server that answered, and its weights: `ver` is unique and rises on one server, `weights` is a digest.
    `seed`: the seed of the first choice."""

    seed: int | None
    server_id: str
    uuid: str
    pixels: ProcessedImages | None = Field(default=None, description="only if asked for, and if there are images")


class RolloutOutput(WireModel):
    """The answers to one request. An answer's token ids do not include its stop token. `prompt_token_ids`: the ids that
    the engine consumed."""

    response: ChatCompletionResponse = Field(description="one choice per answer")
    response_token_ids: list[int] = Field(description="of the first choice")
    prompt_token_ids: list[int]
    rollout_logprobs: list[list[float]] = Field(
        default=[], description="of each choice's token ids, natural logarithms; only if asked for"
    )
    rollout_infos: RolloutInfos


class AnswerLine(WireModel):
    """One line of a streamed `/infer/` answer: request `index` of the call has ended with `output`. Or the call has
    ended early with `error`; this is then the last line, and requests without a line get no answer."""

    index: int | None = Field(default=None, ge=0)
    output: RolloutOutput | None = None
    error: ErrorBody | None = None


# ---- sync ----------------------------------------------------------------------------------------------------------


class ScoreItem(WireModel):
    request: RolloutInferRequest
    response_token_ids: Items[int] = Field(min_length=1)


class ScoreCall(WireModel):
    items: Items[ScoreItem] = Field(min_length=1)


class ScoreReply(WireModel):
    """`logprobs[i][j]`: natural log-probability of `items[i].response_token_ids[j]` given all tokens before it.

    `cached_logprobs`: for an update's canary, log-probabilities of some tokens of each answer, computed again by
    requests that read the prefix cache (`shared.canary.cached_positions`); [] if the engine has no such cache."""

    ver: int
    logprobs: list[list[float]]
    cached_logprobs: list[list[float]] = []
    prompt_token_ids: list[list[int]]
    pixels: list[ProcessedImages | None] = Field(
        default=[], description="of each item, None without images; only if asked for"
    )


class InitCommunicatorCall(WireModel):
    """Join the group of one learner and the workers of its servers. The workers are numbered server by server, the
    learner has the last rank.

    The members meet at `group_port` of the server's own configured address, where rank 0 listens; the call returns when
    all have joined.
    """

    incarnation: Name = Field(description="a random id of this group; a new one replaces the old group")
    secret: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        repr=False,
        description="32 random bytes as hex: what the group's ranks know each other by, and what seals its buckets",
    )
    group_port: int = Field(ge=1, le=65535)
    first_rank: int = Field(default=0, ge=0, lt=MAX_RANKS, description="of this server's workers")
    world_size: int = Field(ge=2, le=MAX_RANKS, description="of the group, learner included")
    backend: Literal["nccl", "tcp"]
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)
    allow_shared_gpu: bool = Field(default=False, description="ranks on one GPU are connected by sockets, not refused")


class TensorSpec(WireModel):
    name: Name = Field(
        description="as in the checkpoint (Hugging Face name); an adapter's: `{module}.lora_A.weight`, `.lora_B.weight`"
    )
    dtype: Name = Field(description='"bfloat16", "float32", ...')
    shape: Items[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=16)


class Bucket(WireModel):
    """Tensors that are sent as one contiguous byte string, in order, with a seal at the end (`sync/buckets.py`)."""

    tensors: Items[TensorSpec]
    num_bytes: int = Field(ge=0, lt=2**40, description="without the seal")


BUCKETS = TypeAdapter(Items[Bucket])


class UpdateWeightsCall(WireModel):
    incarnation: Name
    ver: int = Field(ge=0, lt=2**63, description="the version served once this call returned")
    mode: Literal["full", "adapter"] = Field(
        default="full", description="`adapter`: on the base weights that the last full update brought"
    )
    buckets: Items[Bucket]
    canary: Items[ScoreItem] = Field(
        default=[],
        description="to be scored with the new weights. They are served only after `/expect_scores/` has brought the "
        "learner's own log-probabilities, and if the server's are within the tolerance",
    )
    base_of_adapter: bool = Field(
        default=False, description="the weights below an adapter that comes next: no canary, and not served alone"
    )
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)


class ExpectScoresCall(WireModel):
    """The learner's log-probabilities of the canary of update `ver`, which the server compares with its own. The
    learner computes its log-probabilities before the update begins, and sends them after the last bucket. The answer to
    this call only confirms that they have arrived; the answer to `/update_weights/` is the verdict."""

    incarnation: Name
    ver: int = Field(ge=0, lt=2**63)
    logprobs: Items[Items[FiniteFloat]] = Field(min_length=1, description="as `ScoreReply.logprobs`")
    tolerance: FiniteFloat = Field(gt=0, description="mean |gap| over all tokens of all items, nats")


class UpdateWeightsReply(WireModel):
    ver: int
    num_bytes: int = Field(description="of the weights")
    num_tensors: int
    seconds: float
    drain_s: float = Field(description="waiting for calls in flight")
    pause_s: float = Field(
        default=0.0, description="no call was in flight, and none was let in: receive, check, load, canary"
    )
    load_s: float = Field(default=0.0, description="of the pause: until the workers had loaded the weights")
    canary_s: float = Field(default=0.0, description="of the pause: from then until the canary's scores were there")
    scores: ScoreReply = Field(description="of the canary")


class CloseCommunicatorCall(WireModel):
    incarnation: Name


# ---- state ---------------------------------------------------------------------------------------------------------


class WorldSizeReply(WireModel):
    world_size: int = Field(ge=1, description="tensor-parallel size x data-parallel size")


class ServerStatus(WireModel):
    protocol: int = PROTOCOL_VERSION
    server_id: str
    model: str
    dtype: str = Field(
        default="",
        description='of the served weights, as in `TensorSpec`; "": not told, and weights travel as they are trained',
    )
    architecture: dict[str, str] = Field(
        default={}, description="sizes of the model, see `shared/checkpoint.py`; {}: not told"
    )
    vocab_size: int
    max_model_len: int
    gate: Literal["serving", "draining", "updating", "poisoned"]
    poisoned_because: str = ""
    ver: int
    weights: str = Field(default="", description="as in `RolloutInfos`")
    incarnation: str = Field(default="", description="that has opened the group")
    world_size: int = Field(ge=1, description="tensor-parallel size x data-parallel size")
    group_host: str = Field(
        default="", description='where its workers meet a learner; "": not told, and it gets a group of its own'
    )
    gpus: list[str] = Field(default=[], description="its workers', by their UUIDs; []: none")
    max_lora_rank: int = Field(default=0, description="of an adapter that the server takes; 0: it takes none")
    in_flight: int
    waiting: int
    versions: dict[str, str] = Field(description="python, torch, vllm, transformers, cuda, nccl")
