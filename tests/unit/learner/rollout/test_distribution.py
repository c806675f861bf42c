"""Distribution over servers (SPEC.md D4, D10; R07, R21, R23), against a slot-by-slot reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from learner.rollout.distribution import Distribution, ServerSpan, chunk_size, distribute
from shared.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """W ranks with n requests each, servers of these world sizes."""

    n: int
    num_ranks: int
    sizes: tuple[int, ...]
    decode_batch_size: int

    def plan(self, rank: int) -> Distribution:
        return distribute(
            self.n,
            rank=rank,
            num_ranks=self.num_ranks,
            server_world_sizes=self.sizes,
            decode_batch_size=self.decode_batch_size,
        )

    @property
    def chunk(self) -> int:
        return self.decode_batch_size * sum(self.sizes) // self.num_ranks


CASES = st.builds(
    Case,
    n=st.integers(0, 60),
    num_ranks=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple),
    decode_batch_size=st.integers(1, 8),
)


def slot_owners(n: int, num_ranks: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the line of slots, one by one: server `i` takes ceil(G * s_i / T) of them while there are any."""
    owners: list[int] = []
    for server, size in enumerate(sizes):
        for _ in range(-(-num_ranks * n * size // sum(sizes))):
            if len(owners) < num_ranks * n:
                owners.append(server)
    return owners


def slow_quotas(case: Case, rank: int) -> list[int]:
    """Return the slots that D4 gives the rank on each server for n = chunk (D10)."""
    at_chunk = slot_owners(case.chunk, case.num_ranks, case.sizes)[rank * case.chunk : (rank + 1) * case.chunk]
    return [at_chunk.count(server) for server in range(len(case.sizes))]


def slow_plan(case: Case, rank: int) -> list[int]:
    """Return the server of every request of `rank`, request by request: D4's, or the next one that may hold it."""
    mine = slot_owners(case.n, case.num_ranks, case.sizes)[rank * case.n : (rank + 1) * case.n]
    quotas = slow_quotas(case, rank)
    if case.n > case.chunk:
        for i, server in enumerate(mine):
            while quotas[server] == 0:
                server = (server + 1) % len(case.sizes)
            mine[i] = server
        return mine
    for i in range(case.n):  # forwards: a server that is full sends the request on
        mine[i] = max([mine[i], *mine[:i][-1:]])
        while mine[i] < len(quotas) - 1 and mine[:i].count(mine[i]) >= quotas[mine[i]]:
            mine[i] += 1
    for i in reversed(range(case.n)):  # backwards: what the last ones cannot hold goes back
        mine[i] = min([mine[i], *mine[i + 1 :][:1]])
        while mine[i + 1 :].count(mine[i]) >= quotas[mine[i]]:
            mine[i] -= 1
    return mine


@given(CASES)
@example(Case(n=3, num_ranks=3, sizes=(3, 3, 1), decode_batch_size=2))  # the last server is full: one goes back
@example(Case(n=5, num_ranks=3, sizes=(2, 1, 2), decode_batch_size=4))
def test_equals_the_slot_by_slot_reference_and_covers_every_request_in_order(case: Case) -> None:
    """R07: contiguous, ordered, complete, each request once; servers as SPEC.md's sentences say."""
    assume(case.chunk > 0)
    for rank in range(case.num_ranks):
        plan = case.plan(rank)
        edges = [0, *(span.stop for span in plan.spans)]
        assert [span.start for span in plan.spans] == edges[:-1]
        assert edges[-1] == case.n
        assert all(len(span) > 0 for span in plan.spans)
        servers = [span.server for span in plan.spans for _ in range(len(span))]
        assert (servers, list(plan.quotas)) == (slow_plan(case, rank), slow_quotas(case, rank))
        assert plan == case.plan(rank)


@given(CASES, st.data())
def test_all_ranks_together_keep_the_cap_of_every_server(case: Case, data: st.DataObject) -> None:
    """R21, D10: at most decode_batch_size x s_i sequences on server i, whatever each rank has to ask for; every rank
    has at least one place, and every request a server where it may be in flight."""
    assume(case.chunk > 0)
    numbers = data.draw(st.lists(st.integers(0, 60), min_size=case.num_ranks, max_size=case.num_ranks))
    plans = [replace(case, n=n).plan(rank) for rank, n in enumerate(numbers)]
    for server, size in enumerate(case.sizes):
        assert sum(plan.quotas[server] for plan in plans) <= case.decode_batch_size * size
    for plan in plans:
        assert all(plan.quotas[span.server] > 0 for span in plan.spans)
        assert sum(plan.quotas) == case.chunk >= 1


@given(CASES)
def test_up_to_chunk_requests_fly_at_once(case: Case) -> None:
    """D4: with n <= chunk no server gets more than one span, which is within the rank's quota there."""
    assume(0 < case.n <= case.chunk)
    for rank in range(case.num_ranks):
        plan = case.plan(rank)
        assert len({span.server for span in plan.spans}) == len(plan.spans)
        assert all(len(span) <= plan.quotas[span.server] for span in plan.spans)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 4))
