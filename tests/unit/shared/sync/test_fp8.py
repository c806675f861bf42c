"""Tests of what is left of a weight in FP8, against a slow search through all values that float8_e4m3fn has."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.config import ServerConfig
from shared.quantization import is_quantised, vllm_arguments
from shared.sync.fp8 import FP8_MAX, LEAST_SCALE, quantised, round_trip


def all_values() -> list[float]:
    """Return all values but NaN, the smallest first; one zero."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return sorted(set(codes[~codes.isnan()].tolist()))


VALUES = all_values()


def nearest(value: float) -> float:
    """Return the nearest value of float8_e4m3fn. Of two equally near ones the one whose last bit is 0: every other
    one."""
    exact = Fraction(value)
    distances = [abs(exact - Fraction(one)) for one in VALUES]
    least = min(distances)
    near = [i for i, distance in enumerate(distances) if distance == least]
    zero = VALUES.index(0.0)
    return VALUES[near[0] if len(near) == 1 else next(i for i in near if (i - zero) % 2 == 0)]


def slow(row: list[float]) -> tuple[list[float], float]:
    """Return a row's values and scale. The divisions round to float32 as the device's do."""
    largest = torch.tensor(max(map(abs, row)), dtype=torch.float32)
    scale = torch.maximum(largest / torch.tensor(FP8_MAX), torch.tensor(LEAST_SCALE, dtype=torch.float32))
    scaled = [float(torch.tensor(value, dtype=torch.float32) / scale) for value in row]
    return [nearest(min(max(value, -FP8_MAX), FP8_MAX)) for value in scaled], float(scale)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_value_becomes_the_nearest_one(rows: list[list[float]], dtype: torch.dtype) -> None:
    """R09: rows of zeros, of tiny and of equal values too; a row's scale does not depend on other rows."""
    weight = torch.tensor(rows).to(dtype)
    values, scales = quantised(weight)
    expected = [slow(row) for row in weight.float().tolist()]
    assert list(zip(values.float().tolist(), scales.flatten().tolist(), strict=True)) == expected


def test_ties_go_to_the_even_value() -> None:
    """Halfway between neighbours, where rounding up and rounding to even differ."""
    halves = [(a + b) / 2 for a, b in pairwise(VALUES)]
    row = torch.tensor([[FP8_MAX, *halves]])  # its scale is 1
    values, scale = quantised(row)
    assert scale.item() == 1.0
    assert values.float()[0, 1:].tolist() == [nearest(half) for half in halves]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_weight_keeps_its_type_and_loses_at_most_a_sixteenth(dtype: torch.dtype) -> None:
    """float8_e4m3fn has three bits after the first one."""
    torch.manual_seed(0)
    weight = torch.randn(64, 96).to(dtype)
    left = round_trip(weight)
    assert left.dtype == dtype
    error = (left.float() - weight.float()).abs()
    # Below 2**-6 of the scale values have a fixed step of 2**-9.
    step = weight.float().abs().amax(dim=1, keepdim=True) / FP8_MAX * 2.0**-9
    assert (error <= weight.float().abs() / 16 * 1.01 + step).all()
    assert error.max() > 0


def test_what_is_not_finite_stays_so() -> None:
    """The check of the learner's own scores then finds it."""
    assert not torch.isfinite(round_trip(torch.tensor([[1.0, float("nan"), 2.0]]))).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", True),
        ("model.layers.35.mlp.down_proj", True),
        ("layers.1.mlp.gate_proj", True),
        ("lm_head", False),
        ("model.language_model.embed_tokens", False),
        ("model.visual.blocks.0.attn.proj", False),
        ("model.visual.layers.0.self_attn.q_proj", False),
        ("model.visual.deepstack_merger_list.0.linear_fc1", False),
        ("model.layers.0.self_attn.q_proj.lora_A.default", False),
        ("model.layers.0.self_attn.q_norm", False),
        ("model.layers.0.mlp.experts.3.down_proj", False),
    ],
)
def test_only_the_language_models_layers_are_quantised(name: str, expected: bool) -> None:
    assert is_quantised(name) == expected


def test_vllm_takes_the_arguments() -> None:
    """It keeps the vision tower as it is."""
    config = pytest.importorskip("vllm.config.quantization")
    found = vllm_arguments(ServerConfig(model="m", quantization="fp8"))
    args = config.resolve_quantization_config(found["quantization"], found["quantization_config"])
    assert args.linear.weight.scale.group_shape.col == 1  # a scale per row of a weight
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    assert should_ignore_layer("visual.blocks.0.attn.qkv", ignore=args.ignore)
    assert not should_ignore_layer("language_model.model.layers.0.self_attn.o_proj", ignore=args.ignore)
