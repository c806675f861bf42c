"""`/v1/` and the description of the API over a fake engine (R10, R13): the gate, the token, what is refused. With real
vLLM and the `openai` client: tests/integration/test_server.py."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rollout_server.config import ServerConfig
from rollout_server.openai_api import (
    ChatCall,
    CompletionCall,
    OpenAICall,
    OpenAIError,
    OpenAILayer,
    _checked,
    _Client,
    _GivenBackError,
    _Watch,
    _watch,
    image_parts,
)
from rollout_server.service import RolloutService
from shared.errors import NotFiniteError, RequestError, ServerBusyError
from shared.generation import TRIES
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.rollout_server.test_app import open_group, push, serve, update
from tests.waits import until

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def error(reply: httpx.Response) -> tuple[int, str]:
    detail = OpenAIError.model_validate_json(reply.content).error
    assert detail.code == reply.status_code
    return reply.status_code, detail.type


async def first(events: Any) -> bytes:
    return bytes(await anext(events))


def test_a_stream_holds_the_gate_until_its_last_event_and_not_for_a_slow_reader() -> None:
    """R10: no answer spans two versions."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        await open_group(http)
        engine.holds = {"b": asyncio.Event()}
        events = service.completion_events(ChatCall.model_validate(chat("a b c", stream=True)))
        assert await first(events) == b'data: "a"\n\n'  # nobody reads from now on
        updating = asyncio.create_task(push(http, update()))
        waiting = asyncio.create_task(http.post(CHAT, json=chat("d")))
        await until(lambda: (service.gate.state, service.waiting_gate.waiting) == ("draining", 1))
        engine.holds["b"].set()
        assert (await updating).status_code == 200
        answer = (await waiting).json()
        assert (answer["choices"], answer["ver"]) == ([{"text": "d"}], 1)
        assert [event async for event in events][-1] == b"data: [DONE]\n\n"

    serve(check)


def test_calls_get_503_while_an_update_lasts_too_long_and_from_a_poisoned_server() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        service.gate.open_group("a")
        service.gate.begin_update("a", 1, "full")
        for fields in ({}, {"stream": True}):
            busy = await http.post(CHAT, json=chat("a", **fields))
            assert error(busy) == (503, "ServerBusyError")
            assert busy.headers["Retry-After"] == "1"
        service.gate.fail("a test")
        assert error(await http.post("/v1/completions", json={"prompt": "a"})) == (503, "ServerPoisonedError")
        assert engine.generated == []

    serve(check, queue_timeout_s=0.05)


def test_events_and_what_fails_among_them() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        whole = await http.post(CHAT, json=chat("a b", stream=True))
        assert (whole.status_code, whole.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert whole.text == 'data: "a"\n\ndata: "b"\n\ndata: [DONE]\n\n'
        at_once = await http.post(CHAT, json=chat("fail", stream=True))
        assert error(at_once) == (500, "ProjectError")
        later = await http.post(CHAT, json=chat("a fail", stream=True))
        last = json.loads(later.text.split("data: ")[-1])
        assert (later.status_code, last["error"]["type"]) == (200, "ProjectError")
        counted = (await http.get("/metrics/")).text
        assert 'rollout_openai_calls_total{outcome="answered"} 1.0' in counted
        assert 'rollout_openai_calls_total{outcome="ProjectError"} 2.0' in counted
        assert service.gate.in_flight == 0

    serve(check)


@pytest.mark.parametrize("stream", [False, True])
def test_a_log_probability_that_is_not_finite_poisons(stream: bool) -> None:
    """R09: as for `/infer/`. What has been streamed before it stays."""

    class Spoiled(FakeEngine):
        async def complete(self, call: OpenAICall, ver: int) -> bytes | AsyncGenerator[str]:
            if call.stream:
                return self.events()
            raise NotFiniteError("a test")

        async def events(self) -> AsyncGenerator[str]:
            yield "data: 1\n\n"
            raise NotFiniteError("a test")

    async def check(http: httpx.AsyncClient, _: FakeEngine, service: RolloutService) -> None:
        reply = await http.post(CHAT, json=chat("a", stream=stream))
        assert reply.status_code == (200 if stream else 502)
        assert "NotFiniteError" in reply.text
        assert service.gate.state == "poisoned"

    serve(check, engine=Spoiled())


@pytest.mark.parametrize("logprob", [-0.5, float("nan"), float("-inf")])
def test_vllm_s_layer_gets_finite_log_probabilities_only(logprob: float) -> None:
    row = {5: SimpleNamespace(logprob=-0.1)}
    outputs = [
        SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=None, token_ids=[5], logprobs=[row])]),
        SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=None, token_ids=[], logprobs=[row])]),
        SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=None, token_ids=[6], logprobs=None)]),
        SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    index=0, finish_reason=None, token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=logprob)}]
                )
            ]
        ),
    ]

    class Llm:
        async def generate(self, **given: Any) -> AsyncGenerator[Any]:
            for output in outputs:
                yield output

    async def swallowed() -> AsyncGenerator[str]:  # vLLM's layer does so in a stream
        try:
            async for _ in _Client(Llm(), lambda: None).generate():
                yield "part"
        except Exception:
            yield "error"

    async def run() -> list[str]:
        watch = _Watch(ver=1, n=1)
        _watch.set(watch)
        return [event async for event in _checked(swallowed(), watch)]

    if math.isfinite(logprob):
        assert asyncio.run(run()) == ["part"] * 4
    else:
        with pytest.raises(NotFiniteError):
            asyncio.run(run())


