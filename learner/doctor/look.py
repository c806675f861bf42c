"""The doctor's only calls to servers: one round, whose results all checks use.

In: a plan and a sample. Out: a `SeenServer` per server. Only `join` changes something on a server: its communicator,
and only if no other learner uses it. Every call has a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from learner.config.schema import RunConfig
from learner.config.sections.servers import ServerEntry
from learner.data.check import load_unchecked
from learner.data.prompt import PromptEncoder
from learner.doctor.finding import Finding, SeenServer, Situation, failed, ok, skipped
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.servers import LoopThread
from learner.sync.canary import CanaryItem, score_items
from learner.sync.groups import ServerLink, await_all, open_groups
from shared.errors import ProjectError
from shared.wire import ScoreCall, ServerStatus

LOOK_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 30.0


def first_sample(config: RunConfig) -> CanaryItem:
    """The first training sample as the learner encodes it. Raises ProjectError."""
    only_first = config.model_copy(update={"data": config.data.model_copy(update={"max_samples": 1})})
    sample = load_unchecked(only_first, config.data.train)[0]
    encoder = PromptEncoder.load(
        config.model.path,
        rules=config.data.image_rules,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
    )
    return CanaryItem(
        sample=sample, prompt=encoder.encode(sample), response_token_ids=(encoder.tokenizer.eos_token_id,)
    )


class Servers:
    """Clients of the configured servers. The owner closes it."""

    def __init__(self, entries: tuple[ServerEntry, ...], token: str | None) -> None:
        self.loop = LoopThread("doctor")
        timeouts = Timeouts.of(LOOK_TIMEOUT_S, LOOK_TIMEOUT_S)
        self._clients = [(entry, ServerClient(entry.base_url, timeouts=timeouts, token=token)) for entry in entries]

    def look(self, probe: CanaryItem | None) -> list[SeenServer]:
        """Each server's status, and its reply to the probe if it is serving."""
        return [self._look(entry, client, probe) for entry, client in self._clients]

    def _look(self, entry: ServerEntry, client: ServerClient, probe: CanaryItem | None) -> SeenServer:
        seen = SeenServer(base_url=entry.base_url, group_port=entry.group_port)
        try:
            self.loop.run(client.health())
            seen = replace(seen, status=self.loop.run(client.status()))
        except ProjectError as error:
            return replace(seen, error=error)
        if probe is None:
            return seen
        try:
            return replace(seen, reply=self.loop.run(client.score(ScoreCall(items=score_items([probe])))))
        except ProjectError as error:
            return replace(seen, reply_error=error)

    def join(self, situation: Situation) -> Finding:
        """Join each idle server's group and leave it again. This tests ports, addresses and NCCL or TCP, without an
        update."""
        if not situation.statuses:
            return skipped("no server answers")
        idle: list[tuple[ServerLink, ServerStatus]] = []
        left_alone = []
        for (entry, client), server in zip(self._clients, situation.servers, strict=True):
            if (status := server.status) is None:
                continue
            if why := reason_not_to_join(status):
                left_alone.append(f"{entry.base_url} {why}")
                continue
            idle.append((ServerLink(client, self.loop, entry.group_port, status.world_size), status))
        if not idle:
            return skipped("; ".join(left_alone))
        try:
            joined = _join_and_leave(*zip(*idle, strict=True))
        except ProjectError as error:
            return failed(error)
        return ok("; ".join([f"joined and left: {joined}", *(f"not tried: {why}" for why in left_alone)]))

    def close(self) -> None:
        for _, client in self._clients:
            self.loop.run(client.aclose())
        self.loop.close(LOOK_TIMEOUT_S)


def reason_not_to_join(status: ServerStatus) -> str:
    """Why a trial group would disturb this server's user; empty if it would not."""
    if status.gate != "serving":
        return f"is {status.gate}"
    if status.in_flight or status.waiting:
        return f"has {status.in_flight + status.waiting} requests"
    if status.incarnation:
        return (
            f"is joined by learner {status.incarnation[:8]}, and a trial would end its group; if that learner is dead, "
            "the next one replaces it without a restart"
        )
    return ""


def _join_and_leave(links: Sequence[ServerLink], statuses: Sequence[ServerStatus]) -> str:
    """The groups that a sync would use."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    joined = open_groups(links, statuses, device=device, timeout_s=JOIN_TIMEOUT_S)
    await_all([], joined.leave(abort=False))
    return "; ".join(f"{group.name} (one group)" if len(group.links) > 1 else group.name for group in joined.groups)
