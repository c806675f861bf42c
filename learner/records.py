"""Defines the stages of a sample, one frozen record each:

    Sample -> Rollout -> ParsedRollout -> Assignment -> Segment -> PackedRow -> StepResult -> SyncReceipt

Token ids are plain tuples or numpy arrays; only `VisionInputs` holds torch tensors. Token spans are half-open. A
coordinate *bin* is an integer in 0..999: `round(999 * pixel / size)`, clamped.

The module also has `RawRecord`, which readers of annotations yield, and records for the log: rollout calls, and changes
of servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shared.errors import DataError

if TYPE_CHECKING:  # `--check` imports this module and must be quick, so even numpy is imported for types only
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from shared.generation import Turn
    from shared.wire import ProcessedImages

GeometryKind = Literal["bbox_2d", "poly"]
Unit = Literal["pixels", "thousandths", "shares", "percent", "resized"]
DropReason = Literal[
    "missing_desc",
    "missing_geom",
    "wrong_arity",
    "non_coord_token",
    "bbox_invalid",
    "key_invalid",
    "unknown_geom",
    "image_invalid",
    "truncated",
]
Channel = Literal["A", "B"]
ServerEvent = Literal["lost", "joined", "added", "removed", "refused"]


class Votes(NamedTuple):
    """The votes for an object without a label: `found` of the sample's `answers` answers have the object."""

    found: int
    answers: int

    @property
    def share(self) -> float:
        return self.found / self.answers


# An object is a tuple, because an answer has dozens of objects, and creating a dataclass takes three times as long.
class DetectionObject(NamedTuple):
    """One object: its class and its coordinates, in bins. `bbox_2d` is (x1, y1, x2, y2); `poly` is (x1, y1, x2, y2,
    ...).

    `votes`: the votes for a label that the model's own answers added (`labels.complete`); None: the object is annotated
    or predicted. `image`: the number of its image in the sample, from 1; None: the sample has no second image."""

    desc: str
    kind: GeometryKind
    bins: tuple[int, ...]
    votes: Votes | None = None
    image: int | None = None


Size = tuple[int, int]  # (width, height) in pixels
Rect = tuple[int, int, int, int]  # (left, top, right, bottom) in pixels


