"""Before the first sync: do the servers have the learner's model, and read its prompts alike? (R03, R16)

In: the servers' status and one sample as the learner encodes it. Out: nothing, or the first mismatch with the server
named, on every rank. A first sync would find most of it too, but after it has overwritten the server's weights. Called
by `build`, and in parts by the sync and the doctor.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.policy.parallel import Ranks
from learner.prompt import check_prompt_prefix
from learner.rollout.server import ServerBackend
from learner.sync.canary import CanaryItem, score_items
from shared.architecture import differences
from shared.errors import ProjectError, PromptMismatchError, ServerMismatchError
from shared.wire import ScoreCall, ScoreReply, ServerStatus


def check_servers(backend: ServerBackend, *, architecture: Mapping[str, str], canary: CanaryItem, ranks: Ranks) -> None:
    """Ask every server, on rank 0; collective. Raises ServerMismatchError, PromptMismatchError, MediaError."""
    failure: ProjectError | None = None
    if ranks.is_main:
        try:
            _ask_all(backend, architecture, canary)
        except ProjectError as error:  # raised below, on every rank
            failure = error
    (failure, *_) = ranks.all_gather_object(failure)
    if failure is not None:
        raise failure


def check_architecture(base_url: str, status: ServerStatus, architecture: Mapping[str, str]) -> None:
    """Raises ServerMismatchError where a size of the model differs."""
    found = differences(architecture, status.architecture)
    if found:
        raise ServerMismatchError(
            f"{base_url}: the server's model has other tensors than the learner's",
            found=f"{'; '.join(found[:5])} ({status.model})",
            wanted="the architecture of model.path",
            remedy="start the server with the model that the learner starts from",
        )


def check_adapter(base_url: str, status: ServerStatus, *, rank: int) -> None:
    """Raises ServerMismatchError where the server does not take adapters of this rank (R08)."""
    if status.max_lora_rank < rank:
        raise ServerMismatchError(
            f"{base_url}: the server does not take the adapter",
            found=f"max_lora_rank: {status.max_lora_rank}" if status.max_lora_rank else "enable_lora: false",
            wanted=f"adapters of rank {rank}",
            remedy="set enable_lora and max_lora_rank in the server's configuration and start it anew, or set "
            "sync.mode: full",
        )


def check_prompt(base_url: str, item: CanaryItem, reply: ScoreReply) -> None:
    """Raises PromptMismatchError, with the server named, where its prompt token ids are not the learner's."""
    try:
        check_prompt_prefix(item.prompt.token_ids, reply.prompt_token_ids[0], item.sample.sample_id)
    except PromptMismatchError as error:
        what = f"{base_url}: {error.what}"
        raise PromptMismatchError(what, found=error.found, wanted=error.wanted, remedy=error.remedy) from error


def _ask_all(backend: ServerBackend, architecture: Mapping[str, str], canary: CanaryItem) -> None:
    for client, status in zip(backend.clients, backend.statuses(), strict=True):
        check_architecture(client.base_url, status, architecture)
        if status.gate == "poisoned":
            continue  # it scores nothing before the first sync, whose own check then covers the prompt
        reply = backend.loop.run(client.score(ScoreCall(items=score_items([canary]))))
        check_prompt(client.base_url, canary, reply)
