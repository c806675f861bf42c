"""A working directory like the images': the data that deploy/qwen3vl_4b names lies below it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