def test_one_rank_and_equal_servers_is_ceil_n_over_s(n: int, num_servers: int, size: int) -> None:
    """R07 as document 000 has it: server i gets requests [i * ceil(N/S), (i + 1) * ceil(N/S))."""
    plan = Case(n, 1, (size,) * num_servers, 1000).plan(0)
    share = -(-n // num_servers)
    wanted = [(i, i * share, min(n, (i + 1) * share)) for i in range(num_servers) if i * share < n]
    assert [(span.server, span.start, span.stop) for span in plan.spans] == wanted


@given(st.integers(1, 200), st.lists(st.integers(1, 8), min_size=2, max_size=5).map(tuple))
def test_unequal_servers_share_in_proportion(n: int, sizes: tuple[int, ...]) -> None:
    """R07 as document 002 has it: no server gets more than its proportion, rounded up; only the last ones get less."""
    plan = Case(n, 1, sizes, 1000).plan(0)
    counts = {span.server: len(span) for span in plan.spans}
    shares = [-(-n * size // sum(sizes)) for size in sizes]
    last = max(counts)
    assert all(counts[i] == shares[i] for i in range(last))
    assert counts[last] <= shares[last]


def test_a_server_without_a_cap_hands_its_slots_on_cyclically() -> None:
    """D4: of 5 requests the last lies on server 2, where rank 0 has no slot at n = chunk = 2; the next server is 0."""
    plan = Case(5, 2, (1, 1, 3), 1).plan(0)
    assert [(span.server, span.start, span.stop) for span in plan.spans] == [(0, 0, 2), (1, 2, 4), (0, 4, 5)]
    assert plan.quotas == (1, 1, 0)


def test_few_requests_stay_within_the_quotas() -> None:
    """D10: the one request of rank 1 lies on server 1, where it has no place at n = chunk = 2; server 2 takes it."""
    plan = Case(1, 2, (1, 1, 3), 1).plan(1)
    assert plan == Distribution(spans=(ServerSpan(server=2, start=0, stop=1),), quotas=(0, 0, 2))


def test_no_requests_no_spans() -> None:
    """R07: N = 0 sends nothing."""
    assert Case(0, 2, (1, 3), 4).plan(1) == Distribution(spans=(), quotas=(0, 8))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple), st.integers(1, 8), st.integers(1, 9))
def test_too_small_a_cap_fails_fast_with_advice(sizes: tuple[int, ...], decode_batch_size: int, surplus: int) -> None:
    """R23: decode_batch_size x T < W."""
    num_ranks = decode_batch_size * sum(sizes) + surplus
    with pytest.raises(ConfigError) as caught:
        chunk_size(decode_batch_size=decode_batch_size, server_world_sizes=sizes, num_ranks=num_ranks)
    for rank in range(num_ranks):  # the run goes on where servers were lost since the start: one request per rank
        assert sum(Case(1, num_ranks, sizes, decode_batch_size).plan(rank).quotas) == 1
    assert "decode_batch_size" in caught.value.what
    assert "fewer learner ranks" in caught.value.remedy


def test_the_document_s_infeasible_case() -> None:
    """R23, 002's scenario: decode_batch_size 1, two rollout GPUs, four learner ranks."""
    with pytest.raises(ConfigError, match="4 learner ranks"):
        chunk_size(decode_batch_size=1, server_world_sizes=[1, 1], num_ranks=4)
