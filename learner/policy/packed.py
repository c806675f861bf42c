"""Turns a packed row into the tensors of one forward pass, and runs the pass.

In: a `PackedRow`, whose segments (a prompt and an answer each) have token ids, labels, loss weights and pixels. Out:
the final hidden states of the row, and for each supervised token the position that predicts it.

Segments with the same prompt form a group, and the row has the group's prompt once (R47). The prompt is one piece of
the row, and each answer is another piece. An answer attends to the prompt and to itself. The vision tower sees the
prompt's images once. The prompt's last token predicts the first token of each answer. Losses and gradients are the same
as with separate segments.

Invariants: each segment's positions begin at 0, as in a row of its own. Multimodal rotary positions come from the
model's `get_rope_index`, one prompt at a time. Token i-1 of a segment predicts `labels[i]`, so a segment's last token
never predicts the next segment. Only prompts have images: an image token in a rollout is text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from learner.policy.attention import SegmentLayout, to_device
from learner.policy.policy_gradient import PolicyInputs, gather_policy
from learner.records import PackedRow, Segment, VisionInputs
from learner.tasks.supervision import check_supervision

# An empty row computes on this segment of two unsupervised tokens (D5). The segment has two tokens, because a compiler
# treats a size of 1 as a special case.
_BLANK = Segment(
    sample_id="",
    input_ids=np.zeros(2, np.int64),
    labels=np.full(2, -100, np.int64),
    loss_weights=np.zeros(2, np.float32),
    prompt_length=2,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedInputs:
    """The inputs of one forward pass: a row of T tokens, N of them supervised, with I images of P patches in all."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T], or [3, 1, T] (time, height, width) for multimodal rotary positions
    layout: SegmentLayout
    pixel_values: torch.Tensor | None  # [P, patch_dim]
    image_grid_thw: torch.Tensor | None  # [I, 3]
    written_image_tokens: torch.Tensor | None  # [1, T] bool: image tokens in answers; None if there are none
    predict_at: torch.Tensor  # [N] positions in the row that predict the supervised tokens
    targets: torch.Tensor  # [N]
    weights: torch.Tensor  # [N] float32
    weight_sum: float  # sum of `weights`, added up in float64
    supervised: tuple[np.ndarray, ...]  # for each segment the indices of its supervised tokens
    policy: PolicyInputs | None = None  # None: no token has a policy gradient


def pack_inputs(
    row: PackedRow, model: PreTrainedModel, device: torch.device, *, always_image: bool = False
) -> PackedInputs:
    """Return the row's tensors on `device`. `always_image`: a row without images gets a blank image in a segment
    without supervised tokens, so that the vision tower runs in every pass.

    Raises LossError if a supervised token is outside its segment's assistant span.
    """
    groups = row.groups() or [(_BLANK,)]
    if always_image and all(s.vision is None for s in row.segments):
        groups = [*groups, *((blank,) for blank in _blank_image(model))]
    segments = [segment for group in groups for segment in group]
    supervised = [check_supervision(s) for s in segments]
    pieces, predict_at = _lay_out(groups, supervised)
    vision = [group[0].vision for group in groups if group[0].vision is not None]
    grids = torch.cat([v.image_grid_thw for v in vision]) if vision else None  # [I, 3]
    input_ids, written = _input_ids(pieces, model)
    weights = _gather([s.loss_weights for s in segments], supervised)
    max_patches = int(grids[:, 1:].prod(-1).max()) if grids is not None else 0
    return PackedInputs(
        input_ids=to_device(input_ids, device),
        position_ids=to_device(_positions(pieces, model), device),
        layout=_layout(pieces, device, shared=row.share_prompts, max_patches=max_patches),
        pixel_values=torch.cat([to_device(v.pixel_values, device) for v in vision]) if vision else None,
        image_grid_thw=to_device(grids, device) if grids is not None else None,
        written_image_tokens=to_device(written, device) if written is not None else None,
        predict_at=to_device(torch.from_numpy(predict_at), device),
        targets=to_device(_gather([s.labels for s in segments], supervised), device),
        weights=to_device(weights, device),
        # The sum is computed on the host, because reading it from the device would make the host wait.
        weight_sum=float(weights.double().sum()),
        supervised=tuple(supervised),
        policy=_policy(segments, supervised, device),
    )


class _Piece(NamedTuple):
    """The tokens `[begin, end)` of a segment. A piece's tokens attend to each other, and to the row's tokens `prefix`:
    the prompt that the segment shares with others."""

    segment: Segment
    begin: int
    end: int
    prefix: range

    def __len__(self) -> int:
        return self.end - self.begin


def _lay_out(
    groups: Sequence[Sequence[Segment]], supervised: Sequence[np.ndarray]
) -> tuple[list[_Piece], NDArray[np.int64]]:
    """Return the row's pieces in order, and the positions [N] in the row that predict the supervised tokens."""
    pieces: list[_Piece] = []
    predict_at: list[NDArray[np.int64]] = []
    at, indices = 0, iter(supervised)
    for group in groups:
        shared = group[0].prompt_length if len(group) > 1 else 0
        prefix = range(at, at + shared)
        if shared:
            pieces.append(_Piece(group[0], 0, shared, range(0)))
            at += shared
        for segment in group:
            # Token i - 1 predicts token i. So the prompt's last token predicts the answer's first token.
            before = next(indices) - 1
            predict_at.append(np.where(before < shared, prefix.start + before, at + before - shared))
            if len(segment) > shared:
                pieces.append(_Piece(segment, shared, len(segment), prefix))
            at += len(segment) - shared
    return pieces, np.concatenate(predict_at)


