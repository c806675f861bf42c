"""Sizes of two models are compared where both state them."""

from __future__ import annotations

from shared.checkpoint import differences, signature

QWEN = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64, "rope_theta": 1e6}, "vision_config": {"depth": 4}}


def test_a_signature_is_flat_and_has_sizes_only() -> None:
    assert signature(QWEN) == {"model_type": "qwen3_vl", "text_config.hidden_size": "64", "vision_config.depth": "4"}
    assert signature({"model_type": "qwen3", "text_config": None}) == {"model_type": "qwen3"}


def test_only_what_both_state_can_differ() -> None:
    learner = signature(QWEN)
    assert differences(learner, learner | {"vocab_size": "9"}) == []
    assert differences(learner, {}) == []
    assert differences(learner, learner | {"vision_config.depth": "6"}) == ["vision_config.depth 6, not 4"]
