"""The endpoints over a fake engine (R06, R10, R11, R13, R16): no vLLM, no sockets."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_server import __main__ as command
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import WorkerReply
from rollout_server.service import RolloutService
from shared.config.parse import write_yaml
from shared.errors import DigestError
from shared.generation import Generation, Scores
from shared.seeds import SEED_MODULUS
from shared.wire import (
    NDJSON,
    AnswerLine,
    ErrorBody,
    InferCall,
    InitCommunicatorCall,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from tests.unit.rollout_server.fakes import FakeEngine
from tests.waits import let_others_run, until

Http, Service = httpx.AsyncClient, RolloutService
Check = Callable[[Http, FakeEngine, Service], Awaitable[None]]


def serve(check: Check, token: str | None = None, *, engine: FakeEngine | None = None, **settings: Any) -> None:
    engine = engine or FakeEngine()

    async def run() -> None:
        service = RolloutService(engine, ServerConfig(model="fake", **settings))
        app = create_app(service, token)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            await asyncio.wait_for(check(http, engine, service), 10)

    asyncio.run(run())


def served(token: str | None = None, **settings: Any) -> Callable[..., Callable[..., None]]:
    """Make a test of a coroutine: it gets `http`, `engine` and `service` by name, beside its own parameters."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        wanted = inspect.signature(test).parameters
        world = {"http", "engine", "service"}

        @functools.wraps(test)
        def run(**given: Any) -> None:
            async def check(http: Http, engine: FakeEngine, service: Service) -> None:
                here = {"http": http, "engine": engine, "service": service}
                await test(**given, **{name: here[name] for name in world & set(wanted)})

            serve(check, token, **settings)

        run.__signature__ = inspect.Signature([wanted[name] for name in wanted if name not in world])  # type: ignore[attr-defined]
        return run

    return decorate


def request(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


JSON = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]


