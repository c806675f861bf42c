"""R26, R27: the schedule's share is exact, the feasibility gate holds."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from learner.config.schedule import (
    B_STEP_SKIPPED,
    decide_channel,
    exact_ratio,
    scheduled_channel,
)
from shared.errors import ConfigError

STEPS = 10_000


@settings(max_examples=12, deadline=None)
@given(st.floats(0.0, 1.0) | st.integers(0, 1000).map(lambda k: k / 1000))
@example(0.1)
@example(0.29)  # 100 * 0.29 falls below 29 in doubles
@example(1 / 3)
@example(5e-324)
@example(1.0)
def test_channel_b_share_is_exact_after_every_step(b_ratio: float) -> None:
    """R26: after n steps floor(n * b) were B, for each n up to 10,000; in integers alone."""
    numerator, denominator = Fraction(repr(b_ratio)).as_integer_ratio()
    executed = 0
    for step in range(STEPS):
        executed += scheduled_channel(step, b_ratio) == "B"
        assert executed == (step + 1) * numerator // denominator


def test_ratio_is_the_decimal_of_the_configuration() -> None:
    """R26: 0.1 means one tenth, not the double beside it."""
    assert exact_ratio(0.1) == Fraction(1, 10)
    assert exact_ratio(1e-05) == Fraction(1, 100_000)
    assert [scheduled_channel(step, 0.3) for step in range(10)] == list("AAABAABAAB")


@pytest.mark.parametrize("b_ratio", [-0.1, 1.1, float("nan"), float("inf")])
def test_ratio_outside_zero_to_one_names_the_key(b_ratio: float) -> None:
    """R26."""
    with pytest.raises(ConfigError, match=r"stage2_ab\.schedule\.b_ratio"):
        scheduled_channel(0, b_ratio)


@given(st.integers(0, STEPS), st.floats(0, 1), st.booleans())
def test_b_runs_only_where_every_rank_has_packs(step: int, b_ratio: float, feasible: bool) -> None:
    """R27: B iff wanted and feasible; a skipped B is logged, a wanted A is not a skip."""
    decision = decide_channel(step, b_ratio, feasible=feasible)
    wanted = scheduled_channel(step, b_ratio) == "B"
    assert (decision.channel == "B") == (wanted and feasible)
    assert decision.metrics()[B_STEP_SKIPPED] == float(wanted and not feasible)


def test_metric_name() -> None:
    """R27 fixes the name."""
    assert B_STEP_SKIPPED == "stage2_ab/async/b_step_skipped_due_to_queue"