class GivesBack(OpenAILayer):
    """Its engine takes a request only after so many tries. Events begin after `num_before` others."""

    def __init__(self, num_back: int, num_before: int = 0) -> None:
        self.left, self.num_before = num_back, num_before

    async def _answer(self, call: OpenAICall, images: Sequence[Any], ver: int) -> bytes | AsyncGenerator[str]:
        self.left -= 1
        if call.stream:
            watch = _Watch(ver=ver, n=1)
            return _checked(self.parts(watch.faults), watch)
        if self.left >= 0:
            raise _GivenBackError
        return b"answer"

    async def parts(self, faults: list[Exception]) -> AsyncGenerator[str]:
        for _ in range(self.num_before):
            yield "before"
        if self.left >= 0:
            faults.append(_GivenBackError())
        yield "answer"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_back", [0, 1, TRIES - 1, TRIES])
def test_what_the_engine_gives_back_is_asked_again_a_few_times(stream: bool, num_back: int) -> None:
    async def run() -> Any:
        answer = await GivesBack(num_back).complete(ChatCall.model_validate(chat("a", stream=stream)), [], 1)
        return answer if isinstance(answer, bytes) else [event async for event in answer]

    if num_back == TRIES:
        with pytest.raises(ServerBusyError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == (["answer"] if stream else b"answer")


def test_events_are_not_repeated_after_the_first() -> None:
    async def run() -> None:
        events = await GivesBack(1, num_before=1).complete(ChatCall.model_validate(chat("a", stream=True)), [], 1)
        assert not isinstance(events, bytes)
        assert await anext(events) == "before"
        with pytest.raises(ServerBusyError):
            await anext(events)

    asyncio.run(run())


def test_closing_a_stream_aborts_it() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        engine.holds = {"b": asyncio.Event()}
        events = service.completion_events(ChatCall.model_validate(chat("a b", stream=True)))
        await first(events)
        await events.aclose()
        assert (engine.cancelled, service.gate.in_flight) == (["a b"], 0)

    serve(check)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "x"},
        {"mm_processor_kwargs": {"size": 1}},
        {"media_io_kwargs": {}},
        {"kv_transfer_params": {"a": 1}},
        {"tools": [{"type": "function"}]},
        {"n": 0},
        {"top_logprobs": 21},
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://a/b"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "a"}]}]},
    ],
)
def test_what_decides_more_than_an_answer_is_refused(fields: dict[str, Any]) -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        assert error(await http.post(CHAT, json=chat("a") | fields)) == (400, "RequestError")
        assert engine.generated == []

    serve(check)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 2.5), ("temperature", -1), ("top_p", 0), ("stop", [""]), ("stop", ""), ("max_tokens", 0)],
)
def test_a_wrong_setting_is_named(path: str, field: str, value: object) -> None:
    """R16: what vLLM would refuse or die of."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        body = (chat("a") if path == CHAT else {"prompt": "a"}) | {field: value}
        reply = await http.post(path, json=body)
        assert (*error(reply), engine.generated) == (400, "RequestError", [])
        assert field in reply.json()["error"]["message"]

    serve(check)


def test_prompts_and_answers_of_a_call_are_bounded() -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        for path, body in ((CHAT, chat("a", n=7)), ("/v1/completions", {"prompt": ["a", "b"], "n": 4})):
            assert error(await http.post(path, json=body)) == (413, "RequestError")
        assert CompletionCall(prompt=[1, 2, 3]).num_prompts == 1
        assert CompletionCall(prompt=[[1], [2, 3]]).num_prompts == 2

    serve(check, max_requests_per_call=6)


def test_images_are_named_in_their_parts() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "a"}}, {"type": "image_url", "image_url": "b"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "<image> is text here"}]}
    assert image_parts(ChatCall.model_validate(body)) == ["a", "b"]
    with pytest.raises(RequestError, match="image part"):
        image_parts(ChatCall.model_validate({"messages": [{"role": "user", "content": [{"type": "image"}]}]}))


def test_the_token_and_the_switches() -> None:
    paths = ("/openapi.json", "/v1/models")

    async def closed(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        for path in paths:
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"Authorization": "Bearer secret"})).status_code == 200

    async def off(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        assert (await http.get("/v1/models")).status_code == 404
        assert (await http.post(CHAT, json=chat("a"))).status_code == 404

    async def without_v1(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        api = (await http.get("/below/openapi.json")).json()
        assert "/below/infer/" in api["paths"]
        assert not any("/v1/" in path for path in api["paths"])

    serve(closed, token="secret")
    serve(off, openai_api=False)
    serve(without_v1, openai_api=False, url_prefix="/below")


def test_answers_say_the_model_s_name_and_the_version_of_their_tokens(tmp_path: Path) -> None:
    """vLLM does the same: a name, not a path of this machine, and spans of tokens with their weights' version."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        call = {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}], "request_config": {"n": 2}}
        (output,) = (await http.post("/infer/", json=call)).json()
        assert output["response"]["model"] == service.config.model_name
        spans = [choice["weight_versions"] for choice in output["response"]["choices"]]
        assert spans == [[{"version": str(output["rollout_infos"]["ver"]), "start": 0, "end": 2}]] * 2

    serve(check)
    (tmp_path / "checkpoint-7").mkdir()
    of_folder = ServerConfig(model=str(tmp_path / "checkpoint-7") + "/")
    assert of_folder.model_name == "checkpoint-7"
    assert of_folder.model_copy(update={"served_model_name": "mine"}).model_name == "mine"
    assert ServerConfig(model="Qwen/Qwen3-VL-4B").model_name == "Qwen/Qwen3-VL-4B"


