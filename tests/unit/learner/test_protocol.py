"""Server and learner side of the protocol together, explored: the real `Gate` of each server, the real `Membership` of
the learner, and all orders of a few events between them (D15, R40).

Two servers and a third one that is added. Events: a server process is restarted, poisoned, taken by another learner
(which may send its own weights under the same version), lost, added, removed; a sync to those who serve and any of
those who are out, which goes well or fails at one of them after some others have completed it. Every state that can be
reached within `DEPTH` events is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, combinations

import pytest

from learner.rollout.membership import Member, Membership
from rollout_server.gate import Gate
from shared.wire import ServedWeights

URLS = ("http://a", "http://b", "http://c")
DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class Server:
    """`holds`: what the weights in memory really are."""

    gate: Gate
    holds: str

    def updated(self, incarnation: str, ver: int, weights: str, *, fails: bool) -> Server:
        gate = copy(self.gate)
        gate.begin_update(incarnation, ver, "full")
        assert gate.drained()
        if fails:
            gate.fail("a broken connection")
            return Server(gate=gate, holds="mixed")
        gate.complete(weights)
        return Server(gate=gate, holds=weights)

    def in_group(self, incarnation: str) -> Server:
        gate = copy(self.gate)
        gate.open_group(incarnation)
        return replace(self, gate=gate)

    def poisoned(self) -> Server:
        gate = copy(self.gate)
        gate.poison("nan")
        return replace(self, gate=gate)


FRESH = Server(gate=Gate("checkpoint"), holds="checkpoint")


@dataclass(frozen=True, kw_only=True)
class World:
    servers: tuple[Server, ...]  # same order as URLS
    membership: Membership
    num_groups: int = 0
    last_accepted: int = 0  # version

    @property
    def key(self) -> object:
        """The part of the state that matters."""
        gates = [(s.gate.state, s.gate.served, s.gate.incarnation, s.gate._unsound, s.holds) for s in self.servers]
        members = [(m.base_url, m.state, m.is_new) for m in self.membership.members]
        return tuple(gates), tuple(members), self.membership.served, self.num_groups

    def with_server(self, index: int, server: Server) -> World:
        return replace(self, servers=(*self.servers[:index], server, *self.servers[index + 1 :]))


def successors(world: World) -> Iterator[tuple[str, World]]:
    membership = world.membership
    for i, url in enumerate(URLS):
        server = world.servers[i]
        yield f"restart {url}", world.with_server(i, FRESH)
        yield f"poison {url}", world.with_server(i, server.poisoned())
        stolen = server.in_group("other")
        yield f"another learner joins {url}", world.with_server(i, stolen)
        theirs = stolen.updated("other", server.gate.ver + 1, "of another learner", fails=False)
        yield f"another learner syncs {url}", world.with_server(i, theirs)
        yield f"lose {url}", replace(world, membership=membership.leave_out(url, "it failed", now_s=0.0))
        yield f"add {url}", replace(world, membership=membership.add(url, 1, now_s=0.0))
        if len(membership.remove(url, now_s=0.0).serving):
            yield f"remove {url}", replace(world, membership=membership.remove(url, now_s=0.0))
    out = [member.base_url for member in membership.out]
    for ready in chain.from_iterable(combinations(out, n) for n in range(len(out) + 1)):
        targets = [member.base_url for member in membership.serving] + list(ready)
        for failing in (None, *targets):
            if targets and targets != [failing]:
                yield f"sync to {targets}, {failing} fails", synced(world, targets, failing)


def synced(world: World, targets: list[str], failing: str | None) -> World:
    """Sync as `Sync` and `ServerDelivery` do it: after a failure again, in a new group without whoever failed, above
    all versions that a server has seen."""
    if failing is not None:
        world, _ = attempt(world, targets, failing)
        lost = world.membership.leave_out(failing, "it failed the sync", now_s=0.0)
        world, targets = replace(world, membership=lost), [url for url in targets if url != failing]
    world, served = attempt(world, targets, None)
    return replace(world, membership=world.membership.synced(targets, served, now_s=0.0))


def attempt(world: World, targets: list[str], failing: str | None) -> tuple[World, ServedWeights]:
    """Make one attempt: all join; then each completes the update, up to the one that fails."""
    incarnation = f"group {world.num_groups + 1}"
    world = replace(world, num_groups=world.num_groups + 1)
    for url in targets:
        i = URLS.index(url)
        world = world.with_server(i, world.servers[i].in_group(incarnation))
    ver = 1 + max(world.servers[URLS.index(url)].gate.ver for url in targets)
    served = ServedWeights(ver=ver, incarnation=incarnation, weights=f"ours {world.num_groups}")
    for url in targets:
        i = URLS.index(url)
        updated = world.servers[i].updated(incarnation, ver, served.weights, fails=url == failing)
        world = world.with_server(i, updated)
        if url == failing:
            break
    return world, served


def accepted(world: World) -> Iterator[tuple[Server, ServedWeights]]:
    """Yield the servers that answer now, and whose answers the learner takes: those that name what the last sync
    brought."""
    for member in world.membership.serving:
        server, wanted = world.servers[URLS.index(member.base_url)], world.membership.served
        if server.gate.state == "poisoned":
            continue
        named = ServedWeights(
            ver=server.gate.served.ver, incarnation=server.gate.served.incarnation, weights=server.gate.served.weights
        )
        if wanted is not None and named == wanted:
            yield server, wanted


def check(world: World) -> None:
    for server in world.servers:
        if server.gate.state == "serving":
            assert server.holds == server.gate.served.weights, "it serves what was not checked as a whole"
    for server, wanted in accepted(world):
        assert server.holds == wanted.weights, "an answer by other weights is accepted"
    listed = [member.base_url for member in world.membership.members]
    assert len(set(listed)) == len(listed)


def explore(start: World, depth: int) -> tuple[int, int]:
    """States and how many of them have a server whose answers count. Fails with the way to a state that is wrong."""
    seen, usable = {start.key}, 0
    frontier: list[tuple[World, tuple[str, ...]]] = [(start, ())]
    for _ in range(depth):
        following: list[tuple[World, tuple[str, ...]]] = []
        for world, way in frontier:
            for name, found in successors(world):
                if found.key in seen:
                    continue
                seen.add(found.key)
                try:
                    check(found)
                except AssertionError as error:
                    raise AssertionError(f"{error}, after {[*way, name]}") from error
                usable += any(True for _ in accepted(found))
                following.append((found, (*way, name)))
        frontier = following
    return len(seen), usable


def start() -> World:
    members = tuple(Member(base_url=url, group_port=1) for url in URLS[:2])
    world = World(servers=(FRESH,) * 3, membership=Membership(members=members))
    return synced(world, list(URLS[:2]), None)


def test_no_order_of_events_lets_other_weights_through() -> None:
    states, usable = explore(start(), DEPTH)
    assert states > 5_000
    assert usable > 1_000, "the exploration is not vacuous"


def test_the_exploration_finds_a_learner_that_looks_at_the_version_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another learner's weights may have the same version: the incarnation and the digest tell them apart."""

    def by_version(world: World) -> Iterator[tuple[Server, ServedWeights]]:
        for member in world.membership.serving:
            server, wanted = world.servers[URLS.index(member.base_url)], world.membership.served
            if wanted is not None and server.gate.state == "serving" and server.gate.ver == wanted.ver:
                yield server, wanted

    monkeypatch.setitem(globals(), "accepted", by_version)
    with pytest.raises(AssertionError, match="another learner syncs"):
        explore(start(), DEPTH)
