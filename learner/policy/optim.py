"""AdamW with a learning-rate schedule and clipping by the global norm.

In: the policy's trained parameters by name, with the gradients of the whole step (`reduce_gradients`). Out: updated
parameters, no gradients, and two numbers for the step's metrics: learning rate and gradient norm. Call `update` once
per optimizer step.

Weight decay applies to matrices only. Norms, biases and DoRA magnitudes (one dimension) are not decayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from learner.config.sections.training import TrainingConfig
from learner.policy.sharding import is_part, part_of, whole, whole_on_host
from shared.errors import CheckpointError, LossError

_BETAS = (0.9, 0.95)
Schedule = Literal["constant", "linear", "cosine"]
_MOMENTS = ("exp_avg", "exp_avg_sq")  # tensors of the parameter's shape, sharded like the parameter


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of update number `step` (counted from 0). The rate rises linearly to `peak` in the first
    `warmup_steps` updates, then follows the schedule, which ends after `total_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - progress)
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW over named parameters. The learning-rate schedule ends after `total_steps` updates."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], config: TrainingConfig, *, total_steps: int
    ) -> None:
        self._named, self._config, self._total_steps = list(parameters), config, total_steps
        matrices = [p for _, p in parameters if p.ndim >= 2]
        others = [p for _, p in parameters if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=_BETAS,
            fused=True,
        )

    def update(self, step: int, *, share: float = 1.0) -> tuple[float, float]:
        """Clip the gradients, update the parameters, and remove the gradients. Returns the learning rate and the
        gradients' global norm before clipping. `share`: factor on the scheduled learning rate.

        Raises LossError if the gradient is not finite, before any weight changes.
        """
        config = self._config
        parameters = [p for _, p in self._named]
        total_norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, total_norm)
        norm = float(total_norm)
        if not math.isfinite(norm):
            raise LossError(
                f"the gradient of optimizer step {step} is not finite",
                found=f"a norm of {norm}",
                wanted="a finite gradient",
                remedy="lower training.learning_rate, or train the weights in float32 (model.dtype)",
            )
        rate = share * learning_rate(
            step,
            peak=config.learning_rate,
            schedule=config.lr_scheduler_type,
            warmup_steps=config.warmup_steps,
            total_steps=self._total_steps,
        )
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return rate, norm

    def state(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return each parameter's moments and step count as `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`; {} before
        the first update. For a sharded model this is collective: a rank with `keep` returns whole tensors in host
        memory, a rank without it {}."""
        state = {
            f"{name}.{key}": tensor for name, p in self._named for key, tensor in self._adamw.state.get(p, {}).items()
        }
        return whole_on_host(state, keep=keep) if any(map(is_part, state.values())) else state

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from another optimizer's `state()`. Raises CheckpointError without any change if the trained
        parameters differ or a moment does not fit its parameter."""
        stored: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, moment = key.rpartition(".")
            stored.setdefault(name, {})[moment] = tensor
        wanted = {name for name, _ in self._named}
        if stored and stored.keys() != wanted:
            different = sorted(stored.keys() ^ wanted)
            raise CheckpointError(
                "the optimizer state belongs to other parameters",
                found=f"{len(stored)} parameters, {len(different)} of them different: {different[:3]}",
                wanted=f"the {len(wanted)} parameters that are trained now",
                remedy="resume with the same model.freeze and model.lora, or start anew from the checkpoint's model",
            )
        # All moments are checked before the first one is changed.
        for name, p in self._named if stored else ():
            _check_moments(name, p, stored[name])
        for name, p in self._named if stored else ():
            self._adamw.state[p] = {
                moment: (part_of(tensor, p) if moment in _MOMENTS else tensor).to(p.device, copy=True)
                for moment, tensor in stored[name].items()
            }


def _check_moments(name: str, p: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> None:
    sizes = {"step": torch.Size(), **dict.fromkeys(_MOMENTS, p.shape)}
    found = {moment: tensor.shape for moment, tensor in stored.items()}
    if found != sizes:
        raise CheckpointError(
            f"the optimizer state of {name} does not fit the parameter",
            found=", ".join(f"{moment} {tuple(shape)}" for moment, shape in found.items()),
            wanted=", ".join(f"{moment} {tuple(shape)}" for moment, shape in sizes.items()),
            remedy="resume from the checkpoint before it, or start anew from the checkpoint's model",
        )
