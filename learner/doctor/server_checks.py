"""Checks the rollout servers, and what learner and servers must have in common. `CHECKS` lists the checks.

The checks read the answers that `finding.look` got. Only `communicator` calls servers again. `communicator` joins a
server's group and leaves it, but only if no other learner uses the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from transformers import AutoConfig

from learner.config.modes import sync_mode
from learner.config.schema import RunConfig
from learner.data.check import load_unchecked
from learner.data.prompt import PromptEncoder
from learner.doctor.finding import (
    LOOK_TIMEOUT_S,
    Check,
    Finding,
    Situation,
    fail,
    failed,
    ok,
    skipped,
    warn,
)
from learner.rollout.client import ServerClient, Timeouts
from learner.sync.broadcast_groups import ServerLink, await_all, open_groups
from learner.sync.canary import CanaryItem
from learner.sync.fitness import check_adapter, check_architecture, check_prompt
from shared.aio import LoopThread
from shared.checkpoint import signature
from shared.errors import DeadlineError, MediaError, ProjectError, ServerUnreachableError
from shared.tokens import read_token
from shared.wire import PROTOCOL_VERSION, ServerStatus

JOIN_TIMEOUT_S = 30.0
NO_SERVER = "no server answers"


def first_sample(config: RunConfig) -> CanaryItem:
    """Return the first training sample as the learner encodes it, with a one-token answer. Raises ProjectError."""
    sample = load_unchecked(config, config.data.train, limit=1)[0]
    encoder = PromptEncoder.load(
        config.model.path,
        rules=config.data.image_rules,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
    )
    answer = (encoder.tokenizer.eos_token_id,)
    return CanaryItem(sample=sample, prompt=encoder.encode(sample), response_token_ids=answer)


def reachable(situation: Situation) -> Finding:
    if not situation.servers:
        return skipped("the run uses no servers" if situation.devices is None else "the launch starts them")
    for server in situation.servers:
        if isinstance(server.error, ServerUnreachableError):
            return warn(
                f"{server.base_url} does not answer; checks that need it are skipped", "make serve, or make launch"
            )
        if isinstance(server.error, DeadlineError):
            found = f"{server.base_url} accepts connections but does not answer: {server.error.found}"
            return fail(found, "it hangs, is stopped, or is not a rollout server: see its log, or restart it")
        if server.error is not None:
            return failed(server.error)
    return ok(", ".join(server.base_url for server in situation.servers))


def ready(situation: Situation) -> Finding:
    for server, status in situation.statuses:
        if status.protocol != PROTOCOL_VERSION:
            found = f"{server.base_url} speaks protocol {status.protocol}, not {PROTOCOL_VERSION}"
            return fail(found, "run the same version of this project on both sides")
        if status.gate == "poisoned":
            found = f"{server.base_url} is poisoned: {status.poisoned_because}"
            return warn(found, "the next learner's first full sync fixes it; until then nobody can use it")
        if status.gate != "serving":
            return warn(f"{server.base_url} is {status.gate}", "wait until the learner that uses it has stopped")
        if status.in_flight or status.waiting:
            found = f"{server.base_url} has {status.in_flight + status.waiting} requests"
            return warn(found, "do not use one server for two learners")
    return _of_all(situation, lambda status: f"ver {status.ver}")


def same_model(situation: Situation) -> Finding:
    """Check that the learner's model can be read, and that the servers report the same sizes."""
    path = situation.config.model.path
    try:
        learner = signature(AutoConfig.from_pretrained(path).to_dict())
    except (OSError, ValueError) as error:
        return fail(f"model.path {path}: {str(error).splitlines()[0]}", "correct model.path")
    if not situation.servers:
        return ok(f"model.path {path} can be read")
    if not situation.statuses:
        return skipped(f"model.path {path} can be read; {NO_SERVER} to compare it with")
    for server, status in situation.statuses:
        try:
            check_architecture(server.base_url, status, learner)
        except ProjectError as error:
            return failed(error)
    return _of_all(situation, lambda status: f"{status.model} in {status.dtype}")


def adapters(situation: Situation) -> Finding:
    """Check that every server accepts adapters of the run's LoRA rank, if the run syncs only its adapter (R08)."""
    config = situation.config
    if sync_mode(config) != "adapter":
        return skipped("the run syncs full weights")
    rank = config.model.lora.r if config.model.lora else 1
    for server, status in situation.statuses:
        try:
            check_adapter(server.base_url, status, rank=rank)
        except ProjectError as error:
            if not config.rollout_matching.vllm.sync.fallback_to_full:
                return failed(error)
            return warn(f"{error.what}: {error.found}; the run will use full syncs", error.remedy)
    return _of_all(situation, lambda status: f"up to rank {status.max_lora_rank}")