def error(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, ErrorBody.model_validate_json(reply.content).error


@served()
async def test_answers_in_order_with_seeds_by_place(http: Http) -> None:
    """R11: request `i` of a call is seeded with `seed + i`, modulo."""
    call = InferCall(
        infer_requests=[RolloutInferRequest.model_validate(request(text)) for text in "abc"],
        request_config=RequestConfig(seed=SEED_MODULUS - 2),
    )
    reply = await http.post("/infer/", json=call.model_dump())
    outputs = [RolloutOutput.model_validate(output) for output in reply.json()]
    assert [output.response.choices[0].message.content for output in outputs] == ["a", "b", "c"]
    assert [output.rollout_infos.seed for output in outputs] == [SEED_MODULUS - 2, SEED_MODULUS - 1, 0]
    assert [output.rollout_infos.uuid for output in outputs] == [r.uuid for r in call.infer_requests]
    assert (await http.post("/infer", json={"infer_requests": []})).json() == []


def test_probes_say_which_start_of_the_server_it_is() -> None:
    """Whoever starts a server knows its answers from those of an older one on the port."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        for path in ("/health/", "/ready/"):
            assert (await http.get(path)).json()["server_id"] == service.server_id

    serve(check)
    named = RolloutService(FakeEngine(), ServerConfig(model="fake"), "launched-7")
    assert named.status().server_id == "launched-7"


def test_a_server_has_the_name_that_its_environment_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(command, "_serve", lambda config, token, server_id: given.append(server_id))
    monkeypatch.setattr(command.os, "_exit", lambda code: None)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    write_yaml(tmp_path / "server.yaml", {"model": str(tmp_path)})
    for name in ("launched-7", ""):
        monkeypatch.setenv("ROLLOUT_SERVER_ID", name)
        with pytest.raises(SystemExit):
            command.app(["--config", str(tmp_path / "server.yaml")])
    assert given == ["launched-7", ""]


@served()
async def test_a_request_may_bring_its_own_seed(http: Http) -> None:
    """R11: requests of several micro-steps in one call. One without a seed has the call's, by its place."""
    asked = [request("a", seed=500), request("b"), request("c", seed=7)]
    config = {"n": 2, "seed": 10}
    reply = await http.post("/infer/", json={"infer_requests": asked, "request_config": config})
    outputs = [RolloutOutput.model_validate(output) for output in reply.json()]
    assert [output.rollout_infos.seed for output in outputs] == [500, 12, 7]
    seeds = [[choice.token_ids[1] for choice in output.response.choices] for output in outputs]
    assert seeds == [[500, 501], [12, 13], [7, 8]]


@served(max_requests_per_call=100)
async def test_several_answers_to_a_request_are_seeded_like_copies_of_it(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    """R39: and each has its tokens' log-probabilities, if they were asked for."""
    config = {"n": 2, "seed": 10, "logprobs": True}
    body = {"infer_requests": [request(text) for text in "ab"], "request_config": config}
    outputs = [RolloutOutput.model_validate(output) for output in (await http.post("/infer/", json=body)).json()]
    choices = [choice for output in outputs for choice in output.response.choices]
    assert [choice.token_ids[1] for choice in choices] == [10, 11, 12, 13]  # the fake engine answers with the seed
    assert [choice.index for choice in choices] == [0, 1, 0, 1]
    assert [output.rollout_logprobs for output in outputs] == [[[-0.5, -0.5]] * 2] * 2
    assert choices[3].logprobs is not None
    assert [(one.token, one.logprob) for one in choices[3].logprobs.content] == [("2", -0.5), ("13", -0.5)]
    assert choices[3].stop_logprob == -0.5
    too_many = {**body, "request_config": {"n": service.config.max_requests_per_call // 2 + 1}}
    assert error(await http.post("/infer/", json=too_many)) == (413, "RequestError")


@served(url_prefix="/a/b", tensor_parallel_size=2, data_parallel_size=3)
async def test_url_prefix(http: Http) -> None:
    """R06: every endpoint under any prefix, with and without the last slash."""
    for path in ("/health", "/ready", "/status", "/get_world_size", "/metrics"):
        for spelling in (f"/a/b{path}", f"/a/b{path}/"):
            assert (await http.get(spelling)).status_code == 200
        assert error(await http.get(path)) == (404, "RequestError")
    assert (await http.get("/a/b/get_world_size/")).json() == {"world_size": 6}
    assert error(await http.get("/a/b/infer/")) == (405, "RequestError")


@served(url_prefix="/a")
async def test_a_wrong_method_is_answered_with_the_right_one(http: Http) -> None:
    body = ErrorBody.model_validate_json((await http.get("/a/infer/")).content)
    assert body.wanted == "POST /a/infer/"
    assert "/a/openapi.json" in body.remedy
    assert "base_url" not in body.remedy


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "tools and tool_choice"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
)
@served()
async def test_tools_are_refused_by_name(http: Http, fields: dict[str, Any], named: str) -> None:
    reply = await http.post("/v1/chat/completions", json={**request("hi"), **fields})
    assert reply.status_code == 400
    said = reply.json()["error"]["message"]
    assert f"leave {named} out" in said
    assert "same version" not in said


@served(token="secret")
async def test_token(http: Http) -> None:
    """All but the probes want it."""
    for path in ("/health/", "/ready"):
        assert (await http.get(path)).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "ü"}):
        encoded = {key: value.encode() for key, value in headers.items()}
        assert error(await http.get("/status/", headers=encoded)) == (401, "UnauthorizedError")
    assert (await http.get("/status/", headers={"Authorization": "Bearer secret"})).status_code == 200


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_web_page_changes_nothing(token: str | None) -> None:
    """This holds without a token too: a page in this machine's browser sends forms and text under its own name only."""
    body = InferCall(infer_requests=[RolloutInferRequest.model_validate(request("a"))]).model_dump_json()
    right = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            headers = {**right, "Content-Type": kind}
            assert error(await http.post("/infer/", content=body, headers=headers)) == (415, "RequestError")
        for origin in ("http://evil.test", "http://127.0.0.1:8000", "null"):
            for path in ("/infer/", "/reset_prefix_cache/"):
                assert error(await http.post(path, headers={**right, "Origin": origin})) == (403, "RequestError")
        assert (engine.generated, engine.num_resets) == ([], 0)
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            headers = {**right, "Content-Type": kind, "Origin": "http://127.0.0.1"}
            assert (await http.post("/infer/", content=body, headers=headers)).status_code == 200
        assert (await http.post("/reset_prefix_cache/", headers=right)).status_code == 200

    serve(check, token=token)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.test", 403),
        ("evil.test:8000", 403),
        ("127.0.0.1.evil.test", 403),
        ("[::1", 403),
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("10.0.0.7", 200),
    ],
)
@served()
async def test_a_name_that_was_pointed_here_is_refused(http: Http, host: str, status: int) -> None:
    """DNS rebinding: a page's own name leads to this machine. With a token it could do nothing."""
    assert (await http.get("/status/", headers={"Host": host})).status_code == status


@served(token="secret")
async def test_with_a_token_the_server_has_any_name(http: Http) -> None:
    headers = {"Host": "rollout-0.rollout:8000", "Authorization": "Bearer secret"}
    assert (await http.get("/status/", headers=headers)).status_code == 200


