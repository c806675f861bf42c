"""Checks that a rollout server fits a run: it answers, has the learner's model, and reads prompts like the learner.

In: a server's status, and prompts as the learner encodes them. Out: nothing, or an error that names the server (R03,
R08, R16). The checks run before the first sync: a sync would overwrite the weights of a wrong server before the error
is found.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from learner.data.prompt import PromptCheck, check_prompt_prefix
from learner.rollout.client import LAST_LOOK_S, ServerClient
from learner.rollout.membership import Member
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CanaryItem, score_items
from learner.sync.source import SyncRanks
from shared.aio import gather
from shared.checkpoint import differences
from shared.errors import (
    DeadlineError,
    ProjectError,
    PromptMismatchError,
    ServerBusyError,
    ServerMismatchError,
    ServerPoisonedError,
    ServerUnreachableError,
)
from shared.pixels import ImageProcessing
from shared.waits import time_limit
from shared.wire import ScoreCall, ScoreReply, ServerStatus

T = TypeVar("T")
CheckServer = Callable[[ServerClient, ServerStatus], Coroutine[object, None, None]]  # raises if the server does not fit


def check_servers(backend: ServerBackend, check: CheckServer, *, ranks: SyncRanks) -> None:
    """Check that all servers fit (R16), before a first sync overwrites their weights. Collective: only rank 0 asks
    the servers. Raises the errors of `check`."""

    def ask_all() -> None:
        asked = zip(backend.clients, backend.statuses(), strict=True)
        backend.loop.run(gather(check(client, status) for client, status in asked))

    on_rank_0(ranks, ask_all)


def server_check(
    backend: ServerBackend,
    *,
    architecture: Mapping[str, str],
    prompts: Sequence[CanaryItem],
    image_processing: ImageProcessing | None = None,
) -> CheckServer:
    """Return a check that a server has the learner's model, and reads prompts and images like the learner (R03, R16,
    R45).

    The check raises ServerMismatchError, PromptMismatchError or MediaError, with the server named.
    """

    same = PromptCheck(image_processing=image_processing)

    async def check(client: ServerClient, status: ServerStatus) -> None:
        check_architecture(client.base_url, status, architecture)
        for item in prompts:
            if status.gate == "poisoned":
                return  # the server scores nothing before the first sync; that sync's canary then checks the prompt.
            # Pixels are asked for too: both sides may have the same prompt and still see different images.
            reply = await client.score(ScoreCall(items=score_items([item], pixels=True)))
            check_vision(client.base_url, item, reply, same)
            check_prompt(client.base_url, item, reply)

    return check


def check_architecture(base_url: str, status: ServerStatus, architecture: Mapping[str, str]) -> None:
    """Raises ServerMismatchError if a size of the server's model differs from `architecture`."""
    found = differences(architecture, status.architecture)
    if found:
        raise ServerMismatchError(
            f"{base_url}: the server's model has other tensors than the learner's",
            found=f"{'; '.join(found[:5])} ({status.model})",
            wanted="the architecture of model.path",
            remedy="start the server with the model that the learner starts from",
        )


def check_adapter(base_url: str, status: ServerStatus, *, rank: int) -> None:
    """Raises ServerMismatchError if the server does not take adapters of this rank (R08)."""
    if status.max_lora_rank < rank:
        raise ServerMismatchError(
            f"{base_url}: the server does not take the adapter",
            found=f"max_lora_rank: {status.max_lora_rank}" if status.max_lora_rank else "enable_lora: false",
            wanted=f"adapters of rank {rank}",
            remedy="set enable_lora and max_lora_rank in the server's configuration and restart it, or set "
            "sync.mode: full",
        )


def check_vision(base_url: str, item: CanaryItem, reply: ScoreReply, check: PromptCheck) -> None:
    """Raises ServerMismatchError if the server's vision tower gets other pixels than the learner's."""
    vision, theirs = item.prompt.vision, reply.pixels[0] if reply.pixels else None
    if vision is not None and theirs is not None:
        check.pixels(vision, theirs, sample_id=item.sample.sample_id, name=base_url)


def check_prompt(base_url: str, item: CanaryItem, reply: ScoreReply) -> None:
    """Raises PromptMismatchError, which names the server, if the server's prompt token ids differ from the
    learner's."""
    try:
        check_prompt_prefix(item.prompt.token_ids, reply.prompt_token_ids[0], item.sample.sample_id)
    except PromptMismatchError as error:
        raise error.named(base_url) from error


def check_new(member: Member, status: ServerStatus, others: Sequence[tuple[Member, ServerStatus]]) -> None:
    """Raises ServerMismatchError if an added server is the same process as one of `others`, under another URL."""
    for other, known in others:
        if member.is_new and known.server_id == status.server_id:
            raise ServerMismatchError(
                f"{member.base_url}: this server is in the run already",
                found=f"the server of {other.base_url}, {status.server_id!r}",
                wanted="each server once",
                remedy="name it by one URL only",
            )


def is_silent(error: ProjectError) -> bool:
    """Return True if the error may end by itself: the server does not answer, is busy or starting, or serves nothing
    until its next sync (poisoned)."""
    return isinstance(error, ServerUnreachableError | DeadlineError | ServerBusyError | ServerPoisonedError)


async def look(backend: ServerBackend, base_url: str) -> ServerStatus | ProjectError:
    """Return a server's status now. If the server does not answer soon, or has another model, return the error
    instead."""
    try:
        # The limit is on the whole call: a server that sends its answer byte by byte is never silent for long.
        async with time_limit(LAST_LOOK_S):
            return await backend.look(backend.client(base_url), 0.0)
    except TimeoutError:
        return ServerUnreachableError(
            f"{base_url}: the rollout server does not answer",
            found=f"silence for {LAST_LOOK_S:g} s",
            wanted="an answer at /health/ and /status/",
            remedy="look at the server's log",
        )
    except ProjectError as error:
        return error


def on_rank_0(ranks: SyncRanks, work: Callable[[], T]) -> T:
    """Run `work()` on rank 0 alone. Return its result, or raise its ProjectError, on every rank."""
    # The barrier ensures that no rank asks for rollouts while rank 0 changes the servers' weights.
    ranks.barrier()
    outcome: tuple[T | None, ProjectError | None] = (None, None)
    if ranks.is_main:
        try:
            outcome = (work(), None)
        except ProjectError as error:  # the error is raised below, on every rank
            outcome = (None, error)
    result, failure = ranks.broadcast_object(outcome)
    ranks.barrier()
    if failure is not None:
        raise outcome[1] or failure  # rank 0 raises the original error, with its traceback
    return result
