"""The number of examples that a property test draws: a quarter of what is named, all of them with TEST_EXAMPLES=all.

Examples are the same in every run, so a short run repeats what the last one has shown. Draw all of them after a change
to what the property is about.
"""

from __future__ import annotations

import os

_SHARE = 1 if os.environ.get("TEST_EXAMPLES") == "all" else 4


def examples(number: int) -> int:
    """Return the number of examples for `hypothesis.settings(max_examples=...)`."""
    return max(10, number // _SHARE)
