"""A benchmark hands on GPUs that it may use itself."""

from __future__ import annotations

import pytest

from bench.gpu.devices import visible


@pytest.mark.parametrize(
    ("allowed", "found"),
    [("", ["0", "2"]), ("5,6,7", ["5", "7"]), ("3, 1 ,0", ["3", "0"]), ("GPU-1a,GPU-2b,GPU-3c", ["GPU-1a", "GPU-3c"])],
)
def test_indices_are_of_what_is_visible(allowed: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible(0, 2) == found
