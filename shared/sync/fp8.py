"""The weights with which an FP8 engine computes (`quantization: fp8`): quantised as vLLM's kernel does it.

In: rows of a weight. Out: what is left of them. The learner scores the canary with these. The source of the rule is
vLLM's `dynamic_per_token_scaled_fp8_quant`: the largest value of a row becomes 448, and every other one the nearest
value of float8_e4m3fn, ties to even. Nothing here waits for the device.

The engine quantises the inputs of its layers too, each token by itself. That is not repeated here. Inputs that differ
by what kernels round differently are quantised to other values now and then, and in a few layers these differences grow
as large as those of not quantising at all. On CPU (vLLM 0.32) a reference with quantised inputs was no closer to the
engine than one without: 0.005 nats per token and 0.004 for the demo's model, 0.035 both for a small random one.
"""

from __future__ import annotations

import math

import torch

FP8_MAX = 448.0  # the largest value of float8_e4m3fn
LEAST_SCALE = 1.0 / (FP8_MAX * 512.0)  # vLLM's, for rows of zeros


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8_e4m3fn `[N, K]` of a weight `[N, K]`, and the scales of its rows, float32 `[N, 1]`."""
    weight = weight.detach()
    largest = torch.linalg.vector_norm(weight, ord=math.inf, dim=-1, keepdim=True).to(torch.float32)
    # A divisor on the device: torch multiplies by the inverse of a Python number, which rounds otherwise.
    scale = torch.clamp(largest / torch.full_like(largest, FP8_MAX), min=LEAST_SCALE)
    # A quotient exceeds 448 by rounding only, and rounds to it. From 464 on torch would make NaN of it.
    return torch.div(weight, scale).to(torch.float8_e4m3fn), scale


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    """Return the values that are left of a weight `[N, K]`, in its own dtype: quantised, and multiplied out again."""
    values, scale = quantised(weight)
    return torch.mul(values.to(weight.dtype), scale, out=torch.empty_like(weight.detach()))
