"""Rows for the policy's tests: random answers to prompts with any number of images of any size."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.policy.load import Policy, load_policy
from learner.records import EncodedPrompt, PackedRow, Sample, Segment

CPU = torch.device("cpu")


def policy_of(
    path: Path,
    *,
    lora: LoraConfig | None = None,
    bf16: bool = False,
    grpo: GrpoConfig | None = None,
    **options: object,
) -> Policy:
    """Return a policy on the CPU in float32."""
    torch.manual_seed(0)  # adapters start at random
    settings = ModelConfig(path=str(path), lora=lora, **options)  # type: ignore[arg-type]
    return load_policy(settings, device=CPU, bf16=bf16, grpo=grpo)


def image(width: int, height: int, seed: int = 0) -> str:
    """Return a random image as base64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def sample(images: Sequence[str] = (), text: str = "Detect every digit.") -> Sample:
    turn = {"role": "user", "content": "<image>" * len(images) + text}
    return Sample(sample_id="s", messages=(turn,), images=tuple(images), objects=(), width=128, height=128)


def segment(prompt: EncodedPrompt, answer_length: int, seed: int = 0) -> Segment:
    """Return a random answer of ordinary tokens; about half of it supervised, with random weights."""
    rng = np.random.default_rng(seed)
    start = len(prompt.token_ids)
    ids = np.array([*prompt.token_ids, *rng.integers(0, 1200, answer_length)], np.int64)
    supervised = (np.arange(len(ids)) >= start) & (rng.random(len(ids)) < 0.5)
    supervised[start] = True
    return Segment(
        sample_id=f"s{seed}",
        input_ids=ids,
        labels=np.where(supervised, rng.integers(0, 1200, len(ids)), -100),
        loss_weights=(supervised * rng.uniform(0.1, 2.0, len(ids))).astype(np.float32),
        prompt_length=start,
        vision=prompt.vision,
    )


def row(*segments: Segment) -> PackedRow:
    return PackedRow(segments=segments, capacity=4096)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.trainable if p.grad is not None}
