"""A short sample of `bench.chaos`: a real learner on two ranks, four servers under faults, and what must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.chaos import broken_invariants, chaos

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_nothing_is_lost_under_faults(tmp_path: Path) -> None:
    """D15, R40. Servers run in network namespaces where they can be made. The check itself is shown to find
    what is wrong in the same run's notes."""
    campaign, broken = chaos(tmp_path, seconds=5.0, pause_s=0.4, seed=1, fills_disk=False)
    assert broken == []
    assert len(campaign.faults) >= 3
    notes = tmp_path / "notes1.jsonl"
    whole = notes.read_text().splitlines()
    notes.write_text("\n".join(line for i, line in enumerate(whole) if not (i < 10 and "learned" in line)))
    assert any("each sample once" in found for found in broken_invariants(campaign, []))
    notes.write_text("\n".join([*whole, '{"accepted": "1", "ver": 2}']))
    assert any("other weights" in found for found in broken_invariants(campaign, []))
    assert any("rank 1" in found for found in broken_invariants(campaign, ["rank 1"]))


def test_a_run_ahead_goes_on_under_faults(tmp_path: Path) -> None:
    """D15, R40, with `async_actor_learner`: rollouts of the next steps are under way when a server fails."""
    kinds = ("kill", "freeze")
    settings: dict[str, Any] = {"ahead": True, "loopback": True, "kinds": kinds}
    campaign, broken = chaos(tmp_path, seconds=4.0, pause_s=0.4, seed=2, fills_disk=False, **settings)
    assert broken == []
    assert len(campaign.faults) >= 3
    assert any(event["event"] == "server" and event["what"] == "lost" for event in campaign.events())
