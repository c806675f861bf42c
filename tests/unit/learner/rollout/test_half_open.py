"""A server that takes connections and never answers (stopped, or its network is gone): every call ends in time.

A listening socket that nobody accepts from: the kernel completes the connection, and then there is silence. Real
sockets, for what is held here is that httpx's own timeouts are set on every path.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from learner.rollout import client as client_module
from learner.rollout.client import ServerClient, Timeouts
from shared.errors import DeadlineError, ProjectError, ServerUnreachableError
from shared.wire import (
    Bucket,
    CloseCommunicatorCall,
    InferCall,
    InitCommunicatorCall,
    RolloutInferRequest,
    ScoreCall,
    ScoreItem,
    UpdateWeightsCall,
)
from tests.tiers import slow

TIMEOUT_S = 0.3
FAR_TOO_LONG_S = 60.0

REQUEST = RolloutInferRequest.model_validate({"messages": [{"role": "user", "content": "request 7"}]})
INFER = InferCall(infer_requests=[REQUEST])
INIT = InitCommunicatorCall(
    incarnation="me", secret="0" * 64, group_port=1, world_size=2, backend="tcp", timeout_s=TIMEOUT_S
)
SCORE = ScoreCall(items=[ScoreItem(request=REQUEST, response_token_ids=[1])])
BUCKET = Bucket(tensors=[], num_bytes=0)
UPDATE = UpdateWeightsCall(incarnation="me", ver=1, buckets=[BUCKET], timeout_s=TIMEOUT_S)

CALLS: dict[str, Callable[[ServerClient], Awaitable[Any]]] = {
    "/health/": lambda c: c.health(),
    "/status/": lambda c: c.status(),
    "/get_world_size/": lambda c: c.world_size(),
    "/infer/": lambda c: c.infer(INFER, lambda *_: None),
    "/score/": lambda c: c.score(SCORE),
    "/init_communicator/": lambda c: c.init_communicator(INIT),
    "/update_weights/": lambda c: c.update_weights(UPDATE),
    "/close_communicator/": lambda c: c.close_communicator(CloseCommunicatorCall(incarnation="me")),
    "waiting for it": lambda c: c.wait_healthy(),
}


@pytest.fixture
def silent_url() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def error_from(url: str, call: Callable[[ServerClient], Awaitable[Any]], infer_timeout_s: float | None) -> ProjectError:
    async def run() -> ProjectError:
        client = ServerClient(url, timeouts=Timeouts.of(TIMEOUT_S, infer_timeout_s))
        try:
            with pytest.raises(ProjectError) as caught:
                await asyncio.wait_for(call(client), FAR_TOO_LONG_S)
            return caught.value
        finally:
            await client.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("infer_timeout_s", [slow(None), TIMEOUT_S])
@pytest.mark.parametrize("path", CALLS)
def test_every_call_to_a_silent_server_ends_and_names_it(
    silent_url: str, path: str, infer_timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REPLY_GRACE_S", TIMEOUT_S)
    error = error_from(silent_url, CALLS[path], infer_timeout_s)
    assert isinstance(error, DeadlineError | ServerUnreachableError)
    assert silent_url in error.what
    assert error.found
    assert error.remedy


def test_silence_is_not_waited_for_twice(silent_url: str) -> None:
    """Rollouts of a stopped server are given up `timeout_s` after it was last seen, not after twice as much."""

    async def infer(client: ServerClient) -> None:
        async def once_more() -> None:
            raise AssertionError("the connection did not break: there is nothing to wait for again")

        client.wait_healthy = once_more  # type: ignore[method-assign]
        await client.infer(INFER, lambda *_: None)

    error = error_from(silent_url, infer, None)
    assert isinstance(error, ServerUnreachableError)
    assert f"within {TIMEOUT_S:g} s" in error.wanted
