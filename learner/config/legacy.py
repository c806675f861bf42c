"""Retired keys and their advice: dotted path -> (what is wanted, what to do). Each fails fast, whatever its value.

Read by `load.py`. The documents that retired them are cited by requirement id.
"""

from __future__ import annotations

_ROLLOUT = "custom.extra.rollout_matching"
_CHANNEL_B = "stage2_ab.channel_b"
_DECODING = ("temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty", "decode_mode", "num_beams")


def _flat_decoding() -> dict[str, tuple[str, str]]:
    return {
        f"{_ROLLOUT}.{name}": (f"{_ROLLOUT}.decoding.{name}", f"move it to {_ROLLOUT}.decoding.{name}")
        for name in _DECODING
    }


RETIRED: dict[str, tuple[str, str]] = {
    # R22: one knob bounds every generation call.
    f"{_ROLLOUT}.rollout_generate_batch_size": (
        f"{_ROLLOUT}.decode_batch_size",
        f"remove it and set {_ROLLOUT}.decode_batch_size, the sequences per rollout GPU in one generation call",
    ),
    f"{_ROLLOUT}.rollout_infer_batch_size": (
        f"{_ROLLOUT}.decode_batch_size",
        f"remove it and set {_ROLLOUT}.decode_batch_size; how many requests a rank sends at once follows from it",
    ),
    f"{_ROLLOUT}.post_rollout_pack_scope": (
        "no packing scope",
        "remove post_rollout_pack_scope: packing is per micro-step (per step in Channel-B), there is no window scope",
    ),
    # D7
    **_flat_decoding(),
    # D3
    f"{_CHANNEL_B}.mode": (
        "no mode",
        "remove it: Channel-B is step-budgeted; for rollouts ahead of learning set "
        "stage2_ab.async_actor_learner.enabled",
    ),
    f"{_CHANNEL_B}.async": (
        "stage2_ab.async_actor_learner",
        "remove it and set stage2_ab.async_actor_learner.enabled (and its version_window, queue_limit)",
    ),
    f"{_CHANNEL_B}.rollouts_per_step": (
        "training.effective_batch_size",
        "remove it and set training.effective_batch_size, which is the rollouts per optimizer step",
    ),
    f"{_CHANNEL_B}.enable_pipeline": (
        "no switch",
        f"remove it: with {_ROLLOUT}.vllm.mode: server and training.packing: true, rollouts and learning overlap; for "
        "rollouts ahead of the step set stage2_ab.async_actor_learner.enabled",
    ),
    f"{_CHANNEL_B}.rollout_decode_batch_size": (
        f"{_ROLLOUT}.decode_batch_size",
        f"remove it and set {_ROLLOUT}.decode_batch_size",
    ),
    # R26
    "stage2_ab.schedule.pattern": (
        "stage2_ab.schedule.b_ratio",
        "remove it and set stage2_ab.schedule.b_ratio, the share of Channel-B steps (pattern AAB is 0.3333)",
    ),
}
