"""The rollout servers of a run, which of them serve, and the weights that they serve (D15, R40). Pure.

A `Membership` is immutable: each method returns a new one. Only rank 0 decides on a new membership. At the end of each
step and of each sync, all ranks adopt the new membership together: this is an agreement (`learner.sync.members`). If a
server fails on one rank, this rank stops using it at once, and reports it at the next agreement.

A server has one of three states:
    serving     it answers requests. Every serving server has got the weights `served` in a completed sync
    out         it is new, or it has failed. It gets no requests, and may serve after the next completed sync to it
    draining    it served and was removed. It gets no requests, and is gone after the next sync

Invariant: `number` rises with every change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from learner.records import ServerChange, ServerEvent
from shared.errors import ServerError
from shared.wire import ServedWeights

State = Literal["serving", "out", "draining"]
MinServers = int | Literal["all"]
MIN_SERVERS = "custom.extra.rollout_matching.vllm.server.min_servers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One server. `since_s`: when the server's state began (Unix seconds). `because`: why the server has this state."""

    base_url: str
    group_port: int
    world_size: int = 0  # number of the server's GPUs; 0: not known yet
    state: State = "serving"
    since_s: float = 0.0
    because: str = ""
    failures: int = 0  # number of failures since its last completed sync
    is_new: bool = False  # it was added to a running run, and has not served yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """The servers of a run. `members` are in the order in which they were named. `min_servers`: the run ends if fewer
    serve; "all": the run ends when the first server fails. `number` counts the changes."""

    members: tuple[Member, ...]
    min_servers: MinServers = 1
    number: int = 0
    served: ServedWeights | None = None  # weights that the servers have; None: before the first sync

    @property
    def serving(self) -> tuple[Member, ...]:
        return self._in("serving")

    @property
    def out(self) -> tuple[Member, ...]:
        return self._in("out")

    @property
    def wanted(self) -> int:
        """The number of servers that must serve. With fewer servers the run ends."""
        if self.min_servers == "all":
            # A server that was added to the running run does not count before it has served.
            return len(self.serving) + sum(not member.is_new for member in self.out)
        return self.min_servers

    @property
    def enough(self) -> bool:
        return len(self.serving) >= self.wanted

    @property
    def is_elastic(self) -> bool:
        """True if the run can go on without one of the serving servers."""
        return self.min_servers != "all" and len(self.serving) > self.min_servers

    def get(self, base_url: str) -> Member | None:
        return next((member for member in self.members if member.base_url == base_url), None)

    def leave_out(self, base_url: str, because: str, *, now_s: float) -> Membership:
        """Return the membership in which a failed server is out. Nothing changes if the server is not serving."""
        member = self.get(base_url)
        if member is None or member.state != "serving":
            return self
        return self._with(replace(member, state="out", because=because, since_s=now_s, failures=member.failures + 1))

    def refuse(self, base_url: str, because: str, *, now_s: float) -> Membership:
        """Return the membership with one more failure of a server that is out: it could not join the last sync. Nothing
        changes if the server is not out."""
        member = self.get(base_url)
        if member is None or member.state != "out":
            return self
        return self._with(replace(member, because=because, failures=member.failures + 1))

    def explain(self, base_url: str, because: str) -> Membership:
        """Return the membership with a new reason (`because`) of a server that is out: it answers, but cannot serve.
        Nothing changes if the server is not out."""
        member = self.get(base_url)
        if member is None or member.state != "out" or member.because == because:
            return self
        return self._with(replace(member, because=because))

    def sized(self, sizes: Iterable[tuple[str, int]]) -> Membership:
        """Return the membership with the servers' world sizes, given as (base_url, size) pairs."""
        known = dict(sizes)
        members = (replace(m, world_size=known.get(m.base_url, m.world_size)) for m in self.members)
        return replace(self, members=tuple(members))

    def synced(self, base_urls: Collection[str], served: ServedWeights, *, now_s: float) -> Membership:
        """Return the membership after a completed sync to `base_urls`: these servers serve, draining servers are gone,
        and all others are out."""
        members = []
        for member in self.members:
            if member.state == "draining":
                continue
            if member.base_url in base_urls:
                since_s = now_s if member.state != "serving" else member.since_s
                member = replace(member, state="serving", because="", since_s=since_s, failures=0, is_new=False)
            elif member.state == "serving":
                member = replace(member, state="out", because="the sync was without it", since_s=now_s)
            members.append(member)
        changed = [(m.base_url, m.state) for m in members] != [(m.base_url, m.state) for m in self.members]
        return replace(self, members=tuple(members), served=served, number=self.number + changed)

    def add(self, base_url: str, group_port: int, *, now_s: float) -> Membership:
        """Return the membership with a server that is new, or that was draining. The server is out until its first
        completed sync. Nothing changes if the server is a member already."""
        if (known := self.get(base_url)) is not None and known.state != "draining":
            return self
        member = Member(
            base_url=base_url,
            group_port=group_port,
            state="out",
            since_s=now_s,
            because="waits for its first sync",
            is_new=True,
        )
        kept = tuple(m for m in self.members if m.base_url != base_url)
        return replace(self, members=(*kept, member), number=self.number + 1)

    def remove(self, base_url: str, *, now_s: float) -> Membership:
        """Return the membership after a user's or list's request to remove a server: a serving server becomes draining,
        a server that is out is gone."""
        member = self.get(base_url)
        if member is None or member.state == "draining":
            return self
        if member.state == "out":
            kept = tuple(m for m in self.members if m.base_url != base_url)
            return replace(self, members=kept, number=self.number + 1)
        return self._with(replace(member, state="draining", because="removed", since_s=now_s))

    def too_few(self) -> ServerError:
        """Return the error to raise when too few servers serve."""
        lost = "; ".join(f"{m.base_url}: {m.because}" for m in self.out)
        return ServerError(
            "too few rollout servers are left",
            found=f"{len(self.serving)} of {len(self.serving) + len(self.out)} serve. {lost}",
            wanted=f"at least {self.wanted} ({MIN_SERVERS})",
            remedy="restart the servers and resume the run, or lower min_servers",
        )

    def changes_since(self, before: Membership) -> list[ServerChange]:
        """Return the servers that were added, lost, refused or removed, or that joined, since the membership
        `before`."""
        old = {member.base_url: member.state for member in before.members}
        said = {member.base_url: member.because for member in before.out}
        found = [
            self._change(member.base_url, what, member.because)
            for member in self.members
            if (what := _WHAT.get((old.get(member.base_url), member.state))) is not None
            and (what != "refused" or said[member.base_url] != member.because)
        ]
        gone = [url for url, state in old.items() if state == "out" and self.get(url) is None]
        return found + [self._change(url, "removed", "") for url in gone]

    def _change(self, base_url: str, what: ServerEvent, because: str) -> ServerChange:
        return ServerChange(base_url=base_url, what=what, because=because, serving=len(self.serving))

    def _in(self, state: State) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.state == state)

    def _with(self, changed: Member) -> Membership:
        members = tuple(changed if m.base_url == changed.base_url else m for m in self.members)
        return replace(self, members=members, number=self.number + 1)


_WHAT: dict[tuple[State | None, State], ServerEvent] = {
    (None, "out"): "added",
    (None, "serving"): "joined",
    ("draining", "out"): "added",
    ("out", "serving"): "joined",
    ("draining", "serving"): "joined",
    ("serving", "out"): "lost",
    ("out", "out"): "refused",  # reported only if the reason is new
    ("serving", "draining"): "removed",
}
