"""The stages of a sample, one frozen record each:

    Sample -> Rollout -> ParsedRollout -> Assignment -> Segment -> PackedRow -> StepResult -> SyncReceipt

Token ids are plain tuples or numpy arrays; only `VisionInputs` holds torch tensors. Token spans are half-open. A
coordinate *bin* is an integer in 0..999: `round(999 * pixel / size)`, clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # numpy too: `--check` imports this module, and must be quick
    import numpy as np
    import torch
    from numpy.typing import NDArray

GeometryKind = Literal["bbox_2d", "poly"]
DropReason = Literal[
    "missing_desc",
    "missing_geom",
    "wrong_arity",
    "non_coord_token",
    "bbox_invalid",
    "key_invalid",
    "unknown_geom",
    "truncated",
]
Channel = Literal["A", "B"]


class DetectionObject(NamedTuple):
    """One object: what it is and where, in bins. `bbox_2d` is (x1, y1, x2, y2); `poly` is (x1, y1, x2, y2, ...). A
    tuple, because there are dozens in an answer, and a dataclass takes three times as long to make."""

    desc: str
    kind: GeometryKind
    bins: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One dataset record. `messages` are chat turns (`{"role", "content"}`) with `<image>` placeholders, without the
    assistant's last turn; `images` are strings as the server will get them. `objects` are the ground truth: for
    detection `DetectionObject`s in canonical order, for another task what its reader put there. The regions `ignored`
    hold crowds and difficult objects. They are not taught, and predictions there are neither right nor wrong. A region
    with an empty description applies to every class."""

    sample_id: str
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[str, ...]
    objects: tuple[Any, ...]
    width: int  # pixels
    height: int  # pixels
    ignored: tuple[DetectionObject, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The answer of the policy of version `ver`. `response_token_ids` are stop-trimmed. `logprobs` are natural
    log-probabilities of the response's tokens and of the stop token, by the weights that made them; None: not asked
    for, or the trained weights themselves made them."""

    sample: Sample
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    ver: int
    seed: int | None
    server_id: str = ""
    stop_token_id: int | None = None  # that ended the answer, if one did
    logprobs: tuple[float, ...] | None = None


class CoordSlots(NamedTuple):
    """The coordinates of an answer in order, each field [C]: where the tokens of each are in the response, and their
    number."""

    start: NDArray[np.int64]  # first response token that holds a character of the number
    end: NDArray[np.int64]  # one past the last
    bin: NDArray[np.int64]
    lead: NDArray[np.int64]  # bytes of token `start` before the number


class PredictedObject(NamedTuple):
    """A valid object of a rollout. `slots` are the indices of its coordinates in the rollout's `CoordSlots`,
    `desc_bytes` the bytes of its description in the answer's text, quotes included."""

    object: DetectionObject
    slots: range
    desc_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParsedRollout:
    """A rollout, parsed strictly. `token_ids[:prefix_length]` is the prefix that is kept. `tail_opening` is
    the text of the appended tail before its first object: what a fused token removed, or "{" or "[" if nothing of the
    rollout is usable."""

    rollout: Rollout
    token_ids: NDArray[np.int64]  # [T] the rollout's `response_token_ids`
    objects: tuple[PredictedObject, ...]
    slots: CoordSlots
    drops: Mapping[DropReason, int]
    prefix_length: int
    tail_opening: str
    needs_separator: bool  # the prefix already holds an object, so ", " comes next
    next_index: int  # number of the next `object_N` key (index map only)
    truncated: bool  # the answer ended before its container did
    usable: bool  # the container was opened as the task defines it
    closed: bool = True  # the container was closed, and nothing but whitespace follows
    dropped: tuple[tuple[DropReason, int, int], ...] = ()  # why, and the tokens that hold it: begin, end


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One-to-one matching of valid predictions to ground truth. `pairs` are (prediction, ground truth, IoU)."""

    parsed: ParsedRollout
    pairs: tuple[tuple[int, int, float], ...]
    missed: tuple[int, ...]  # FN: indices of ground-truth objects, in canonical order
    spurious: tuple[int, ...]  # FP: indices of predictions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisionInputs:
    """The processor's output for one sample's images: P patches in total, I images."""

    pixel_values: torch.Tensor  # [P, patch_dim] float32
    image_grid_thw: torch.Tensor  # [I, 3] int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedPrompt:
    """A sample's prompt as the model sees it: token ids with image placeholders expanded, and the pixels."""

    token_ids: tuple[int, ...]
    vision: VisionInputs | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """Y_train of one sample, relative to its first token. `labels[i]` is the right token at position i
    (-100: ignored). It differs from `token_ids[i]` at matched coordinates."""

    token_ids: NDArray[np.int64]  # [Y]
    labels: NDArray[np.int64]  # [Y]
    loss_weights: NDArray[np.float32]  # [Y]
    prefix_length: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTokens:
    """What a policy gradient needs of each token of a segment, besides its label and its weight (`grpo`).

    `first_logprobs` is NaN until the first pass over the segment writes into it; its copies share it on purpose. So
    later passes know the probabilities before the first update."""

    advantages: NDArray[np.float32]  # [L]
    rollout_logprobs: NDArray[np.float32]  # [L] by the weights that made the rollout, nats; NaN: those that learn
    first_logprobs: NDArray[np.float32]  # [L] by the learner, before the first update, nats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One sample's encoded prompt + Y_train. Atomic: never split, never truncated. `labels[i]` is predicted from the
    logits at i-1; everything before `prompt_length` has label -100 and weight 0."""

    sample_id: str
    input_ids: NDArray[np.int64]  # [L]
    labels: NDArray[np.int64]  # [L]
    loss_weights: NDArray[np.float32]  # [L]
    prompt_length: int
    vision: VisionInputs | None = None
    ver: int | None = None  # None: ground truth, not a rollout
    stats: Mapping[str, float] = field(default_factory=dict)  # matched, missed, ... for the step's metrics
    policy: PolicyTokens | None = None  # None: its tokens are taught, not reinforced
    extra_weight: float = 0.0  # counts as loss weight of the step, but is no token's

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """Segments that are learned in one padding-free forward. An empty row is a zero-weight pass (D5)."""

    segments: tuple[Segment, ...]
    capacity: int  # packing_length

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def fill(self) -> float:
        return self.num_tokens / self.capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One optimizer step, reduced over ranks."""

    global_step: int
    channel: Channel
    loss: float
    grad_norm: float
    learning_rate: float
    num_segments: int
    num_rows: int
    num_tokens: int
    num_supervised: int
    ver: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReceipt:
    """One completed and checked weight sync."""

    ver: int
    mode: Literal["full", "adapter"]
    seconds: float
    num_bytes: int
    num_tensors: int
    canary_gap: float  # mean |learner logprob - served logprob|, nats
    canary_gap_max: float
    merge_gap: float = 0.0  # mean |learner logprob as trained - as sent|, nats: effect of merging, rounding (D14)
    fallback: str = ""  # if adapter syncs ended with this sync, why; else empty
