"""Tests of whatever a client sends (R16): it gets a documented status, an `ErrorBody` where it is an error, never a
traceback.

Bodies are right ones with parts replaced, removed or added, any JSON, or any bytes; over a fake engine, no sockets.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.openai_api import OpenAIError
from rollout_server.service import RolloutService
from shared.errors import error_classes
from shared.wire import ErrorBody
from tests.examples import examples
from tests.unit.rollout_server.fakes import FakeEngine

pytestmark = pytest.mark.slow

REQUEST = {"messages": [{"role": "user", "content": "a"}], "images": ["x.png"], "uuid": "u"}
RIGHT: dict[str, Any] = {
    "/infer/": {"infer_requests": [REQUEST], "request_config": {"seed": 3, "temperature": 0.5, "max_tokens": 4}},
    "/score/": {"items": [{"request": REQUEST, "response_token_ids": [1, 2]}]},
    "/init_communicator/": {
        "incarnation": "a",
        "group_port": 1234,
        "world_size": 2,
        "backend": "tcp",
        "secret": "0" * 64,
        "timeout_s": 5.0,
    },
    "/update_weights/": {"incarnation": "a", "ver": 1, "buckets": [], "base_of_adapter": True, "timeout_s": 5.0},
    "/expect_scores/": {"incarnation": "a", "ver": 1, "logprobs": [[-0.5]], "tolerance": 0.1},
    "/close_communicator/": {"incarnation": "a"},
    "/reset_prefix_cache/": {},
}
JSON = {"Content-Type": "application/json"}
GETS = ("/health/", "/ready/", "/status/", "/get_world_size/", "/metrics/")
# A server that is busy or poisoned by calls before; all else that a client can do wrong is its own mistake.
UNAVAILABLE = {"ServerPoisonedError", "ServerBusyError"}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()  # NaN and infinity too: Python's JSON has them
    | st.text(max_size=8)
    | st.sampled_from([-1, 0, 2**31, 2**63, 10**30, "\ud800", "\x00", "nccl", "user", "data:,"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a JSON value, the whole included."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in parts for place in places(part, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, right: Any) -> Any:
    body = {"": copy.deepcopy(right)}
    for _ in range(draw(st.integers(0, 3))):
        *path, last = ("", *draw(st.sampled_from(places(body[""]))))
        at: Any = body
        for part in path:
            at = at[part]
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "remove" and path:
            del at[last]
        elif how == "add" and isinstance(at[last], dict):
            at[last][draw(st.text(max_size=6))] = draw(values)
        elif how == "add" and isinstance(at[last], list) and at[last]:
            at[last].append(copy.deepcopy(at[last][0]))
        else:
            at[last] = draw(values)
    return body[""]


def send(method: str, path: str, content: bytes | None = None) -> httpx.Response:
    """Make one call to a server of its own. Raises whatever the application lets through."""

    async def run() -> httpx.Response:
        app = create_app(RolloutService(FakeEngine(), ServerConfig(model="fake")), None)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await asyncio.wait_for(http.request(method, path, content=content, headers=JSON), 5)

    return asyncio.run(run())


def check(reply: httpx.Response) -> None:
    assert "Traceback" not in reply.text
    assert 'File "' not in reply.text
    if reply.status_code == 200:
        return
    if reply.request.url.path.startswith("/v1/"):
        detail = OpenAIError.model_validate_json(reply.content).error
        assert detail.code == reply.status_code
        name, what = detail.type, detail.message
    else:
        body = ErrorBody.model_validate_json(reply.content)
        name, what = body.error, body.what
    assert name in error_classes()
    assert what
    if reply.status_code >= 500:
        assert name in UNAVAILABLE
        assert reply.status_code == 503
    else:
        assert reply.status_code >= 400


@pytest.mark.parametrize("path", RIGHT)
def test_right_bodies_are_understood(path: str) -> None:
    """Otherwise the others here would only ever see the first check fail."""
    reply = send("POST", path, json.dumps(RIGHT[path]).encode())
    check(reply)
    assert reply.status_code != 400


@pytest.mark.parametrize("path", RIGHT)
@given(data=st.data())
@settings(deadline=None, max_examples=examples(120))
def test_r16_damaged_bodies(path: str, data: st.DataObject) -> None:
    body = data.draw(damaged(RIGHT[path]))
    check(send("POST", path, json.dumps(body).encode()))


@pytest.mark.parametrize("path", RIGHT)
@given(content=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None, max_examples=examples(40))
def test_r16_any_bytes(path: str, content: bytes) -> None:
    check(send("POST", path, content))


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    path=st.sampled_from([*GETS, *RIGHT]) | st.text("abc/.%20", max_size=12).map(lambda text: "/" + text.lstrip("/")),
)
@settings(deadline=None, max_examples=examples(100))
def test_r06_any_method_and_path(method: str, path: str) -> None:
    check(send(method, path, b"{}"))


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)
