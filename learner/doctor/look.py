"""One round of calls to the rollout servers, whose results `check --probe` and `check --machine` use.

In: the configured servers, and a sample for them to score. Out: a `SeenServer` per server. Nothing changes on a server.
Every call has a deadline. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from learner.config.sections.servers import ServerEntry
from learner.doctor.finding import SeenServer
from learner.rollout.client import ServerClient, Timeouts
from shared.aio import gather
from shared.errors import ProjectError, ServerBusyError, ServerPoisonedError
from shared.wire import ScoreCall

if TYPE_CHECKING:
    from learner.sync.canary import CanaryItem

LOOK_TIMEOUT_S = 10.0  # deadline of each answer, without retries


def look(
    entries: Sequence[ServerEntry],
    token: str | None,
    *,
    probe: CanaryItem | None = None,
    timeout_s: float = LOOK_TIMEOUT_S,
) -> list[SeenServer]:
    """Return each server's status, whether it is ready, and its reply to the probe."""
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