def _layout(pieces: Sequence[_Piece], device: torch.device, *, shared: bool, max_patches: int) -> SegmentLayout:
    lengths = [len(piece) for piece in pieces]
    if not shared:
        return SegmentLayout.of(lengths, device, max_patches=max_patches)
    return SegmentLayout.shared(lengths, [piece.prefix for piece in pieces], device, max_patches=max_patches)


def _policy(segments: Sequence[Segment], supervised: Sequence[np.ndarray], device: torch.device) -> PolicyInputs | None:
    found = gather_policy(segments, supervised)
    if found is None:
        return None
    return PolicyInputs(**{name: to_device(getattr(found, name), device) for name in found.__dataclass_fields__})


def hidden_states(model: PreTrainedModel, inputs: PackedInputs) -> torch.Tensor:
    """Return the row's hidden states `[T, hidden]` after the last layer, without the output head."""
    kwargs: dict[str, object] = {"input_ids": inputs.input_ids, "position_ids": inputs.position_ids}
    if inputs.pixel_values is not None:
        kwargs |= {"pixel_values": inputs.pixel_values, "image_grid_thw": inputs.image_grid_thw}
    with _image_tokens_as_text(model, inputs):
        return model.base_model(**kwargs, segments=inputs.layout, use_cache=False)[0][0]


def image_token_id(model: PreTrainedModel) -> int | None:
    """Return the id of the image placeholder; None for a text-only model."""
    return getattr(model.config, "image_token_id", None)


def _blank_image(model: PreTrainedModel) -> tuple[Segment, ...]:
    """Return one unsupervised segment with a black image of one token, the smallest image; () for a text-only
    model."""
    token_id = image_token_id(model)
    if token_id is None:
        return ()
    patch_dim = next(math.prod(m.weight.shape[1:]) for m in model.modules() if isinstance(m, torch.nn.Conv3d))
    side = model.config.vision_config.spatial_merge_size
    pixels = VisionInputs(
        pixel_values=torch.zeros(side * side, patch_dim), image_grid_thw=torch.tensor([[1, side, side]])
    )
    return (replace(_BLANK, input_ids=np.array([token_id], np.int64), vision=pixels),)


def _gather(arrays: Sequence[np.ndarray], indices: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([a[i] for a, i in zip(arrays, indices, strict=True)]))


def _input_ids(pieces: Sequence[_Piece], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token ids `[1, T]`, in which image tokens in answers are replaced by 0. Return also the mask `[1, T]`
    of these image tokens, or None if there are none."""
    ids = torch.from_numpy(np.concatenate([p.segment.input_ids[p.begin : p.end] for p in pieces]))[None]
    in_prompt = np.concatenate([np.arange(p.begin, p.end) < p.segment.prompt_length for p in pieces])
    written = (ids == image_token_id(model)) & ~torch.from_numpy(in_prompt)[None]
    if not written.any():
        return ids, None
    # The model would look for image features at these tokens, and end with an error.
    return ids.masked_fill(written, 0), written


@contextmanager
def _image_tokens_as_text(model: PreTrainedModel, inputs: PackedInputs) -> Iterator[None]:
    """While the `with` block runs, make the model treat image tokens in answers like any text tokens. `_input_ids` has
    replaced their ids, and this function puts back their embeddings."""
    written = inputs.written_image_tokens
    if written is None:
        yield
        return
    token = torch.tensor(image_token_id(model), device=written.device)

    # A model puts image features at every image token. A server treats an image token in an answer like any other
    # token.
    def put_back(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        # `module(token)` below calls this hook too, with one token.
        if args[0].shape != written.shape:
            return None
        return torch.where(written[..., None], module(token), output)

    handle = model.get_input_embeddings().register_forward_hook(put_back)
    try:
        yield
    finally:
        handle.remove()


def _positions(pieces: Sequence[_Piece], model: PreTrainedModel) -> torch.Tensor:
    """Return the tokens' positions: `[1, T]`, or `[3, 1, T]` for multimodal rotary positions. Each segment's positions
    begin at 0."""
    if not hasattr(model.base_model, "get_rope_index"):
        return torch.cat([torch.arange(piece.begin, piece.end) for piece in pieces])[None]
    # The positions are computed once per prompt, because `get_rope_index` is slow.
    prompts: dict[tuple[object, ...], torch.Tensor] = {}
    parts = []
    for s, begin, end, _ in pieces:
        prompt = torch.zeros(3, 1, 0, dtype=torch.int64)
        if s.vision is not None:
            is_image = s.input_ids[: s.prompt_length] == image_token_id(model)
            key = (is_image.tobytes(), *s.vision.image_grid_thw.flatten().tolist())
            if key not in prompts:
                prompts[key] = _prompt_positions(s, torch.from_numpy(is_image), model)
            prompt = prompts[key]
        start = int(prompt.max()) + 1 if prompt.numel() else 0
        text = torch.arange(start, start + len(s) - prompt.shape[-1])
        parts.append(torch.cat([prompt, text.expand(3, 1, -1)], dim=-1)[..., begin:end])
    return torch.cat(parts, dim=-1)


def _prompt_positions(segment: Segment, is_image: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Return the multimodal positions `[3, 1, P]` of a prompt of P tokens, as the model computes them."""
    assert segment.vision is not None
    positions, _ = model.base_model.get_rope_index(
        input_ids=torch.from_numpy(segment.input_ids[: segment.prompt_length])[None],
        mm_token_type_ids=is_image.int()[None],
        image_grid_thw=segment.vision.image_grid_thw,
    )
    return positions