def test_events_that_end_an_answer_say_its_versions() -> None:
    """As vLLM's layer writes them, for two prompts with two answers each; what a text says of JSON ends nothing."""

    class Llm:
        async def generate(self, *lengths: int, **_: Any) -> AsyncGenerator[Any]:
            for i in range(2 * len(lengths)):  # the answers' tokens come in turn
                index = i % len(lengths)
                tokens = [7] * (lengths[index] - 1 if i < len(lengths) else 1)
                yield SimpleNamespace(outputs=[SimpleNamespace(index=index, finish_reason=None, token_ids=tokens)])

    def event(choice: int, reason: str | None, text: str = "é") -> str:
        ending = {"index": choice, "delta": {"content": text}, "finish_reason": reason}
        return f"data: {json.dumps({'choices': [ending]}, separators=(',', ':'), ensure_ascii=False)}\n\n"

    quoted = event(0, None, '"finish_reason":"stop"')

    async def layer(client: _Client) -> AsyncGenerator[str]:
        for outputs in [client.generate(3, 4), client.generate(5, 6)]:
            async for _ in outputs:
                pass
        yield quoted
        for choice in (2, 0, 3, 1):
            yield event(choice, "length")
        yield "data: [DONE]\n\n"

    async def run() -> list[str]:
        watch = _Watch(ver=9, n=2)
        _watch.set(watch)
        return [one async for one in _checked(layer(_Client(Llm(), lambda: None)), watch)]

    first, *ends, done = asyncio.run(run())
    assert (first, done) == (quoted, "data: [DONE]\n\n")
    for text, choice, number in zip(ends, (2, 0, 3, 1), (5, 3, 6, 4), strict=True):
        said = json.loads(text.removeprefix("data: "))
        assert text.endswith("\n\n")
        assert said["ver"] == 9
        (one,) = said["choices"]
        assert one["weight_versions"] == [{"version": "9", "start": 0, "end": number}]
        assert (one["index"], one["delta"]["content"]) == (choice, "é")