def same_libraries(situation: Situation) -> Finding:
    """Compare CUDA and NCCL on both sides: all NCCL ranks need the same major version."""
    here = {"cuda": torch.version.cuda or "", "nccl": ""}
    if torch.cuda.is_available():
        here["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for server, status in situation.statuses:
        there = status.versions
        for name, mine in here.items():
            theirs = there.get(name, "")
            if bool(mine) != bool(theirs):
                found = f"{name}: {theirs or 'none'} at {server.base_url}, {mine or 'none'} here"
                return fail(
                    found, "weights travel through NCCL on GPUs and through TCP on CPU: use the same on both sides"
                )
            if mine.split(".")[0] != theirs.split(".")[0]:
                return fail(
                    f"{name} {theirs} at {server.base_url}, {mine} here", "install the same torch on both sides"
                )
    mine = ", ".join(f"{name} {value}" for name, value in here.items() if value) or "CPU"
    prefix = f"{mine} on both sides; "
    return _of_all(situation, lambda status: f"vllm {status.versions.get('vllm', '?')}", prefix=prefix)


def image(situation: Situation) -> Finding:
    """Check that the servers can read the images of one sample."""
    if (why := _no_probe(situation)) is not None:
        return why
    assert situation.probe is not None
    images = situation.probe.sample.images
    if not images:
        return skipped("the first sample has no image")
    for server in situation.servers:
        if isinstance(error := server.reply_error, MediaError):
            return fail(f"{server.base_url}: {error.what}: {error.found}", f"{error.remedy} (wanted {error.wanted})")
    if any(server.reply for server in situation.servers):
        return ok(f"the servers read {images[0][:100]}")
    return _no_reply(situation)


def prompt(situation: Situation) -> Finding:
    """Check that both sides make the same token ids of one sample's prompt, image placeholders included (R03)."""
    if (why := _no_probe(situation)) is not None:
        return why
    assert situation.probe is not None
    compared = [(server.base_url, server.reply) for server in situation.servers if server.reply is not None]
    for base_url, reply in compared:
        try:
            check_prompt(base_url, situation.probe, reply)
        except ProjectError as error:
            return failed(error)
    if not compared:
        return _no_reply(situation)
    num_tokens = len(situation.probe.prompt.token_ids)
    return ok(f"{num_tokens} tokens of sample {situation.probe.sample.sample_id!r} are the same on both sides")


def _no_probe(situation: Situation) -> Finding | None:
    if not situation.statuses:
        return skipped(NO_SERVER)
    if situation.probe is None:
        return skipped(f"no sample to send: {situation.probe_error or 'there is none'}")
    return None


def _no_reply(situation: Situation) -> Finding:
    errors = [str(server.reply_error) for server in situation.servers if server.reply_error is not None]
    return skipped(f"no server scored the sample: {'; '.join(errors)}"[:300])


def _of_all(situation: Situation, say: Callable[[ServerStatus], str], *, prefix: str = "") -> Finding:
    if not situation.statuses:
        return skipped(NO_SERVER)
    return ok(prefix + ", ".join(say(status) for _, status in situation.statuses))


# ---- communicator --------------------------------------------------------------------------------------------------


def communicator(situation: Situation) -> Finding:
    """Join the group of each idle server and leave it again, which tests ports, addresses, and NCCL or TCP."""
    if not situation.statuses:
        return skipped(NO_SERVER)
    reasons = {server.base_url: reason_not_to_join(status) for server, status in situation.statuses}
    left_alone = [f"{base_url} {why}" for base_url, why in reasons.items() if why]
    idle = [(server, status) for server, status in situation.statuses if not reasons[server.base_url]]
    if not idle:
        return skipped("; ".join(left_alone))
    timeouts, token = Timeouts.of(LOOK_TIMEOUT_S, LOOK_TIMEOUT_S), read_token(situation.environment)
    with ExitStack() as stack:
        loop = LoopThread("check")
        # Callbacks run in reverse order, so clients are closed while their loop still runs.
        stack.callback(loop.close, LOOK_TIMEOUT_S)
        links = []
        for server, status in idle:
            client = ServerClient(server.base_url, timeouts=timeouts, token=token)
            stack.callback(lambda client: loop.run(client.aclose()), client)
            links.append(ServerLink(client, loop, server.group_port, status.world_size))
        try:
            joined = _join_and_leave(links, [status for _, status in idle])
        except ProjectError as error:
            return failed(error)
    return ok("; ".join([f"joined and left: {joined}", *(f"not tried: {why}" for why in left_alone)]))


def reason_not_to_join(status: ServerStatus) -> str:
    """Return why joining the server's group now would disturb the learner that uses this server; "" if it would not."""
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
    """Join the groups that a sync would use, leave them, and return their names."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    joined = open_groups(links, statuses, device=device, timeout_s=JOIN_TIMEOUT_S)
    await_all([], joined.leave(abort=False))
    return "; ".join(f"{group.name} (one group)" if len(group.links) > 1 else group.name for group in joined.groups)


WITHOUT_SERVERS: dict[str, Check] = {"reachable": reachable, "model": same_model}
CHECKS: dict[str, Check] = {
    "reachable": reachable,
    "state": ready,
    "model": same_model,
    "adapters": adapters,
    "cuda, nccl": same_libraries,
    "image": image,
    "prompt": prompt,
    "communicator": communicator,
}
