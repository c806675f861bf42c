"""How many of the bfloat16 values that a sync sends does one optimizer step change?

In: a size of model. Out: for each way of training and each learning rate, the share of values that differ between two
syncs that are one step apart, and the least bytes that an exact delta between them takes, against a full sync's
(`least_delta`). This says whether sending differences could pay on a slow link.

The ways: the whole model with float32 weights, the whole model with bfloat16 weights, and LoRA on all linear layers,
merged. Weights are random with Qwen3's shapes, or a checkpoint's (`model`). Rows are random text, new ones for each
step, because AdamW's steps are smaller where gradients disagree. First steps warm up and do not count: AdamW's first
step moves every weight by the whole learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.figures import Figure, median, sampled
from bench.learning import draw_segments, free_memory
from bench.models import Size, text_model
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.steps.packing import pack_all

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
WARM_UP = 4
WAYS: dict[str, dict[str, Any]] = {
    "whole model in float32": {"dtype": "float32"},
    "whole model in bfloat16": {"dtype": "bfloat16"},
    "LoRA r 64, merged": {"dtype": "bfloat16", "lora": LoraConfig(r=64, alpha=128)},
}
_SAMPLES, _VALUE_BITS = 16, 16
SENT = torch.bfloat16


def measure(
    folder: Path,
    *,
    size: Size = "0.6B",
    model: Path | None = None,
    rates: Sequence[float] = RATES,
    row_tokens: int = 4096,
    steps: int = 8,
) -> Iterator[Figure]:
    """Measure a policy of its own for each way and rate; `steps` are those that count."""
    path = text_model(folder, size) if model is None else model
    for way, settings in WAYS.items():
        for rate in rates:
            policy = load(path, settings)
            yield from figures(f"{way}, rate {rate:g}", shares(policy, rate, row_tokens=row_tokens, steps=steps))
            del policy
            free_memory()


def load(path: Path, settings: dict[str, Any]) -> Policy:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(path=str(path), compile=False, **settings)
    return load_policy(config, device=device, bf16=device.type == "cuda")


def shares(policy: Policy, rate: float, *, row_tokens: int, steps: int) -> list[float]:
    """Return the share of all values that travel which each step changes."""
    config = TrainingConfig(
        output_dir="unused", max_steps=1, learning_rate=rate, lr_scheduler_type="constant", warmup_steps=0
    )
    optimizer = Optimizer(policy.trainable, config, total_steps=WARM_UP + steps)
    vocab_size = policy.model.config.get_text_config().vocab_size
    found, before = list[float](), dict[str, torch.Tensor]()
    for step in range(WARM_UP + steps):
        segments = draw_segments("long tail", _SAMPLES, capacity=row_tokens, vocab_size=vocab_size, seed=step)
        rows = pack_all(segments, row_tokens)[:1]
        weight_sum = sum(policy.backward(row).weight_sum for row in rows)
        policy.reduce_gradients(Ranks(), weight_sum=weight_sum)
        optimizer.update(step)
        after = {name: tensor.detach().clone() for name, tensor in policy.named_weights(SENT)}
        if step >= WARM_UP:
            found.append(changed_share(before, after))
        before = after
    return found


def changed_share(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the share of changed values, compared by their bits: 0.0 and -0.0 are two values, because a sync is
    exact."""
    counts = [(before[name].view(torch.int16) != after[name].view(torch.int16)).sum() for name in after]
    return int(torch.stack(counts).sum()) / sum(tensor.numel() for tensor in after.values())


def least_delta(share: float) -> float:
    """Return the bytes of an exact delta against all bytes, at least: where the changed values are takes their entropy,
    if places do not depend on each other, and what they are takes their 16 bits, if nothing is known of them."""
    if share in {0.0, 1.0}:
        return share
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return min(1.0, entropy / _VALUE_BITS + share)


def figures(name: str, found: Sequence[float]) -> list[Figure]:
    least = least_delta(median(found))
    return [
        sampled(f"{name}: values that a step changes", found, "share"),
        Figure(name=f"{name}: least bytes of a delta, against a full sync's", value=least, unit="share"),
    ]
