"""Tests of which servers serve: what follows from losses, syncs and requests, in any order (D15, R40)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollout.membership import Member, Membership, MinServers
from shared.wire import ServedWeights

URLS = ["http://a", "http://b", "http://c"]


def membership(min_servers: MinServers = 1) -> Membership:
    return Membership(members=tuple(Member(base_url=url, group_port=1) for url in URLS), min_servers=min_servers)


def served(ver: int) -> ServedWeights:
    return ServedWeights(ver=ver, incarnation=f"i{ver}", weights=f"w{ver}")


def urls(members: tuple[Member, ...]) -> list[str]:
    return [member.base_url for member in members]


def test_a_server_that_was_left_out_serves_after_a_sync_to_it_and_not_before() -> None:
    lost = membership().leave_out(URLS[1], "killed", now_s=1.0)
    assert urls(lost.serving) == [URLS[0], URLS[2]]
    without = lost.synced([URLS[0], URLS[2]], served(1), now_s=2.0)
    assert urls(without.out) == [URLS[1]]
    back = without.synced(URLS, served(2), now_s=3.0)
    assert urls(back.serving) == URLS
    assert [(c.base_url, c.what, c.serving) for c in lost.changes_since(membership())] == [(URLS[1], "lost", 2)]
    assert [(c.base_url, c.what, c.serving) for c in back.changes_since(without)] == [(URLS[1], "joined", 3)]


def test_an_added_server_waits_for_a_sync_and_a_removed_one_for_the_next_group() -> None:
    changed = membership().add("http://d", 2, now_s=1.0).remove(URLS[0], now_s=1.0)
    assert urls(changed.serving) == URLS[1:]
    assert changed.add("http://d", 2, now_s=2.0) == changed, "added twice"
    after = changed.synced([*URLS[1:], "http://d"], served(1), now_s=3.0)
    assert urls(after.members) == [*URLS[1:], "http://d"] == urls(after.serving)


@pytest.mark.parametrize(
    ("min_servers", "losses", "enough"), [(1, 2, True), (1, 3, False), (2, 2, False), ("all", 1, False)]
)
def test_how_many_may_be_lost(min_servers: MinServers, losses: int, enough: bool) -> None:
    found = membership(min_servers)
    for url in URLS[:losses]:
        found = found.leave_out(url, "killed", now_s=1.0)
    assert found.enough == enough
    if not enough:
        error = found.too_few()
        assert URLS[0] in error.found
        assert "min_servers" in error.wanted


def test_a_new_server_that_cannot_join_is_not_missed() -> None:
    """`min_servers: all` means all that have served."""
    found = membership("all").add("http://d", 2, now_s=1.0).refuse("http://d", "another model", now_s=2.0)
    assert found.enough


def test_the_last_requests_of_a_user_count() -> None:
    """Removed, added again before the next sync: it must be synced before it serves."""
    found = membership().remove(URLS[0], now_s=1.0).add(URLS[0], 1, now_s=2.0)
    assert urls(found.serving) == URLS[1:]
    assert urls(found.out) == [URLS[0]]


def test_a_removed_server_that_does_not_serve_is_gone_at_once_and_the_others_stay() -> None:
    lost = membership().leave_out(URLS[1], "killed", now_s=1.0)
    after = lost.remove(URLS[1], now_s=2.0)
    assert urls(after.members) == [URLS[0], URLS[2]] == urls(after.serving)
    assert after.number == lost.number + 1


def test_failures_are_counted_until_a_sync() -> None:
    """The wait after each failure depends on them."""
    found = membership().leave_out(URLS[0], "killed", now_s=1.0)
    counted = [found.members[0].failures]
    for _ in range(2):
        found = found.refuse(URLS[0], "another model", now_s=2.0)
        counted.append(found.members[0].failures)
    found = found.synced(URLS, served(1), now_s=3.0)
    assert [*counted, found.members[0].failures] == [1, 2, 3, 0]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["lose", "add", "remove", "refuse", "sync"]), st.sampled_from([*URLS, "http://d"])),
    max_size=30,
)


@given(EVENTS, st.sets(st.sampled_from([*URLS, "http://d"])))
def test_whatever_happens_only_synced_servers_serve(events: list[tuple[str, str]], ready: set[str]) -> None:
    """The explored state: every order of events. A server serves only the weights of the last sync that reached it;
    each one is listed once; the number rises with every change; changes say exactly what differs."""
    found, ver = membership().synced(URLS, served(0), now_s=0.0), 0
    holds = dict.fromkeys(URLS, 0)  # versions that each server process has, as far as syncs reached it
    for what, url in events:
        before = found
        if what == "lose":
            found = found.leave_out(url, "killed", now_s=1.0)
            if before.get(url) is not None:
                holds.pop(url, None)  # it may have been restarted with anything
        elif what == "add":
            found = found.add(url, 1, now_s=1.0)
        elif what == "remove":
            found = found.remove(url, now_s=1.0)
        elif what == "refuse":
            found = found.refuse(url, "not ready", now_s=1.0)
        else:
            ver += 1
            reached = [*urls(found.serving), *(u for u in urls(found.out) if u in ready)]
            found = found.synced(reached, served(ver), now_s=1.0)
            holds |= dict.fromkeys(reached, ver)
            assert urls(found.serving) == [u for u in urls(found.members) if u in reached]
        listed = urls(found.members)
        assert len(set(listed)) == len(listed)
        assert found.served is not None
        assert all(holds.get(u) == found.served.ver for u in urls(found.serving)), "serves what it was not given"
        states = [{m.base_url: m.state for m in one.members} for one in (before, found)]
        assert found.number >= before.number
        assert found.number - before.number <= 1
        assert (states[0] != states[1]) <= (found.number > before.number)
        for change in found.changes_since(before):
            moved = states[0].get(change.base_url) != states[1].get(change.base_url)
            assert moved or change.what == "refused" == f"{what}d"
            assert (change.what == "joined") == (states[1].get(change.base_url) == "serving")
