"""`--check --probe`: are the configured servers ready, and how large are they.

In: the servers of a plan. Out: their world sizes, in order, or one `Mistake` per server (R16, R23). One look each, at
`/ready/` and `/get_world_size/`, with `PROBE_TIMEOUT_S` for every answer; nothing is retried. Called by `check.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import httpx
from pydantic import TypeAdapter

from learner.config.plan import Plan
from learner.config.rules import SERVER, WAY_OUT
from learner.config.schema import ServerEntry
from learner.rollout.client import error_of, read_reply
from learner.rollout.distribution import chunk_size
from shared.addresses import is_loopback
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ConfigError, ProjectError
from shared.wire import WorldSizeReply

PROBE_TIMEOUT_S = 10.0


def probe_servers(plan: Plan, token: str | None) -> tuple[list[int], int]:
    """World size per server, and the requests that a rank may have in flight (`chunk`, D4).

    Raises ConfigErrors where a server does not answer, is not ready, or the caps do not fit the ranks.
    """
    sizes: list[int] = []
    mistakes: list[Mistake] = []
    for index, entry in enumerate(plan.servers):
        try:
            sizes.append(_ask(entry, token, timeout_s=min(PROBE_TIMEOUT_S, plan.timeout_s)))
        except ProjectError as error:
            path, remedy = f"{SERVER}.servers[{index}].base_url", "start the server (make serve)"
            mistake = Mistake.of(error, path, wanted="a ready server", remedy=remedy)
            mistakes.append(replace(mistake, remedy=f"{mistake.remedy}, {WAY_OUT}"))
    if mistakes:
        raise ConfigErrors("rollout servers are not ready", mistakes=mistakes)
    return sizes, _chunk(plan, sizes)


def _chunk(plan: Plan, sizes: Sequence[int]) -> int:
    try:
        return chunk_size(decode_batch_size=plan.decode_batch_size, server_world_sizes=sizes, num_ranks=plan.world_size)
    except ConfigError as error:
        path = "custom.extra.rollout_matching.decode_batch_size"
        mistake = Mistake(path=path, found=error.found, wanted=error.wanted, remedy=error.remedy)
        raise ConfigErrors(error.what, mistakes=[mistake]) from error


def _ask(entry: ServerEntry, token: str | None, timeout_s: float) -> int:
    """One server's world size. Raises ProjectError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    trust_env = not is_loopback(httpx.URL(entry.base_url).host)
    with httpx.Client(headers=headers, timeout=timeout_s, trust_env=trust_env) as http:
        _get(http, entry.base_url, "/ready/")
        reply = read_reply(_get(http, entry.base_url, "/get_world_size/"), TypeAdapter(WorldSizeReply), entry.base_url)
    if reply.world_size < 1:
        raise ConfigError(f"{entry.base_url}: impossible world size", found=str(reply.world_size), wanted="at least 1")
    return reply.world_size


def _get(http: httpx.Client, base_url: str, path: str) -> httpx.Response:
    try:
        response = http.get(base_url + path)
    except httpx.TimeoutException as error:
        raise _silent(base_url, f"no answer within {http.timeout.read:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _silent(base_url, f"{type(error).__name__}: {error}") from error
    if not response.is_success:
        raise error_of(response, base_url)
    return response


def _silent(base_url: str, found: str) -> ConfigError:
    remedy = "start the server (make serve) and wait until /ready/ answers"
    return ConfigError(f"{base_url} can't be reached", found=found, wanted="a ready rollout server", remedy=remedy)
