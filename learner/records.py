"""The straight line, one frozen record per stage:

    Sample -> Rollout -> ParsedRollout -> Assignment -> Segment -> PackedRow -> StepResult -> SyncReceipt

Token ids are plain tuples or numpy arrays; only `VisionInputs` holds torch tensors. Token spans are half-open. A
coordinate *bin* is an integer in 0..999: `round(999 * pixel / size)`, clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # numpy too: `--check` reads the schedule, and must be quick
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
    tuple, for there are dozens in an answer, and it is made in a third of a dataclass's time."""

    desc: str
    kind: GeometryKind
    bins: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One dataset record. `messages` are chat turns (`{"role", "content"}`) with `<image>` placeholders, without the
    assistant's last turn; `images` are strings as the server will get them; `objects` are in canonical order. In the
    regions `ignored` nothing is known (crowds, difficult objects): they are not taught, and what is predicted there is
    neither right nor wrong. A region with an empty description is one for every class."""

    sample_id: str
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[str, ...]
    objects: tuple[DetectionObject, ...]
    width: int  # pixels
    height: int  # pixels
    ignored: tuple[DetectionObject, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What the policy of version `ver` answered. `response_token_ids` are stop-trimmed."""

    sample: Sample
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    ver: int
    seed: int | None
    server_id: str = ""


class CoordSlots(NamedTuple):
    """The coordinates of an answer in the order in which they stand, each field [C]: where the tokens of each are in
    the response, and the number that they say."""

    start: NDArray[np.int64]  # first response token that holds a character of the number
    end: NDArray[np.int64]  # one past the last
    bin: NDArray[np.int64]
    lead: NDArray[np.int64]  # bytes of token `start` that come before the number


class PredictedObject(NamedTuple):
    """A valid object of a rollout; `slots` are the places of its coordinates in the rollout's `CoordSlots`,
    `desc_bytes` those bytes of the answer's text that are its description, quotes included."""

    object: DetectionObject
    slots: range
    desc_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParsedRollout:
    """A rollout, parsed strictly. `token_ids[:prefix_length]` is the prefix kept; `tail_opening` is the
    text that the appended tail must begin with before its first object (what a fused token took away; "{" or "[" when
    nothing of the rollout is usable)."""

    rollout: Rollout
    token_ids: NDArray[np.int64]  # [T] the rollout's `response_token_ids`
    objects: tuple[PredictedObject, ...]
    slots: CoordSlots
    drops: Mapping[DropReason, int]
    prefix_length: int
    tail_opening: str
    needs_separator: bool  # the prefix already holds an object, so ", " comes before the next
    next_index: int  # number of the next `object_N` key (index map only)
    truncated: bool  # the answer ended before its container did
    usable: bool  # the container was opened as the task wants it
    closed: bool = True  # the container was closed, and nothing but whitespace follows


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One-to-one matching of valid predictions to ground truth. `pairs` are (prediction, ground truth, IoU)."""

    parsed: ParsedRollout
    pairs: tuple[tuple[int, int, float], ...]
    missed: tuple[int, ...]  # FN: indices of ground-truth objects, in canonical order
    spurious: tuple[int, ...]  # FP: indices of predictions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisionInputs:
    """What the processor made of one sample's images. P patches in all, I images."""

    pixel_values: torch.Tensor  # [P, patch_dim] float32
    image_grid_thw: torch.Tensor  # [I, 3] int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedPrompt:
    """A sample's prompt as the model sees it: token ids with image placeholders expanded, and the pixels."""

    token_ids: tuple[int, ...]
    vision: VisionInputs | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """Y_train of one sample, relative to its first token. `labels[i]` is the token that position i should have been
    (-100: ignored); it differs from `token_ids[i]` at matched coordinates."""

    token_ids: NDArray[np.int64]  # [Y]
    labels: NDArray[np.int64]  # [Y]
    loss_weights: NDArray[np.float32]  # [Y]
    prefix_length: int


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
    merge_gap: float = 0.0  # mean |learner logprob as trained - as sent|, nats: what merging and rounding change (D14)
    fallback: str = ""  # why adapter syncs ended with this one; empty: they did not