class View(NamedTuple):
    """The way in which an augmented picture is made (`data.augment`): `window` is cut out of the photograph, turned,
    mirrored, and resized to `size`. `brightness`, `contrast` and `saturation` are factors; 1 changes nothing."""

    photograph: Size  # size of the upright photograph
    window: Rect
    size: Size
    quarter_turn: bool = False  # True: turned by 90 degrees counterclockwise before mirroring
    flip_horizontal: bool = False
    flip_vertical: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One dataset record. `messages` are chat turns (`{"role", "content"}`) with `<image>` placeholders, without the
    assistant's last turn. `images` are strings as the server gets them. `objects` are the ground truth: for detection
    `DetectionObject`s in canonical order, for another task the objects of its reader. `ignored` are regions with crowds
    and difficult objects. The regions are not learned, and predictions in them are neither right nor wrong. A region
    with an empty description applies to every class.

    With several images, each object and region has the number of its image. `sizes` has the width and height of each
    image, in pixels, and `width` and `height` are the first image's. `sizes` is empty for a sample of one image, and if
    sizes are not known (URLs), which detection refuses.

    With a `view`, the model sees the picture that the view describes instead of the image. With a view, objects,
    regions, width and height describe this picture."""

    sample_id: str
    messages: tuple[Turn, ...]
    images: tuple[str, ...]
    objects: tuple[Any, ...]
    width: int  # width in pixels
    height: int  # height in pixels
    ignored: tuple[DetectionObject, ...] = ()
    view: View | None = None
    sizes: tuple[Size, ...] = ()

    def size_of(self, image: int | None) -> Size:
        """Return width and height in pixels of the image that an object names; None: the sample's only image."""
        return (self.width, self.height) if image is None else self.sizes[image - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The answer of the policy of version `ver`. `response_token_ids` are without the stop token. `logprobs` are
    natural log-probabilities of the response's tokens and of the stop token, under the weights that generated them.
    `logprobs` None: they were not requested, or the trained weights themselves generated the answer."""

    sample: Sample
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    ver: int
    seed: int | None
    server_id: str = ""
    stop_token_id: int | None = None  # the stop token that ended the answer; None: the answer ended without one
    logprobs: tuple[float, ...] | None = None
    # the pixels that the engine gave its vision tower; None: not requested, or no images
    pixels: ProcessedImages | None = None


class CoordSlots(NamedTuple):
    """The C coordinates of an answer, in order. Each field is [C]: the bins, and where their tokens are in the
    response."""

    start: NDArray[np.int64]  # first response token that holds a character of the number
    end: NDArray[np.int64]  # one past the last response token that holds a character of the number
    bin: NDArray[np.int64]
    lead: NDArray[np.int64]  # number of bytes of token `start` before the number


class PredictedObject(NamedTuple):
    """A valid object of a rollout. `slots` are the indices of its coordinates in the rollout's `CoordSlots`,
    `desc_bytes` the bytes of its description in the answer's text, quotes included."""

    object: DetectionObject
    slots: range
    desc_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParsedRollout:
    """A rollout, parsed strictly. `token_ids[:prefix_length]` is the prefix that is kept. `tail_opening` is the text of
    the appended tail before its first object. `tail_opening` is "{" or "[" if nothing of the rollout is usable. If the
    last token of the prefix's last object also holds later text, the token is cut off, and `tail_opening` is the
    object's end."""

    rollout: Rollout
    token_ids: NDArray[np.int64]  # [T] the rollout's `response_token_ids`
    objects: tuple[PredictedObject, ...]
    slots: CoordSlots
    drops: Mapping[DropReason, int]  # number of dropped objects for each reason
    prefix_length: int
    tail_opening: str
    needs_separator: bool  # the prefix already holds an object, so ", " comes next
    next_index: int  # number of the next `object_N` key, for answers that have such keys
    truncated: bool  # the answer ended before its container was closed
    usable: bool  # the container was opened as the task defines it
    closed: bool = True  # the container was closed, and nothing but whitespace follows
    dropped: tuple[tuple[DropReason, int, int], ...] = ()  # each dropped object: (reason, begin token, end token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One-to-one matching of valid predictions to ground truth. `pairs` are (index of the prediction, index of the
    ground-truth object, IoU). `scores` are the calibrated scores of the predictions; None: scores were not
    calibrated."""

    parsed: ParsedRollout
    pairs: tuple[tuple[int, int, float], ...]
    missed: tuple[int, ...]  # false negatives: indices of ground-truth objects, in canonical order
    spurious: tuple[int, ...]  # false positives: indices of predictions
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
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
    """The tokens that are learned after one sample's prompt (Y_train). `labels[i]` is the right token at position i
    (-100: ignored). A label differs from `token_ids[i]` at matched coordinates."""

    token_ids: NDArray[np.int64]  # [Y]
    labels: NDArray[np.int64]  # [Y]
    loss_weights: NDArray[np.float32]  # [Y]
    prefix_length: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTokens:
    """The values that a policy gradient (`grpo`) needs for each token of a segment, besides label and weight.

    `first_logprobs` is NaN until the first pass over the segment writes it. Copies of the record share this array on
    purpose."""

    advantages: NDArray[np.float32]  # [L]
    rollout_logprobs: NDArray[np.float32]  # [L] nats, under the weights of the rollout; NaN: equal to the learner's.
    # Copies share this array, so that later passes know the probabilities before the first update on the rollout.
    first_logprobs: NDArray[np.float32]  # [L] nats, under the learner's weights before its first update on the rollout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One sample's encoded prompt and target (Y_train). A segment is never split and never truncated. `labels[i]` is
    predicted from the logits at i-1; positions before `prompt_length` have label -100 and weight 0."""

    sample_id: str
    input_ids: NDArray[np.int64]  # [L]
    labels: NDArray[np.int64]  # [L]
    loss_weights: NDArray[np.float32]  # [L]
    prompt_length: int
    vision: VisionInputs | None = None
    ver: int | None = None  # version of the weights that made the rollout; None: ground truth
    stats: Mapping[str, float] = field(default_factory=dict)  # matched, missed, ... for the step's metrics
    policy: PolicyTokens | None = None  # None: the tokens are supervised, without a policy gradient

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_key(self) -> tuple[object, ...]:
        """Return a key that is equal for segments with the same prompt and images: answers to one sample (R47)."""
        if not self.sample_id or not self.prompt_length:
            return (id(self),)
        grid = self.vision.image_grid_thw.flatten().tolist() if self.vision is not None else None
        return self.sample_id, self.input_ids[: self.prompt_length].tobytes(), None if grid is None else tuple(grid)


