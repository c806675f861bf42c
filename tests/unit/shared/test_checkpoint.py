"""Tests of whether two models are of one kind, and whether they are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import checkpoint
from shared.checkpoint import checkpoint_digest, differences, signature

QWEN = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64, "rope_theta": 1e6}, "vision_config": {"depth": 4}}


def test_a_signature_is_flat_and_has_sizes_only() -> None:
    assert signature(QWEN) == {"model_type": "qwen3_vl", "text_config.hidden_size": "64", "vision_config.depth": "4"}
    assert signature({"model_type": "qwen3", "text_config": None}) == {"model_type": "qwen3"}


def test_only_what_both_state_can_differ() -> None:
    learner = signature(QWEN)
    assert differences(learner, learner | {"vocab_size": "9"}) == []
    assert differences(learner, {}) == []
    assert differences(learner, learner | {"vision_config.depth": "6"}) == ["vision_config.depth 6, not 4"]


def test_two_checkpoints_never_have_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: every byte counts, and its place in the files, however long they are."""
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 8)

    def digest(name: str, *contents: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for i, content in enumerate(contents):
            (folder / f"model-{i}.safetensors").write_bytes(content)
        return checkpoint_digest(str(folder))

    first = bytes(range(20))
    others = [
        (bytes(19) + b"\1",),
        (first[:19] + b"\0",),
        (b"\1" + first[1:],),
        (first[8:16] + first[:8] + first[16:],),
        (first + b"\0",),
        (first[:19],),
        (first[:16], first[16:]),
        (first[:10], first[10:]),
        (first, first),
        (b"",),
        (),
    ]
    digests = {digest("first", first), *(digest(str(i), *contents) for i, contents in enumerate(others))}
    assert len(digests) == len(others) + 1
    assert digest("copy", first) in digests
