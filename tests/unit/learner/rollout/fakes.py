"""A rollout server for respx: answers `/infer/` as the real one would, and counts what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import respx

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.records import Sample
from shared.errors import ProjectError
from shared.wire import PROTOCOL_VERSION, ErrorBody

Reply = Callable[[dict[str, Any]], httpx.Response | None]


def sample(i: int) -> Sample:
    return Sample(
        sample_id=f"s{i}",
        messages=({"role": "user", "content": f"<image>request {i}"},),
        images=(f"/data/{i}.png",),
        objects=(),
        width=10,
        height=10,
    )


def config(urls: list[str], *, first_port: int = 51216, **changes: Any) -> RolloutMatchingConfig:
    """Return a server-mode section, in which no server may fail; `changes`: decode_batch_size, decoding, timeout_s,
    infer_timeout_s, min_servers."""
    server = {
        "servers": [{"base_url": url, "group_port": first_port + i} for i, url in enumerate(urls)],
        "timeout_s": 2.0,
        "min_servers": "all",
    }
    server |= {key: changes.pop(key) for key in ("timeout_s", "infer_timeout_s", "min_servers") if key in changes}
    return RolloutMatchingConfig.model_validate({"vllm": {"mode": "server", "server": server}, **changes})


def status(**changes: Any) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL_VERSION,
        "server_id": "fake",
        "model": "tiny",
        "vocab_size": 512,
        "max_model_len": 2048,
        "gate": "serving",
        "ver": 0,
        "world_size": 1,
        "in_flight": 0,
        "waiting": 0,
        "versions": {},
    } | changes


def output(request: dict[str, Any], seed: int, ver: int = 0, server_id: str = "fake") -> dict[str, Any]:
    """The answer repeats the request's number as its only token, so that order can be seen."""
    number = int(request["messages"][0]["content"].split()[-1])
    choice = {
        "message": {"content": str(number)},
        "finish_reason": "stop",
        "token_ids": [number],
    }
    return {
        "response": {
            "id": "x",
            "created": 0,
            "model": "tiny",
            "choices": [choice],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        },
        "response_token_ids": [number],
        "rollout_logprobs": [[-0.5]],
        "prompt_token_ids": [1],
        "rollout_infos": {"ver": ver, "seed": seed, "server_id": server_id, "uuid": request["uuid"]},
    }


def error(exception: ProjectError, headers: dict[str, str] | None = None) -> httpx.Response:
    body = ErrorBody.of(exception).model_dump()
    return httpx.Response(exception.http_status, json=body, headers=headers or {})


@dataclass
class FakeServer:
    """`replies` are tried first, in order, one per call; each gets the call's body and may raise an httpx error."""

    router: respx.MockRouter
    base_url: str
    world_size: int = 1
    ver: int = 0
    replies: list[Reply] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.health = self.router.get(f"{self.base_url}/health/").respond(200, json={})
        self.status = self.router.get(f"{self.base_url}/status/").respond(200, json=status(ver=self.ver))
        self.sizes = self.router.get(f"{self.base_url}/get_world_size/").respond(
            200, json={"world_size": self.world_size}
        )
        self.infer = self.router.post(f"{self.base_url}/infer/").mock(side_effect=self._infer)

    def numbers(self) -> list[list[int]]:
        """Return the requests of every call that came, by the number in their text."""
        return [[int(r["messages"][0]["content"].split()[-1]) for r in c["infer_requests"]] for c in self.calls]

    def seeds(self) -> list[int]:
        return [call["request_config"]["seed"] for call in self.calls]

    def _infer(self, request: httpx.Request) -> httpx.Response:
        call = json.loads(request.content)
        self.calls.append(call)
        if self.replies:
            reply = self.replies.pop(0)(call)
            if reply is not None:
                return reply
        outputs = [output(r, r["seed"], self.ver) for r in call["infer_requests"]]
        return httpx.Response(200, json=outputs)
