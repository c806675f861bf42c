"""Tests of which rank torchrun tells as the first that failed (R24): one that only lost another gives it time to be
seen."""

from __future__ import annotations

import pytest

from learner import __main__ as command
from shared.errors import CollectiveError, DataError, DeadlineError, ProjectError


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (CollectiveError("a rank is gone"), [command.CAUSE_GRACE_S]),
        (DeadlineError("a server is silent"), []),
        (DataError("a row is broken"), []),
    ],
)
def test_only_a_rank_that_lost_another_waits(
    error: ProjectError, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> int:
        raise error

    waited: list[float] = []
    monkeypatch.setattr(command, "_train", fail)
    monkeypatch.setattr(command.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    assert command.main(["--config", "run.yaml"]) == error.exit_code
    assert waited == waits
    assert f"error (rank 0): {type(error).__name__}: {error.what}" in capsys.readouterr().err
