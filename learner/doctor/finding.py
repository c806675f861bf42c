"""Defines what a check gets (`Situation`) and returns (`Finding`), and calls the rollout servers once for all checks.

Invariants: a check raises no error for the faults that it finds, and does not change its `Situation`. `look` changes
nothing on a server; each of its calls has a deadline. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from learner.config.sections.servers import ServerEntry
from learner.rollout.client import ServerClient, Timeouts
from shared.aio import gather
from shared.errors import ProjectError, ServerBusyError, ServerPoisonedError
from shared.wire import ScoreCall, ScoreReply, ServerStatus

if TYPE_CHECKING:
    from learner.sync.canary import CanaryItem

LOOK_TIMEOUT_S = 10.0  # max seconds until an answer of a server; calls are not repeated
Verdict = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a check: `text` is what was found (for `skipped`: why nothing was checked), `remedy` what to do."""

    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenServer:
    """A configured server: its status, or the error that a call to it gave."""

    base_url: str
    group_port: int
    status: ServerStatus | None = None
    error: ProjectError | None = None
    not_ready: ProjectError | None = None  # why the server would refuse a rollout now; None: it accepts rollouts
    reply: ScoreReply | None = None  # the server's log-probabilities of the answer that it was probed with
    reply_error: ProjectError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The input of all checks."""

    config: RunConfig
    plan: Plan
    environment: Mapping[str, str]
    servers: Sequence[SeenServer] = ()
    probe: CanaryItem | None = None  # the first training sample, encoded, with a one-token answer
    probe_error: ProjectError | None = None
    devices: Sequence[int] | None = None  # CUDA devices of a launch that starts the servers; None: no launch

    @property
    def statuses(self) -> list[tuple[SeenServer, ServerStatus]]:
        """Return the servers that answered, each with its status."""
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
    """Return the finding of a failed check whose reason is `error`."""
    return fail(f"{error.what}: {error.found}" if error.found else error.what, error.remedy)


def look(
    entries: Sequence[ServerEntry],
    token: str | None,
    *,
    probe: CanaryItem | None = None,
    timeout_s: float = LOOK_TIMEOUT_S,
) -> list[SeenServer]:
    """Return each server's status, whether it is ready, and its scores of `probe`."""
    return asyncio.run(gather(_look(entry, token, probe, Timeouts.of(timeout_s, timeout_s)) for entry in entries))


async def _look(entry: ServerEntry, token: str | None, probe: CanaryItem | None, timeouts: Timeouts) -> SeenServer:
    seen = SeenServer(base_url=entry.base_url, group_port=entry.group_port)
    client = ServerClient(entry.base_url, timeouts=timeouts, token=token)
    try:
        try:
            await client.ready()
        except (ServerBusyError, ServerPoisonedError) as error:
            seen = replace(seen, not_ready=error)
        seen = replace(seen, status=await client.status())
        return seen if probe is None else await _scored(seen, client, probe)
    except ProjectError as error:
        return replace(seen, error=error)
    finally:
        await client.aclose()


async def _scored(seen: SeenServer, client: ServerClient, probe: CanaryItem) -> SeenServer:
    from learner.sync.canary import score_items  # imported here because it imports torch

    try:
        return replace(seen, reply=await client.score(ScoreCall(items=score_items([probe]))))
    except ProjectError as error:
        return replace(seen, reply_error=error)
