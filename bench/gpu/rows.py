"""Segments as long as those of real work, as packed rows and as a padded batch, and the arithmetic that they need.

In: a distribution of lengths, how many samples, the rows' capacity. Out: `PackedRow`s, all of them once packed by the
learner's own packer and once padded, and a row's model FLOPs. Called by `learning.py`.

"long tail": prompts of 300 to 1,200 tokens (text and the tokens of one image, all of them random ids: no vision tower),
answers of 220 tokens in the median, lognormal with sigma 0.9: a mean of 330, 1 in 20 above 970.
"demo": the same prompts, answers of 35 tokens an object (Qwen's JSON with coordinates in digits) and four times the
objects of the demo's rollouts on its 200 test scenes after stage 2 (1 to 8 of them, here 4 to 32): hardly any tail.
Half of an answer's tokens are supervised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from transformers import PreTrainedModel

from learner.records import PackedRow, Segment
from learner.steps.packing import pack_all

Lengths = Literal["long tail", "demo"]
PROMPT_TOKENS = (300, 1200)
MEDIAN_ANSWER, SIGMA, LONGEST_ANSWER = 220, 0.9, 4096
DEMO_OBJECTS = {1: 18, 2: 24, 3: 30, 4: 22, 5: 14, 6: 27, 7: 29, 8: 36}  # predicted objects: rollouts
TOKENS_PER_OBJECT, CROWDING = 35, 4
FULL_CAPACITY = 16_384  # what the lengths above are meant for; a smaller capacity shrinks them


def draw_segments(which: Lengths, count: int, *, capacity: int, vocab_size: int, seed: int) -> list[Segment]:
    """`count` segments; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    scale = min(1.0, capacity / FULL_CAPACITY)
    prompts = rng.integers(*PROMPT_TOKENS, count, endpoint=True)
    if which == "long tail":
        answers = np.minimum(rng.lognormal(np.log(MEDIAN_ANSWER), SIGMA, count), LONGEST_ANSWER)
    else:
        objects = np.repeat(list(DEMO_OBJECTS), list(DEMO_OBJECTS.values()))
        answers = rng.choice(objects, count) * CROWDING * TOKENS_PER_OBJECT
    sizes = np.maximum(2, np.stack([prompts, answers]) * scale).astype(int)
    return [_segment(rng, int(prompt), int(answer), vocab_size) for prompt, answer in sizes.T]


def _segment(rng: np.random.Generator, prompt: int, answer: int, vocab_size: int) -> Segment:
    ids = rng.integers(0, vocab_size, prompt + answer)
    supervised = (np.arange(len(ids)) >= prompt) & (rng.random(len(ids)) < 0.5)
    return Segment(
        sample_id="",
        input_ids=ids,
        labels=np.where(supervised, ids, -100),
        loss_weights=supervised.astype(np.float32),
        prompt_length=prompt,
    )


def packed(segments: Sequence[Segment], capacity: int) -> list[PackedRow]:
    """As the learner packs a step."""
    return pack_all(segments, capacity)


def padded(segments: Sequence[Segment], capacity: int) -> list[PackedRow]:
    """Batches in order of arrival, as many samples as fit when all are as long as the longest, padding at the end.

    Padding is computed as if it were text of its segment, in the same kernels and programs: nothing before it attends
    to it, and it is not supervised. A rectangular batch would cost the same; a mask would cost more.
    """
    batches: list[list[Segment]] = [[]]
    for segment in segments:
        batch = [*batches[-1], segment]
        if len(batch) * max(map(len, batch)) > capacity:
            batches.append([segment])
        else:
            batches[-1] = batch
    return [_rectangle(batch, capacity) for batch in batches if batch]


def _rectangle(batch: Sequence[Segment], capacity: int) -> PackedRow:
    longest = max(map(len, batch))
    return PackedRow(segments=tuple(_pad(segment, longest) for segment in batch), capacity=capacity)


def _pad(segment: Segment, length: int) -> Segment:
    more = (0, length - len(segment))
    return replace(
        segment,
        input_ids=np.pad(segment.input_ids, more),
        labels=np.pad(segment.labels, more, constant_values=-100),
        loss_weights=np.pad(segment.loss_weights, more),
    )


def model_flops(model: PreTrainedModel, row: PackedRow) -> float:
    """Multiplications and additions that learning this row needs, forward and backward, recomputation not counted.

    `6 N T + 6 V h S + 3 layers x sum over segments of 2 L (L + 1) H D`: N weights of the layers' matrices and T tokens;
    V x h weights of the output head and S supervised tokens; L tokens of a segment, each attending to itself and all
    before it, with H query heads of size D.
    """
    settings = model.config.get_text_config()
    layers = model.get_decoder().layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    supervised = sum(int((segment.labels != -100).sum()) for segment in row.segments)
    pairs = sum(len(segment) * (len(segment) + 1) for segment in row.segments)
    width = settings.num_attention_heads * settings.head_dim
    head = settings.vocab_size * settings.hidden_size
    return 6.0 * weights * row.num_tokens + 6.0 * head * supervised + 3.0 * len(layers) * 2 * pairs * width
