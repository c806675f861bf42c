"""The attacks of `bench.hostile`, a few of each, as they are sent by the thousand (R13, R16, R42)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import hostile
from bench.figures import Figure


def values(figures: Sequence[Figure]) -> dict[str, float]:
    """Return the figures by name, after a check that every bound is held."""
    assert not [figure for figure in figures if figure.good is False]
    return {figure.name.partition(": ")[2]: figure.value for figure in figures}


def test_strangers_at_the_group_s_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "_HONEST_EVERY_S", 0.02)
    found = values(hostile.strangers(600, tmp_path / "unpickled"))
    assert found["frames"] == 600
    assert found["connections that were read, dropped and counted"] > 300


def test_a_member_that_cannot_seal(tmp_path: Path) -> None:
    found = values(hostile.members(600, tmp_path / "unpickled"))
    assert found["honest buckets let through"] == 6
    assert found["refused by their seal"] == 600 - 6 - 2  # two were short


@pytest.mark.slow
def test_calls_that_schemathesis_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """This tries one path; `test_api_schema.py` has all."""
    monkeypatch.setattr("rollout_server.service._versions", dict)
    for fits, statuses in ((True, {200}), (False, {400})):
        answers = hostile._call(("/close_communicator/", fits, 5))
        assert (answers.num_cases, answers.defects) == (5, [])
        assert answers.statuses.keys() <= statuses | {400}