def group_tokens(group: Sequence[Segment]) -> int:
    """Return the number of tokens of segments with the same prompt, which is counted once."""
    return sum(map(len, group)) - (len(group) - 1) * group[0].prompt_length


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """Segments that are learned in one padding-free forward. An empty row has weight 0 (D5). With `share_prompts`,
    neighbours with the same prompt share one copy of it."""

    segments: tuple[Segment, ...]
    capacity: int  # max tokens (packing_length)
    share_prompts: bool = False

    def groups(self) -> list[tuple[Segment, ...]]:
        """Return the neighbours that share a prompt; without `share_prompts` each segment alone."""
        if not self.share_prompts:
            return [(segment,) for segment in self.segments]
        return [tuple(group) for _, group in groupby(self.segments, key=lambda segment: segment.prompt_key)]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the forward pass computes. A shared prompt counts once."""
        return sum(map(group_tokens, self.groups()))

    @property
    def fill(self) -> float:
        return self.num_tokens / self.capacity


class LearnedRow(NamedTuple):
    """A packed row after its pass: its mean loss, nats per token, and its samples."""

    loss: float
    sample_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """One bar of the timeline: what ran from `begin_s` to `end_s` (Unix seconds). `lane`: where it ran (`rank 0`, `rank
    0 rollouts`, or a server's URL). `name`: the phase of learning; for a server `rollout`, `failed` or `out`
    (the server gets no requests)."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one optimizer step, reduced over ranks."""

    global_step: int
    channel: Channel
    loss: float  # weighted mean of the supervised tokens' losses, in nats
    grad_norm: float  # global norm of the gradients, before clipping
    learning_rate: float
    num_segments: int
    num_rows: int  # number of packed rows, without empty rows
    num_tokens: int
    num_supervised: int
    ver: int
    metrics: Mapping[str, float]  # other numbers of the step, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReceipt:
    """One completed and checked weight sync."""

    ver: int  # version that the sync gave to the weights
    mode: Literal["full", "adapter"]
    seconds: float  # seconds that the sync took
    num_bytes: int  # size of the synced tensors
    num_tensors: int
    canary_gap: float  # mean |learner logprob - served logprob| on the canary (fixed answers), nats
    canary_gap_max: float  # largest difference of one token, nats.
    # How much merging and rounding change log-probabilities (D14): mean |learner logprob as trained - as sent|, in
    # nats.
    merge_gap: float = 0.0
    pause_s: float = 0.0  # longest time that a server generated nothing and accepted no call; 0: not measured
    fallback: str = ""  # why full syncs replace adapter syncs from this sync on; else empty
    repeated: tuple[str, ...] = ()  # the error of each failed try before this sync.
    # Seconds on the host for each part of the sync; empty: not measured.
    parts: Mapping[str, float] = field(default_factory=dict)


# ---- annotations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a record in a file, for messages. `record` is "line 7" or "image 12"."""

    file: Path
    record: str

    def error(self, what: str, *, found: str, wanted: str, remedy: str = "correct the record") -> DataError:
        return DataError(f"{self.file}, {self.record}: {what}", found=found, wanted=wanted, remedy=remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawObject:
    """One annotated object. `coords` are x1, y1, x2, y2 of a box, or x1, y1, x2, y2, ... of a polygon."""

    desc: str | None  # class name; None: the annotations do not name the class
    kind: GeometryKind
    coords: tuple[float, ...]
    written: str  # class and coordinates, as the file has them
    name: str  # text for the object in error messages
    place: Place
    ignored: bool = False  # True: an ignore region, not an object
    image: int | None = None  # number among the record's images, from 1; None: the annotations do not say


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRecord:
    """One annotated image (or several that belong together). `width` and `height` are the size of every image, unless
    `sizes` lists the size of each image."""

    place: Place
    sample_id: str
    messages: Sequence[Turn]  # the prompt, without the assistant's last turn
    images: tuple[str, ...]  # image names, as the annotation file has them
    objects: Sequence[RawObject]
    width: int | None  # pixels, as annotated; None: read from the image file
    height: int | None
    unit: Unit = "pixels"  # unit of the coordinates, unless `data.coordinates` names another unit
    sizes: tuple[Size, ...] = ()  # width and height of each image; empty: all have `width` and `height`


# ---- logging --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """The record of a rollout call that has ended. `error` is empty if the call was answered."""

    base_url: str
    seed: int  # random seed of the first request
    micro_step_idx: int  # micro-step of the first request
    first_req_idx: int  # index of the first request, counted over all ranks
    num_requests: int
    seconds: float
    error: str = ""
    began_at: float = 0.0  # Unix seconds; 0: not measured, because the call ran in the learner's own process


@dataclass(kw_only=True, slots=True)
class RolloutCallLog:
    """The record of one `generate_window`, for the step's metrics (R15, R30). `micro_step_idx` and `first_req_idx`
    belong to the first request. `splits` are the (micro_step_idx, first_req_idx, number of requests) that were sent
    again.

    A call that is made ahead of the steps belongs to a share (the samples of one step), because its step is not known
    yet. The call's `micro_step_idx` is -1, and its seeds are computed from the share's number instead of the step's
    number.
    """

    global_step: int | None
    # number of the call's share, counted since training began; None: the call was made for a step
    share: int | None = None
    micro_step_idx: int
    first_req_idx: int
    num_requests: int
    num_micro_steps: int
    chunk: int  # max requests that this rank may have in flight
    ver: int | None = None  # version of the weights that made the rollouts; None: not known yet
    seconds: float = 0.0  # seconds that the call took
    began_at: float = 0.0  # begin of the call in Unix seconds; 0: not measured
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part of a call in the learner's own process
    calls: list[CallRecord] = field(default_factory=list)
    splits: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChange:
    """A change of one server, for the log, the console and the report."""

    base_url: str
    what: ServerEvent
    because: str
    serving: int  # number of servers that serve after the change
