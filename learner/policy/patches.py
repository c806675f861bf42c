"""Patch embedding as a matrix product.

In: a vision tower whose patch embedding is a convolution with stride equal to its kernel, fed one patch at a time (the
Qwen-VL towers). Out: the same module computing the same product by a linear layer. Convolution kernels take 30 ms
(CPU, bf16) or tens of times the product's time (CUDA) for what is one small matrix product. Weights, their names and
gradients stay those of the convolution. Called by `load.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F


def use_linear_patch_embedding(model: torch.nn.Module) -> None:
    """Replace the forward of every such `Conv3d` in `model`."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv3d) and _covers_one_patch(module):
            module.forward = partial(_linear_patch, module)  # type: ignore[method-assign]


def _linear_patch(conv: torch.nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """`[P, C, t, h, w]` patches of exactly the kernel's size to `[P, hidden, 1, 1, 1]`."""
    assert patches.shape[2:] == conv.kernel_size, "the vision tower is fed one patch at a time"
    return F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)[..., None, None, None]


def _covers_one_patch(conv: torch.nn.Conv3d) -> bool:
    return conv.kernel_size == conv.stride and set(conv.padding) == {0} and conv.groups == 1
