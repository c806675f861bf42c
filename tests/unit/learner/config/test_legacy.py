"""Retired keys fail fast, whatever their value, each with its own advice (R22, D3, D7, R26)."""

from __future__ import annotations

import pytest

from learner.config.load import RETIRED
from tests.unit.learner.config.examples import REMOVE, ROLLOUT, mistakes, only_mistake, stage2

DECODE = f"{ROLLOUT}.decode_batch_size"
ADVICE = {
    f"{ROLLOUT}.rollout_generate_batch_size": DECODE,
    f"{ROLLOUT}.rollout_infer_batch_size": DECODE,
    f"{ROLLOUT}.post_rollout_pack_scope": "remove post_rollout_pack_scope",
    "stage2_ab.channel_b.mode": "stage2_ab.async_actor_learner",
    "stage2_ab.channel_b.async": "stage2_ab.async_actor_learner.enabled",
    "stage2_ab.channel_b.rollouts_per_step": "training.effective_batch_size",
    "stage2_ab.channel_b.enable_pipeline": "stage2_ab.async_actor_learner",
    "stage2_ab.channel_b.rollout_decode_batch_size": DECODE,
    "stage2_ab.schedule.pattern": "stage2_ab.schedule.b_ratio",
    f"{ROLLOUT}.best_of": "labels.complete",
    "logging.tensorboard": "logging.trackers",
    "data.reader": "data.format",
    "data.max_samples": "[:10%]",
    **{
        f"{ROLLOUT}.{name}": f"{ROLLOUT}.decoding.{name}"
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "max_new_tokens",
            "repetition_penalty",
            "decode_mode",
            "num_beams",
        )
    },
}


@pytest.mark.parametrize("value", [None, 1, "window", {"a": 1}])
@pytest.mark.parametrize("path", ADVICE)
def test_r22_d3_d7_a_retired_key_names_its_replacement(path: str, value: object) -> None:
    mistake = only_mistake(stage2(), {path: value})
    assert (mistake.path, mistake.found) == (path, "a retired key")
    assert ADVICE[path] in mistake.remedy


def test_every_retired_key_is_tested_and_its_advice_is_its_own() -> None:
    assert set(RETIRED) == set(ADVICE)
    assert len({remedy for _, remedy in RETIRED.values()}) == len(RETIRED)


def test_all_retired_keys_are_told_at_once() -> None:
    assert {m.path for m in mistakes(stage2(), dict.fromkeys(ADVICE, 1))} == set(ADVICE)


def test_r26_pattern_instead_of_b_ratio() -> None:
    """The error names the retired key and the missing one."""
    changes = {"stage2_ab.schedule.pattern": "AAB", "stage2_ab.schedule.b_ratio": REMOVE}
    assert [m.path for m in mistakes(stage2(), changes)] == ["stage2_ab.schedule.pattern", "stage2_ab.schedule.b_ratio"]
