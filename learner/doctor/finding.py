"""The input and the result of a check.

Invariants: a check does not raise for what it finds, and does not change its `Situation`. `Situation.servers` is filled
once, so that a dozen checks need one round of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from shared.errors import ProjectError

if TYPE_CHECKING:  # `check` imports neither torch nor, without --probe, what speaks HTTP
    from learner.sync.canary import CanaryItem
    from shared.wire import ScoreReply, ServerStatus

Verdict = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line: `text` is what was found (for `skipped`: why nothing was checked), `remedy` is what to do."""

    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenServer:
    """A configured server: its status, or why there is none, and its scores of the situation's probe."""

    base_url: str
    group_port: int
    status: ServerStatus | None = None
    error: ProjectError | None = None
    not_ready: ProjectError | None = None  # it answers, and would refuse a rollout asked for now
    reply: ScoreReply | None = None  # the answer to the situation's probe
    reply_error: ProjectError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Everything that checks look at."""

    config: RunConfig
    plan: Plan
    environment: Mapping[str, str]
    servers: Sequence[SeenServer] = ()
    probe: CanaryItem | None = None  # the first training sample, encoded, with a one-token answer
    probe_error: ProjectError | None = None
    launch_path: str | None = None

    @property
    def statuses(self) -> list[tuple[SeenServer, ServerStatus]]:
        """The servers that answered."""
        return [(server, server.status) for server in self.servers if server.status is not None]


Check = Callable[[Situation], Finding]


def ok(text: str) -> Finding:
    return Finding(verdict="ok", text=text)


def warn(text: str, remedy: str) -> Finding:
    return Finding(verdict="warn", text=text, remedy=remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding(verdict="fail", text=text, remedy=remedy)


def skipped(why: str) -> Finding:
    return Finding(verdict="skipped", text=why)


def failed(error: ProjectError) -> Finding:
    """Return an error as a finding."""
    return fail(f"{error.what}: {error.found}" if error.found else error.what, error.remedy)