@served(max_body_bytes=1000)
async def test_body_limit_and_malformed_bodies(http: Http, engine: FakeEngine) -> None:
    http.headers["Content-Type"] = "application/json"
    assert error(await http.post("/infer/", content=b"x" * 1001)) == (413, "RequestError")

    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 100

    assert error(await http.post("/infer/", content=chunks())) == (413, "RequestError")
    for body in ({"infer_requests": [request("a", typo=1)]}, {"infer_requests": "no"}, [], None):
        reply = await http.post("/infer/", json=body)
        assert error(reply) == (400, "RequestError")
    assert error(await http.post("/infer/", content=b"{")) == (400, "RequestError")
    assert engine.generated == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5),
        ("temperature", float("inf")),
        ("repetition_penalty", float("inf")),
        ("top_k", 2**40),
        ("seed", 2**70),
        ("max_tokens", 2**40),
        ("stop", [""]),
        ("stop", ["x"] * 1000),
    ],
)
@served()
async def test_a_wrong_setting_is_named(http: Http, engine: FakeEngine, field: str, value: object) -> None:
    """R16: what vLLM, or its tensors, would refuse or die of."""
    body = json.dumps({"infer_requests": [request("a")], "request_config": {field: value}})
    reply = await http.post("/infer/", content=body, headers={"Content-Type": "application/json"})
    assert (*error(reply), engine.generated) == (400, "RequestError", [])
    assert f"request_config.{field}" in reply.json()["found"]


@served()
async def test_a_refused_request_is_named_by_its_place(http: Http) -> None:
    reply = await http.post("/infer/", json={"infer_requests": [request("a"), request("refuse")]})
    assert error(reply) == (413, "PromptTooLongError")
    assert reply.json()["what"].startswith("infer_requests.1: ")
    item = {"request": request("refuse"), "response_token_ids": [1]}
    reply = await http.post("/score/", json={"items": [*CANARY, item]})
    assert error(reply) == (413, "PromptTooLongError")
    assert reply.json()["what"].startswith("items.1: ")


class Defective(FakeEngine):
    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        raise KeyError("a mistake in our own code")

    async def score(self, *args: Any, **kwargs: Any) -> Scores:
        raise KeyError("a mistake in our own code")


@pytest.mark.parametrize("engine", [FakeEngine, Defective])
def test_only_a_defect_is_called_one(engine: type[FakeEngine]) -> None:
    """R16: an error that nobody has foreseen. What the engine refuses, or fails at, has another name."""
    item = {"request": request("refuse"), "response_token_ids": [1]}
    messages = [{"role": "user", "content": "refuse"}]
    calls = {
        "/infer/": {"infer_requests": [request("refuse")]},
        "/score/": {"items": [item]},
        "/v1/chat/completions": {"messages": messages},
    }

    async def check(http: httpx.AsyncClient, _: FakeEngine, service: RolloutService) -> None:
        for path, body in calls.items():
            for kind in ("application/json", NDJSON):
                reply = await http.post(path, json=body, headers={"Accept": kind})
                refused = reply.status_code == 413
                assert refused == (engine is FakeEngine)
                assert ("KeyError" in reply.text) == ("defect" in reply.text) == (not refused)
                assert refused or reply.status_code == 500

    serve(check, engine=engine())


@served()
async def test_one_bad_request_fails_the_call_and_cancels_the_rest(http: Http, service: Service) -> None:
    reply = await http.post("/infer/", json={"infer_requests": [request("fail here"), request("b")]})
    assert (*error(reply), reply.json()["what"]) == (500, "ProjectError", "fail here")
    assert service.gate.in_flight == 0


