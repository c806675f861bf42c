"""Seeds of rollouts (R11): literal vectors, so that no run ever changes its rollouts by an innocent edit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.seeds import SEED_MODULUS, base_seed, offset_seed, request_seed

BASES = {
    (0, 0, 0): 2891389769238885931,
    (42, 0, 0): 2357508442973936618,
    (42, 7, 3): 2489164955767318681,
    (2**40, 123456, 1): 4182518747314907815,
}
SEEDS = {
    (0, 0, 0): (1458521477, 1458521478, 1458522477),
    (42, 0, 0): (1944139466, 1944139467, 1944140466),
    (42, 7, 3): (351485255, 351485256, 351486255),
    (2**40, 123456, 1): (2083815407, 2083815408, 2083816407),
}
INDICES = st.integers(0, 2**40)


@pytest.mark.parametrize(("key", "base"), BASES.items())
def test_base_seed_vectors(key: tuple[int, int, int], base: int) -> None:
    """R11: (training.seed, global_step, micro_step_idx) to 64 bits."""
    assert base_seed(*key) == base


@pytest.mark.parametrize(("key", "seeds"), SEEDS.items())
def test_request_seed_vectors(key: tuple[int, int, int], seeds: tuple[int, int, int]) -> None:
    """R11: requests 0, 1 and 1000 of a micro-step."""
    run_seed, step, micro = key
    found = tuple(
        request_seed(run_seed=run_seed, global_step=step, micro_step_idx=micro, req_idx=i) for i in (0, 1, 1000)
    )
    assert found == seeds


@given(INDICES, INDICES, INDICES, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_call_s_seed_gives_every_request_s_seed(run: int, step: int, micro: int, first: int, i: int) -> None:
    """R11: the server, which only knows the call's seed, seeds request `i` of it as the formula does."""
    call_seed = request_seed(run_seed=run, global_step=step, micro_step_idx=micro, req_idx=first)
    wanted = (base_seed(run, step, micro) + first + i) % SEED_MODULUS
    assert offset_seed(call_seed, i) == wanted
    assert 0 <= wanted < SEED_MODULUS


def test_seeds_wrap_around_the_modulus() -> None:
    assert offset_seed(SEED_MODULUS - 1, 1) == 0


@given(st.tuples(INDICES, INDICES, INDICES), st.tuples(INDICES, INDICES, INDICES))
def test_different_micro_steps_have_different_bases(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    """Argument order counts: (1, 2, 3) and (3, 2, 1) are different steps."""
    assert (base_seed(*a) == base_seed(*b)) == (a == b)
