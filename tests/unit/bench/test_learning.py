"""The FLOPs of a row with photographs against what torch counts, and the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.learning import draw_segments, model_flops, num_patches, tower_flops, with_photographs
from bench.tiny import tiny_model
from learner.policy.load import Policy
from learner.records import PackedRow
from learner.steps.packing import pack_all
from tests.unit.learner.policy.rows import policy_of

CAPACITY = 2048


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return policy_of(tiny_model(tmp_path_factory.mktemp("tiny")))


def text_row(policy: Policy) -> PackedRow:
    vocab_size = policy.model.config.get_text_config().vocab_size
    segments = draw_segments("long tail", 4, capacity=CAPACITY, vocab_size=vocab_size, seed=0)
    return pack_all(segments, CAPACITY)[0]


def counted_forward(policy: Policy, row: PackedRow, part: str) -> int:
    """Count the matrix products of a forward pass inside of a module. torch does not count attention on CPU."""
    counter = FlopCounterMode(display=False)
    with counter:
        policy.backward(row)
    (found,) = (of for name, of in counter.get_flop_counts().items() if name.endswith(part))
    return int(found[torch.ops.aten.addmm])


def test_the_towers_flops_are_what_torch_counts(policy: Policy) -> None:
    row = with_photographs(text_row(policy), policy.model, seed=0)
    assert num_patches(row) > 1000
    tower, embedding = (counted_forward(policy, row, part) for part in (".visual", ".patch_embed.proj"))
    settings = policy.model.config.vision_config
    patches = [len(segment.vision.pixel_values) for segment in row.segments if segment.vision is not None]
    attention = settings.depth * sum(4 * number**2 * settings.hidden_size for number in patches)
    assert tower_flops(policy.model, row) == 3 * tower - embedding + 3 * attention


def test_a_row_without_photographs_has_no_flops_of_the_tower(policy: Policy) -> None:
    text = text_row(policy)
    row = with_photographs(text, policy.model, seed=0)
    assert tower_flops(policy.model, text) == 0.0
    assert model_flops(policy.model, row) == model_flops(policy.model, text) + tower_flops(policy.model, row)


def test_a_photograph_takes_the_place_of_a_prompts_tokens(policy: Policy) -> None:
    text = text_row(policy)
    row = with_photographs(text, policy.model, seed=0)
    side = policy.model.config.vision_config.spatial_merge_size
    for segment, before in zip(row.segments, text.segments, strict=True):
        assert segment.vision is not None
        is_image = segment.input_ids == policy.model.config.image_token_id
        assert len(segment) == len(before)
        assert is_image[: segment.prompt_length].sum() * side**2 == len(segment.vision.pixel_values)
        assert segment.vision.image_grid_thw.prod() == len(segment.vision.pixel_values)
        assert not is_image[segment.prompt_length :].any()
        assert np.array_equal(segment.labels != -100, before.labels != -100)
