"""The two tiers of tests: `make test`, and with `slow` ones `make check`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return parameters of one more test of the same kind: `make check` runs it, `make test` does not."""
    return pytest.param(*values, marks=pytest.mark.slow)