class Caller:
    """A client that keeps its connection until `gone`, and notes what it is sent."""

    def __init__(
        self,
        service: RolloutService,
        texts: Sequence[str],
        *,
        accept: bytes = b"*/*",
        path: str = "/infer/",
        body: dict[str, Any] | None = None,
    ) -> None:
        requests = [RolloutInferRequest.model_validate(request(text)) for text in texts]
        infer = InferCall(infer_requests=requests).model_dump_json()  # with uuids of their own
        self._body = (infer if body is None else json.dumps(body)).encode()
        self._sent, self.gone = False, asyncio.Event()
        self.status, self.content_type, self.lines = 0, "", list[dict[str, Any]]()
        headers = [*JSON, (b"accept", accept)]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self.calling = asyncio.create_task(create_app(service, None)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.content_type = message["status"], dict(message["headers"])[b"content-type"].decode()
        else:
            self.lines += [json.loads(line) for line in message["body"].splitlines()]

    def places(self) -> list[int]:
        return [line["index"] for line in self.lines]


@served()
async def test_a_client_that_hangs_up_stops_its_generations(engine: FakeEngine, service: Service) -> None:
    engine.go.clear()
    caller = Caller(service, "a")
    await until(lambda: engine.generated)
    assert (engine.generated, service.gate.in_flight) == (["a"], 1)
    caller.gone.set()
    await caller.calling
    await until(lambda: engine.cancelled)
    await until(lambda: not service.gate.in_flight)
    assert engine.cancelled == ["a"]


# ---- answers as they end -------------------------------------------------------------------------------------------


@served()
async def test_a_stream_has_a_line_per_request_as_each_ends(http: Http, engine: FakeEngine, service: Service) -> None:
    """D9: before the others have ended; the same answers as without streaming, and the status with the first line."""
    engine.holds = {"a": asyncio.Event(), "c": asyncio.Event()}
    caller = Caller(service, "abc", accept=b"application/x-ndjson, application/json;q=0.5")
    await until(caller.places)
    assert (caller.status, caller.content_type, caller.places()) == (200, NDJSON, [1])
    engine.holds["c"].set()
    await until(lambda: len(caller.places()) > 1)
    assert caller.places() == [1, 2]
    assert not caller.calling.done()
    engine.holds["a"].set()
    await caller.calling
    assert caller.places() == [1, 2, 0]
    assert service.gate.in_flight == 0
    lines = {line["index"]: line["output"] for line in caller.lines}
    again = await http.post("/infer/", content=caller._body, headers={"Content-Type": "application/json"})
    assert [lines[i] for i in range(3)] == again.json(), "the same uuids get the same answers"
    assert all(AnswerLine.model_validate(line).error is None for line in caller.lines)


@served()
async def test_a_call_without_requests_is_an_empty_stream(http: Http) -> None:
    reply = await http.post("/infer/", json={"infer_requests": []}, headers={"Accept": NDJSON})
    assert (reply.status_code, reply.headers["content-type"], reply.content) == (200, NDJSON, b"")


@served(max_requests_per_call=2)
async def test_what_fails_before_the_first_line_has_its_status(http: Http) -> None:
    reply = await http.post("/infer/", json={"infer_requests": [request("refuse")]}, headers={"Accept": NDJSON})
    assert error(reply) == (413, "PromptTooLongError")
    many = await http.post("/infer/", json={"infer_requests": [request("a")] * 3}, headers={"Accept": NDJSON})
    assert error(many) == (413, "RequestError")


@served()
async def test_what_fails_later_is_the_last_line_and_cancels_the_rest(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    engine.holds = {"refuse": asyncio.Event(), "c": asyncio.Event()}
    caller = Caller(service, ["a", "refuse", "c"], accept=NDJSON.encode())
    await until(caller.places)
    engine.holds["refuse"].set()
    await caller.calling
    first, last = caller.lines
    assert (caller.status, first["index"]) == (200, 0)
    told = AnswerLine.model_validate(last).error
    assert told is not None
    assert (told.error, told.what[:18]) == ("PromptTooLongError", "infer_requests.1: ")
    assert (engine.cancelled, service.gate.in_flight) == (["c"], 0)
    text = (await http.get("/metrics/")).text
    assert 'rollout_requests_total{outcome="answered"} 1.0' in text
    assert 'rollout_requests_total{outcome="PromptTooLongError"} 2.0' in text


@served()
async def test_hanging_up_in_the_middle_of_a_stream_aborts_what_is_left(engine: FakeEngine, service: Service) -> None:
    engine.holds = {"b": asyncio.Event()}
    caller = Caller(service, "ab", accept=NDJSON.encode())
    await until(caller.places)
    assert (caller.places(), service.gate.in_flight) == ([0], 1)
    caller.gone.set()
    await caller.calling
    assert (engine.cancelled, service.gate.in_flight) == (["b"], 0)


@served()
async def test_a_sync_waits_for_generation_and_not_for_a_slow_reader(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    """R10: answers under way end before the weights change, whatever the caller has read of them."""
    await open_group(http)
    engine.holds = {"b": asyncio.Event()}
    requests = [RolloutInferRequest.model_validate(request(text)) for text in "abc"]
    answers = service.answers(InferCall(infer_requests=requests))
    assert (await anext(answers))[0] == 0  # nobody reads from now on
    updating = asyncio.create_task(push(http, update()))
    await until(lambda: service.gate.state == "draining")
    assert service.gate.ver == 0
    engine.holds["b"].set()
    assert (await updating).status_code == 200
    rest = [RolloutOutput.model_validate_json(output) async for _, output in answers]
    assert [output.rollout_infos.ver for output in rest] == [0, 0]
    assert service.gate.ver == 1


@served()
async def test_a_dead_engine_is_told_by_health(http: Http, engine: FakeEngine) -> None:
    engine.dead = True
    for path in ("/health/", "/ready/"):
        assert error(await http.get(path)) == (503, "ServerError")


async def open_group(
    http: httpx.AsyncClient, incarnation: str = "a", *, world_size: int = 2, timeout_s: float = 5
) -> None:
    body = {"incarnation": incarnation, "secret": "0" * 64, "group_port": 1234, "world_size": world_size}
    body |= {"backend": "tcp", "timeout_s": timeout_s}
    assert (await http.post("/init_communicator/", json=body)).status_code == 200


CANARY = [{"request": request("canary"), "response_token_ids": [1, 2]}]  # the fake engine scores -0.5 each


def update(incarnation: str = "a", ver: int = 1, mode: str = "full", **fields: Any) -> dict[str, Any]:
    return {
        "incarnation": incarnation,
        "ver": ver,
        "mode": mode,
        "buckets": [],
        "canary": CANARY,
        "timeout_s": 5,
        **fields,
    }


def expected(*logprobs: float, ver: int = 1, tolerance: float = 0.1, incarnation: str = "a") -> dict[str, Any]:
    return {"incarnation": incarnation, "ver": ver, "logprobs": [logprobs], "tolerance": tolerance}


async def push(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Send an update whose canary scores what the learner expects."""
    await http.post("/expect_scores/", json=expected(-0.5, -0.5, ver=body["ver"], incarnation=body["incarnation"]))
    return await http.post("/update_weights/", json=body)


@pytest.mark.parametrize("phase", ["draining", "loading"])
@served()
async def test_a_learner_that_goes_away_in_an_update_is_the_reason(
    http: Http, engine: FakeEngine, service: Service, phase: str
) -> None:
    """Its connection ends, as after a SIGKILL. People read the reason in `/ready/` and in refusals."""
    await open_group(http)
    rolling = None
    if phase == "draining":
        engine.holds = {"long": asyncio.Event()}
        rolling = asyncio.create_task(http.post("/infer/", json={"infer_requests": [request("long")]}))
        await until(lambda: engine.generated)
    else:
        engine.replies["sync_poll"] = lambda: WorkerReply(done=False)
    caller = Caller(service, "", path="/update_weights/", body=update())
    await until(lambda: service.gate.state == ("draining" if phase == "draining" else "updating"))
    caller.gone.set()
    await caller.calling
    assert service.gate.state == "poisoned"
    for path in ("/ready/", "/infer/"):
        ask = http.get(path) if path == "/ready/" else http.post(path, json={"infer_requests": [request("b")]})
        assert (await ask).json()["found"] == "the caller went away"
    engine.holds.get("long", asyncio.Event()).set()
    if rolling is not None:
        await rolling


@served(communicator_host="10.0.0.7", tensor_parallel_size=4)
async def test_one_call_is_one_update(http: Http, engine: FakeEngine) -> None:
    """R09, R10: the workers' calls, the caches, the version, and the address that no request names."""
    await open_group(http, world_size=5)
    method, call, host = engine.calls[-2]
    joined = InitCommunicatorCall.model_validate_json(call)
    assert (method, host) == ("sync_join", "10.0.0.7")
    assert (joined.incarnation, joined.group_port, joined.first_rank, joined.world_size) == ("a", 1234, 0, 5)
    reply = await push(http, update(ver=4))
    assert (reply.status_code, reply.json()["ver"], engine.num_resets) == (200, 4, 1)
    assert engine.called()[-3:] == ["sync_start", "sync_clear_cache", "sync_poll"]
    status = (await http.get("/status/")).json()
    assert (status["gate"], status["ver"], status["incarnation"]) == ("serving", 4, "a")
    assert error(await push(http, update("b", 5))) == (409, "SyncError")
    assert error(await push(http, update(ver=4))) == (409, "SyncError")
    assert engine.called().count("sync_start") == 1


@served(enable_lora=True, max_lora_rank=32)
async def test_an_adapter_is_attached_to_requests_until_the_next_full_update(http: Http, engine: FakeEngine) -> None:
    """R08: under another name each time, so that no cached prefix of the last one is found."""
    assert (await http.get("/status/")).json()["max_lora_rank"] == 32
    await open_group(http)
    for ver, mode, adapter in ((1, "adapter", "policy-1"), (2, "adapter", "policy-2"), (3, "full", None)):
        assert (await push(http, update(ver=ver, mode=mode))).status_code == 200
        assert (engine.adapter, engine.num_resets) == (adapter, ver)


@served()
async def test_an_adapter_is_refused_where_none_is_taken_and_nothing_is_poisoned(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    assert (await http.get("/status/")).json()["max_lora_rank"] == 0
    await open_group(http)
    reply = await push(http, update(mode="adapter"))
    assert error(reply) == (409, "SyncError")
    assert "enable_lora" in reply.json()["found"]
    assert (service.gate.state, engine.called().count("sync_start")) == ("serving", 0)


@served(enable_lora=True)
async def test_an_adapter_does_not_heal_a_poisoned_server(http: Http, engine: FakeEngine, service: Service) -> None:
    """Only a full update says what all weights are."""

    def fail() -> WorkerReply:
        raise DigestError("other bytes")

    await open_group(http)
    engine.replies["sync_poll"] = fail
    assert error(await push(http, update(mode="adapter"))) == (500, "DigestError")
    del engine.replies["sync_poll"]
    await open_group(http, "b")
    assert error(await push(http, update("b", 2, "adapter"))) == (409, "SyncError")
    assert service.gate.state == "poisoned"
    assert (await push(http, update("b", 2))).status_code == 200
    assert (await push(http, update("b", 3, "adapter"))).status_code == 200


@served(enable_lora=True)
async def test_two_models_never_answer_alike(http: Http, engine: FakeEngine) -> None:
    """R10: whichever learner sent them, and in whichever order; an adapter counts with the weights below it."""

    async def infos() -> dict[str, Any]:
        infos = (await http.post("/infer/", json={"infer_requests": [request("a")]})).json()[0]["rollout_infos"]
        said.append((infos["server_id"], infos["ver"], infos["incarnation"], infos["weights"]))
        return infos

    said: list[tuple[Any, ...]] = []
    assert (await infos())["weights"] == "of the checkpoint"
    ver = 0
    for incarnation, sent in (("a", "w1"), ("a", "w2"), ("b", "w2"), ("b", "w1")):
        await open_group(http, incarnation)
        engine.replies["sync_poll"] = lambda sent=sent: WorkerReply(weights=sent)  # type: ignore[misc]
        for mode in ("full", "adapter"):
            ver += 1
            assert (await push(http, update(incarnation, ver, mode))).status_code == 200
            assert ((await infos())["ver"], said[-1][2]) == (ver, incarnation)
        assert error(await push(http, update(incarnation, ver))) == (409, "SyncError")
    assert len({one[1] for one in said}) == len(said) == 9
    assert len({(weights, incarnation) for _, _, incarnation, weights in said}) == 9
    assert (await http.get("/status/")).json()["weights"] == said[-1][3]


@pytest.mark.parametrize("asked", ["/init_communicator/", "/update_weights/"])
@served()
async def test_a_caller_that_would_wait_for_a_day_waits_no_longer_than_the_server(
    http: Http, engine: FakeEngine, asked: str
) -> None:
    """The server's ten minutes."""
    await open_group(http, timeout_s=86_400)
    assert (await push(http, update(timeout_s=86_400))).status_code == 200
    method = {"/init_communicator/": "sync_join", "/update_weights/": "sync_start"}[asked]
    call = next(call for call in engine.calls if call[0] == method)
    assert json.loads(call[1])["timeout_s"] == 600.0


@served()
async def test_a_bucket_of_another_size_than_its_tensors_is_refused_before_anything_is_received(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    await open_group(http)
    tensors = [{"name": "w", "dtype": "float32", "shape": [2, 3]}]
    for num_bytes in (0, 24, 1 << 39):
        reply = await push(http, update(buckets=[{"tensors": tensors, "num_bytes": num_bytes}]))
        assert (*error(reply), reply.json()["found"]) == (400, "SyncError", f"{num_bytes} bytes")
    assert (service.gate.state, engine.called().count("sync_start")) == ("serving", 0)
    assert (await push(http, update(buckets=[{"tensors": tensors, "num_bytes": 32}]))).status_code == 200


@served()
async def test_a_failed_update_is_told_leaves_the_group_and_poisons(http: Http, engine: FakeEngine) -> None:
    def fail() -> WorkerReply:
        raise DigestError("other bytes")

    await open_group(http)
    engine.replies["sync_poll"] = fail
    assert error(await push(http, update())) == (500, "DigestError")
    assert engine.called()[-1] == "sync_leave"
    refused = await http.post("/infer/", json={"infer_requests": [request("a")]})
    assert (*error(refused), refused.headers["Retry-After"]) == (503, "ServerPoisonedError", "1")
    assert "other bytes" in refused.json()["found"]
    assert error(await http.get("/ready/")) == (503, "ServerPoisonedError")
    assert engine.generated == []
    del engine.replies["sync_poll"]
    await open_group(http, "b")
    assert (await push(http, update("b"))).status_code == 200
    assert (await http.get("/ready/")).status_code == 200


# ---- the verdict: nothing is served before the learner's own log-probabilities were compared -----------------------


async def until_scored(engine: FakeEngine) -> None:
    await until(lambda: engine.scored)
    await let_others_run()


@served()
async def test_nobody_is_served_before_the_verdict(http: Http, engine: FakeEngine, service: Service) -> None:
    """R09, R10: a call that comes meanwhile waits, and gets the new version."""
    await open_group(http)
    updating = asyncio.create_task(http.post("/update_weights/", json=update()))
    await until_scored(engine)
    calling = asyncio.create_task(http.post("/infer/", json={"infer_requests": [request("a")]}))
    await until(lambda: service.waiting_gate.waiting)
    assert (updating.done(), calling.done(), service.gate.state) == (False, False, "updating")
    assert error(await http.get("/ready/")) == (503, "ServerBusyError")
    wrong = await http.post("/expect_scores/", json=expected(-0.5, -0.5, incarnation="b"))
    assert error(wrong) == (409, "CommunicatorError")
    assert (await http.post("/expect_scores/", json=expected(-0.45, -0.55))).status_code == 200
    assert (await updating).status_code == 200
    assert (await calling).json()[0]["rollout_infos"]["ver"] == 1


@served()
async def test_the_expected_scores_may_come_before_the_update(http: Http) -> None:
    await open_group(http)
    assert (await http.post("/expect_scores/", json=expected(-0.5, -0.5))).status_code == 200
    assert (await http.post("/update_weights/", json=update())).status_code == 200
    # They count once: the next update needs its own.
    late = await http.post("/update_weights/", json=update(ver=2, timeout_s=0.05))
    assert error(late) == (504, "DeadlineError")


@pytest.mark.parametrize(
    ("logprobs", "status", "name"),
    [((-0.5, -0.8), 500, "CanaryError"), ((-0.5,), 500, "SyncError"), (None, 504, "DeadlineError")],
)
@served()
async def test_a_failed_canary_poisons(
    http: Http, engine: FakeEngine, service: Service, logprobs: tuple[float, ...] | None, status: int, name: str
) -> None:
    """R09: other probabilities, another number of them, or none in time."""
    await open_group(http)
    updating = asyncio.create_task(http.post("/update_weights/", json=update(timeout_s=60 if logprobs else 0.5)))
    await until_scored(engine)
    if logprobs is not None:
        await http.post("/expect_scores/", json=expected(*logprobs))
    assert error(await updating) == (status, name)
    assert service.gate.state == "poisoned"
    assert error(await http.post("/infer/", json={"infer_requests": [request("a")]}))[0] == 503
    assert engine.called()[-1] == "sync_leave"


@served()
async def test_leaving_without_a_verdict_poisons(http: Http, engine: FakeEngine, service: Service) -> None:
    await open_group(http)
    updating = asyncio.create_task(http.post("/update_weights/", json=update()))
    await until_scored(engine)
    assert (await http.post("/close_communicator/", json={"incarnation": "a"})).status_code == 200
    assert error(await updating) == (500, "CommunicatorError")
    assert (service.gate.state, service.gate.ver) == ("poisoned", 0)


@pytest.mark.parametrize(
    "fields", [{"canary": []}, {"mode": "adapter", "base_of_adapter": True}, {"base_of_adapter": True}]
)
@served()
async def test_an_update_that_cannot_be_judged_is_refused(
    http: Http, engine: FakeEngine, service: Service, fields: dict[str, Any]
) -> None:
    await open_group(http)
    reply = await http.post("/update_weights/", json=update(**fields))
    assert error(reply) == (400, "RequestError")
    assert "canary" in reply.json()["found"]
    assert (service.gate.state, engine.called().count("sync_start")) == ("serving", 0)


@served(enable_lora=True)
async def test_the_weights_below_an_adapter_are_not_served_alone(http: Http, service: Service) -> None:
    """R08, R09: only the adapter of the same learner makes them whole."""
    base = update(canary=[], base_of_adapter=True)
    await open_group(http)
    assert (await http.post("/update_weights/", json=base)).status_code == 200
    assert error(await http.post("/infer/", json={"infer_requests": [request("a")]})) == (
        503,
        "ServerPoisonedError",
    )
    await http.post("/expect_scores/", json=expected(-0.5, -0.5, ver=2))
    assert (await http.post("/update_weights/", json=update(ver=2, mode="adapter"))).status_code == 200
    assert (service.gate.state, service.gate.ver) == ("serving", 2)
    assert (await http.post("/update_weights/", json={**base, "ver": 3})).status_code == 200
    await open_group(http, "b")
    other = update(ver=4, mode="adapter", incarnation="b")
    assert error(await http.post("/update_weights/", json=other)) == (409, "SyncError")


@served()
async def test_weights_that_give_no_finite_probabilities_poison_by_themselves(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    """Answers that are under way are not given either."""
    engine.go.clear()
    calling = asyncio.create_task(http.post("/infer/", json={"infer_requests": [request("a", uuid="u")]}))
    while not engine.generated:
        await asyncio.sleep(0)
    engine.logprob = float("nan")
    assert error(await http.post("/score/", json={"items": CANARY})) == (502, "NotFiniteError")
    assert service.gate.state == "poisoned"
    engine.go.set()
    assert error(await calling) == (503, "ServerPoisonedError")
    await open_group(http)
    engine.logprob = -0.5
    await http.post("/expect_scores/", json=expected(-0.5, -0.5))
    assert (await http.post("/update_weights/", json=update())).status_code == 200
    again = await http.post("/infer/", json={"infer_requests": [request("a", uuid="u")]})
    assert again.json()[0]["rollout_infos"]["ver"] == 1  # a new rollout, not the one of the wrong weights


@served()
async def test_nan_that_other_weights_have_left_in_the_cache_is_no_verdict(http: Http, engine: FakeEngine) -> None:
    """The cache is cleared after weights that nobody had checked, and where a canary says NaN, once."""

    def clear() -> WorkerReply:
        engine.logprob = -0.5
        return WorkerReply()

    async def cleared(ver: int, logprob: float) -> tuple[int, int]:
        engine.logprob = logprob
        before = engine.called().count("sync_clear_cache")
        status = (await push(http, update(ver=ver))).status_code
        return status, engine.called().count("sync_clear_cache") - before

    await open_group(http)
    engine.replies["sync_clear_cache"] = clear
    assert await cleared(1, float("nan")) == (200, 1)  # the checkpoint's may be anything
    assert await cleared(2, -0.5) == (200, 0)
    assert await cleared(3, float("nan")) == (200, 1)
    del engine.replies["sync_clear_cache"]
    assert await cleared(4, float("nan")) == (502, 1)  # it is the weights
    await open_group(http)
    assert await cleared(4, -0.5) == (200, 1)


@served()
async def test_a_new_learner_ends_what_the_old_one_had_under_way(
    http: Http, engine: FakeEngine, service: Service
) -> None:
    await open_group(http)
    engine.replies["sync_poll"] = lambda: WorkerReply(done=False)
    hanging = asyncio.create_task(push(http, update()))
    while "sync_poll" not in engine.called():
        await asyncio.sleep(0)
    await open_group(http, "b")
    assert error(await hanging) == (500, "CommunicatorError")
    assert service.gate.state == "poisoned"
    del engine.replies["sync_poll"]
    assert (await push(http, update("b", 1))).status_code == 200


@served()
async def test_a_retry_gets_the_old_rollout_also_after_an_update(http: Http, engine: FakeEngine) -> None:
    """R12: the answer says which version it was made with."""
    body = {"infer_requests": [request("a", uuid="u")]}
    first = await http.post("/infer/", json=body)
    await open_group(http)
    await push(http, update(ver=9))
    assert (await http.post("/infer/", json=body)).json() == first.json()
    assert engine.generated == ["a"]


@served()
async def test_score(http: Http) -> None:
    reply = await http.post("/score/", json={"items": [{"request": request("a"), "response_token_ids": [1, 2]}]})
    wanted = {"ver": 0, "logprobs": [[-0.5, -0.5]], "cached_logprobs": [], "prompt_token_ids": [[1, 2]]}
    assert reply.json() == {**wanted, "pixels": []}


@served()
async def test_metrics_count(http: Http, engine: FakeEngine) -> None:
    engine.replies["sync_poll_join"] = lambda: WorkerReply(num_strangers=3)
    await open_group(http)
    assert "rollout_group_strangers 3.0" in (await http.get("/metrics/")).text
    await http.post("/infer/", json={"infer_requests": [request("a"), request("b")]})
    await http.post("/infer/", json={"infer_requests": [request("fail")]})
    text = (await http.get("/metrics/")).text
    assert 'rollout_requests_total{outcome="answered"} 2.0' in text
    assert 'rollout_requests_total{outcome="ProjectError"} 1.0' in text
    assert "rollout_response_tokens_total 4.0" in text
    assert 'rollout_gate_state{state="serving"} 1.0' in text


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)
