"""One server's client over respx: URLs, tokens, patience, and how failures read (R05, R06, R13, R16)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest
import respx

from learner.rollout import client as client_module
from learner.rollout import replies
from learner.rollout.client import Patience, ServerClient, Timeouts, _certificates
from shared.errors import (
    DeadlineError,
    MediaError,
    ProjectError,
    RolloutError,
    ServerBusyError,
    ServerError,
    ServerMismatchError,
    ServerPoisonedError,
    ServerUnreachableError,
    UnauthorizedError,
)
from shared.waits import awake_s
from shared.wire import (
    NDJSON,
    Bucket,
    ErrorBody,
    InferCall,
    InitCommunicatorCall,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    ScoreCall,
    ScoreItem,
    UpdateWeightsCall,
)
from tests.pauses import pause_soon
from tests.proxies import watched_proxy
from tests.tiers import slow
from tests.unit.learner.rollout.fakes import error, output, status

T = TypeVar("T")
BOMB = gzip.compress(bytes(10_000_000))
URL = "http://rollout.test/fleet/a"
CALL = InferCall(
    infer_requests=[RolloutInferRequest.model_validate({"messages": [{"role": "user", "content": "request 7"}]})]
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
INIT = InitCommunicatorCall(
    incarnation="me", secret="0" * 64, group_port=1, world_size=2, backend="tcp", timeout_s=20.0
)
UPDATE = UpdateWeightsCall(incarnation="me", ver=1, buckets=[Bucket(tensors=[], num_bytes=0)], timeout_s=20.0)


@pytest.fixture(autouse=True)
def _hours_into_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock begins with the process. Here sums and differences of its times are far apart."""
    for module in (client_module, replies):
        monkeypatch.setattr(module, "awake_s", lambda: awake_s() + 36_000.0)


def use(
    work: Callable[[ServerClient], Awaitable[T]], *, token: str | None = None, gone_s: float = 0.2, **changes: Any
) -> T:
    timeouts = Timeouts.of(gone_s, changes.pop("infer_timeout_s", None))

    async def run() -> T:
        client = ServerClient(URL + "/", timeouts=timeouts, token=token)
        try:
            return await work(client)
        finally:
            await client.aclose()

    return asyncio.run(run())


async def infer(client: ServerClient, call: InferCall = CALL) -> list[RolloutOutput]:
    """All answers, in the order in which they came."""
    outputs: list[RolloutOutput] = []
    await client.infer(call, lambda _, output: outputs.append(output))
    return outputs


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=[output(r, 0) for r in json.loads(request.content)["infer_requests"]])


@pytest.mark.parametrize(("servers", "poll_s"), [(1, 5.0), (160, 5.0), (320, 10.0), (512, 16.0), (5120, 60.0)])
def test_hundreds_of_servers_are_looked_at_less_often(servers: int, poll_s: float) -> None:
    """32 looks a second, a quarter of `timeout_s` at most; who is silent is noticed as soon as before."""
    few, many = (Timeouts.of(240.0, None, num_servers=number) for number in (1, servers))
    assert many.poll_s == poll_s
    assert many.patience(has_others=True) == few.patience(has_others=True)


def test_clients_share_the_certificates_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them for each of 512 clients took 8 seconds of every rank."""
    made: list[ssl.SSLContext] = []

    def create() -> ssl.SSLContext:
        made.append(ssl.create_default_context())
        return made[-1]

    _certificates.cache_clear()
    monkeypatch.setattr(httpx, "create_ssl_context", create)
    for i in range(3):
        ServerClient(f"https://host-{i}", timeouts=Timeouts.of(1.0, None))
    assert len(made) == 1
    assert _certificates() is made[0], "what is used, for None would check nothing"
    _certificates.cache_clear()


def test_every_path_lies_under_the_prefix_and_carries_the_token(respx_mock: respx.MockRouter) -> None:
    """R06: base_url is a prefix, with or without a slash at its end."""
    sizes = respx_mock.get(f"{URL}/get_world_size/").respond(200, json={"world_size": 3})
    respx_mock.get(f"{URL}/status/").respond(200, json=status(ver=4))
    respx_mock.post(f"{URL}/infer/").mock(side_effect=answer)
    assert use(lambda c: c.world_size(), token="secret") == 3
    assert sizes.calls.last.request.headers["Authorization"] == "Bearer secret"
    assert use(lambda c: c.status()).ver == 4
    assert use(infer)[0].response_token_ids == [7]


def test_the_body_is_the_json_that_ms_swift_takes(respx_mock: respx.MockRouter) -> None:
    """R13."""
    route = respx_mock.post(f"{URL}/infer/").mock(side_effect=answer)
    use(infer)
    body = json.loads(route.calls.last.request.content)
    assert set(body) == {"infer_requests", "request_config", "metrics", "use_tqdm", "adapter_request"}
    assert body["infer_requests"][0]["messages"] == [{"role": "user", "content": "request 7"}]
    assert route.calls.last.request.headers["Content-Type"] == "application/json"


def test_the_server_s_own_error_arrives_with_its_url(respx_mock: respx.MockRouter) -> None:
    wrong = MediaError("image too large", found="90 MP", wanted="at most 32 MP", remedy="resize it")
    respx_mock.post(f"{URL}/infer/").mock(return_value=error(wrong))
    with pytest.raises(MediaError) as caught:
        use(infer)
    assert caught.value.what == f"{URL}: image too large"
    assert (caught.value.found, caught.value.wanted, caught.value.remedy) == ("90 MP", "at most 32 MP", "resize it")


def answer_after(wait_s: float) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
    async def late(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(wait_s)
        return answer(request)

    return late


async def forever(request: httpx.Request) -> httpx.Response:
    await asyncio.sleep(60)
    raise AssertionError


# ---- answers as they end -------------------------------------------------------------------------------------------

THREE = InferCall(
    infer_requests=[
        RolloutInferRequest.model_validate({"messages": [{"role": "user", "content": f"request {i}"}]})
        for i in range(3)
    ]
)


def line(i: int, **fields: Any) -> bytes:
    request = THREE.infer_requests[i].model_dump()
    return json.dumps({"index": i, "output": output(request, 0)} | fields, ensure_ascii=False).encode() + b"\n"


def stream(*parts: bytes) -> Callable[[httpx.Request], httpx.Response]:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return lambda _: httpx.Response(200, headers={"Content-Type": NDJSON}, content=body())


def places_of(client: ServerClient) -> Awaitable[list[int]]:
    async def run() -> list[int]:
        places: list[int] = []
        await client.infer(THREE, lambda i, output: places.append(i))
        return places

    return run()


def test_answers_are_asked_for_and_given_on_as_they_end(respx_mock: respx.MockRouter) -> None:
    """D9: in whatever order, and however the lines are cut into packets. Also a text that holds what Unicode calls a
    line separator is one line."""
    separated = line(1).replace(b'"content": "1"', '"content": "a\u2028b"'.encode())
    body = line(2) + separated + line(0)
    route = respx_mock.post(f"{URL}/infer/").mock(side_effect=stream(body[:7], body[7:-9], body[-9:]))
    assert use(places_of) == [2, 1, 0]
    assert route.calls.last.request.headers["Accept"] == NDJSON


def test_each_answer_is_given_on_before_the_next_one_has_come() -> None:
    """The socket is a real one."""
    step = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1]
        if b"infer" not in path:
            writer.write(OK)
        else:
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {NDJSON}\r\nConnection: close\r\n\r\n".encode())
            for i in range(3):
                writer.write(line(i))
                await writer.drain()
                await step.wait()
                step.clear()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = ServerClient(url, timeouts=Timeouts.of(5.0, 5.0))
        places: list[int] = []

        def on_answer(i: int, _: RolloutOutput) -> None:
            places.append(i)
            step.set()  # lets the server go on, not earlier

        await asyncio.wait_for(client.infer(THREE, on_answer), 20)
        assert places == [0, 1, 2]
        await client.aclose()
        server.close()

    asyncio.run(run())


def test_an_error_line_is_the_server_s_error(respx_mock: respx.MockRouter) -> None:
    """Answers before it have been given on."""
    wrong = ErrorBody.of(MediaError("image too large", found="90 MP")).model_dump()
    respx_mock.post(f"{URL}/infer/").mock(side_effect=stream(line(1), json.dumps({"error": wrong}).encode()))
    places: list[int] = []
    with pytest.raises(MediaError, match="image too large") as caught:
        use(lambda c: c.infer(THREE, lambda i, _: places.append(i)))
    assert URL in caught.value.what
    assert places == [1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((line(0), line(2)), "2 answers"),
        ((line(0), line(0), line(1)), "request 0"),
        ((line(0), line(1, index=7)), "request 7"),
        ((line(0), b'{"index": 1}\n'), "without an output"),
        ((line(0), line(1)[:40]), "malformed"),
    ],
    ids=["too few", "twice", "nobody asked", "empty", "cut off"],
)
def test_malformed_streams(respx_mock: respx.MockRouter, parts: tuple[bytes, ...], words: str) -> None:
    respx_mock.post(f"{URL}/infer/").mock(side_effect=stream(*parts))
    with pytest.raises(RolloutError, match=words) as caught:
        use(places_of)
    assert URL in caught.value.what


def test_a_stream_that_breaks_keeps_what_had_come() -> None:
    """R30: the caller sends only the others again. A real socket, because the end of the body is what is missing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1]
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {NDJSON}\r\nContent-Length: 100000\r\n\r\n".encode()
        writer.write(head + line(1) if b"infer" in path else OK)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = ServerClient(url, timeouts=Timeouts.of(2.0, 5.0))
        places: list[int] = []
        with pytest.raises(ServerError, match="the server is alive"):
            await asyncio.wait_for(client.infer(THREE, lambda i, _: places.append(i)), 20)
        assert places == [1]
        await client.aclose()
        server.close()

    asyncio.run(run())


def test_a_stream_that_stops_in_the_middle_is_given_up(respx_mock: respx.MockRouter) -> None:
    """D16: the deadline is that of each request, not of the first line."""

    async def body() -> AsyncIterator[bytes]:
        yield line(0)
        await asyncio.sleep(60)

    respx_mock.post(f"{URL}/infer/").mock(
        side_effect=lambda _: httpx.Response(200, headers={"Content-Type": NDJSON}, content=body())
    )
    respx_mock.get(f"{URL}/health/").respond(200)
    with pytest.raises(DeadlineError, match=r"2 of 3 request\(s\)"):
        use(lambda c: asyncio.wait_for(places_of(c), 20), infer_timeout_s=0.3)


def test_busy_then_answered(respx_mock: respx.MockRouter) -> None:
    """503 with Retry-After is waited out; the repeat has the same uuid."""
    busy = error(ServerBusyError("draining"), {"Retry-After": "0.02"})
    route = respx_mock.post(f"{URL}/infer/").mock(side_effect=[busy, busy, answer])
    respx_mock.get(f"{URL}/health/").respond(200)
    began = time.monotonic()
    assert use(infer, gone_s=60.0)[0].response_token_ids == [7]
    assert time.monotonic() - began >= 2 * 0.02
    uuids = {json.loads(c.request.content)["infer_requests"][0]["uuid"] for c in route.calls}
    assert route.call_count == 3
    assert uuids == {CALL.infer_requests[0].uuid}


def test_busy_past_the_deadline_is_told(respx_mock: respx.MockRouter) -> None:
    respx_mock.post(f"{URL}/infer/").mock(return_value=error(ServerBusyError("draining"), {"Retry-After": "60"}))
    respx_mock.get(f"{URL}/health/").respond(200)
    began = time.monotonic()
    with pytest.raises(ServerBusyError, match="draining"):
        use(infer)
    assert time.monotonic() - began < 30, "the server's pause is longer than the patience with it"


def test_patience_with_a_busy_server_begins_when_it_is_busy(respx_mock: respx.MockRouter) -> None:
    """The call had waited at the server for longer than `timeout_s` before it was refused."""
    refusals = [error(ServerBusyError("draining"), {"Retry-After": "0.02"})]

    async def refuse_late(request: httpx.Request) -> httpx.Response:
        if not refusals:
            return answer(request)
        await asyncio.sleep(0.7)
        return refusals.pop()

    respx_mock.post(f"{URL}/infer/").mock(side_effect=refuse_late)
    respx_mock.get(f"{URL}/health/").respond(200)
    assert use(infer, gone_s=0.5)[0].response_token_ids == [7]


def test_a_busy_line_is_passed_on_after_a_wait(respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller sends the others again at once, so the client waits, as it does after a 503."""
    monkeypatch.setattr(client_module, "RETRY_AFTER_S", 0.3)
    busy = ErrorBody.of(ServerBusyError("too much memory")).model_dump()
    route = respx_mock.post(f"{URL}/infer/").mock(side_effect=stream(line(1), json.dumps({"error": busy}).encode()))
    respx_mock.get(f"{URL}/health/").respond(200)
    places: list[int] = []
    begin = time.monotonic()
    with pytest.raises(ServerBusyError, match="too much memory"):
        use(lambda c: c.infer(THREE, lambda i, _: places.append(i)), gone_s=60.0)
    assert time.monotonic() - begin >= 0.3
    assert (places, route.call_count) == ([1], 1)


def test_a_poisoned_server_is_not_waited_for(respx_mock: respx.MockRouter) -> None:
    """This is a 503 too, but waiting does not help."""
    route = respx_mock.post(f"{URL}/infer/").mock(return_value=error(ServerPoisonedError("sync failed")))
    with pytest.raises(ServerPoisonedError):
        use(infer)
    assert route.call_count == 1


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        (httpx.Response(404, text="not here"), ServerMismatchError),
        (httpx.Response(401, text="who?"), UnauthorizedError),
        (httpx.Response(500, text="Traceback"), ServerError),
    ],
)
def test_answers_of_something_else_name_the_status(
    respx_mock: respx.MockRouter, response: httpx.Response, wanted: type[ProjectError]
) -> None:
    """R16: not our error body (a proxy, another program): by status, with what it said."""
    respx_mock.post(f"{URL}/infer/").mock(return_value=response)
    with pytest.raises(wanted) as caught:
        use(infer)
    assert type(caught.value) is wanted
    assert f"HTTP {response.status_code}" in caught.value.found


def test_a_malformed_answer_names_server_and_field(respx_mock: respx.MockRouter) -> None:
    broken = output({"messages": [{"content": "request 1"}], "uuid": "u"}, 0)
    broken["rollout_infos"]["ver"] = "new"
    respx_mock.post(f"{URL}/infer/").respond(200, json=[broken])
    with pytest.raises(RolloutError) as caught:
        use(infer)
    assert URL in caught.value.what
    assert "0.rollout_infos.ver" in caught.value.found


def test_an_answer_that_is_no_json_is_a_rollout_error(respx_mock: respx.MockRouter) -> None:
    respx_mock.post(f"{URL}/infer/").respond(200, text="<html>")
    with pytest.raises(RolloutError, match="malformed"):
        use(infer)


@pytest.mark.parametrize("infer_timeout_s", [0.3, None, 0.0])
def test_a_swallowed_reply_is_given_up_while_health_answers(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch, infer_timeout_s: float | None
) -> None:
    """D16: the deadline holds whatever /health/ says; the error names server, age and phase. Nothing is repeated."""
    monkeypatch.setattr(replies, "MAX_INFER_S", 0.3)
    sent: list[httpx.Request] = []

    async def swallow(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return await forever(request)

    respx_mock.post(f"{URL}/infer/").mock(side_effect=swallow)
    respx_mock.get(f"{URL}/health/").respond(200)
    with pytest.raises(DeadlineError, match="infer_timeout_s") as caught:
        use(lambda c: asyncio.wait_for(infer(c), 20), infer_timeout_s=infer_timeout_s)
    assert URL in caught.value.what
    assert "0.3 s ago" in caught.value.found
    assert "waiting for the reply" in caught.value.found
    health_age = re.search(r"/health/ answered ([\d.]+) s ago", caught.value.found)
    assert health_age is not None
    assert float(health_age[1]) < 20
    assert "pace" in caught.value.wanted or infer_timeout_s
    assert len(sent) == 1


def test_bytes_that_trickle_in_do_not_move_the_deadline() -> None:
    """D16: also where no single read is slow. A real socket: one byte of the reply every 50 ms, for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" if b"infer" in path else OK)
        with contextlib.suppress(ConnectionError):
            while b"infer" in path:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = ServerClient(url, timeouts=Timeouts.of(2.0, 0.5))
        with pytest.raises(DeadlineError, match=url):
            await asyncio.wait_for(infer(client), 60)
        await client.aclose()
        server.close()

    asyncio.run(run())


def test_the_derived_deadline_follows_the_server_s_pace() -> None:
    """D16: from max_new_tokens and the rate that the server has shown, and never above ten minutes."""
    pace = replies.Pace()
    assert pace.deadline_s(512) == 600.0
    pace.saw(512, 32.0)  # 16 tokens per second
    assert pace.deadline_s(512) == pytest.approx(4 * 32.0)
    assert pace.deadline_s(64) == replies.MIN_INFER_S
    pace.saw(512, 64.0)  # the slowest counts
    assert pace.deadline_s(512) == pytest.approx(4 * 64.0)
    assert pace.deadline_s(10**6) == 600.0
    for _ in range(replies.PACE_CALLS):  # newer calls take its place
        pace.saw(512, 32.0)
    assert pace.deadline_s(512) == pytest.approx(4 * 32.0)


def test_a_quick_answer_shortens_the_deadline_of_the_next_call(respx_mock: respx.MockRouter) -> None:
    """D16: the pace is that of the longest answer, since its call was sent."""
    route = respx_mock.post(f"{URL}/infer/").mock(side_effect=answer)
    call = CALL.model_copy(update={"request_config": RequestConfig(max_tokens=8)})

    async def twice(client: ServerClient) -> None:
        await infer(client, call)
        await infer(client, call)

    use(twice, gone_s=240.0)
    limits = [one.request.extensions["timeout"]["read"] - client_module.REPLY_GRACE_S for one in route.calls]
    assert limits == [replies.MAX_INFER_S, replies.MIN_INFER_S]


@pytest.mark.parametrize(("infer_timeout_s", "read"), [(None, 610.0), (0.0, 610.0), (-1.0, 610.0), (7.0, 17.0)])
def test_the_four_timeouts_reach_httpx(
    respx_mock: respx.MockRouter, infer_timeout_s: float | None, read: float | None
) -> None:
    """R05, D16: all four are always there; the client's own deadline comes before httpx's."""
    route = respx_mock.post(f"{URL}/infer/").mock(side_effect=answer)
    use(infer, gone_s=240.0, infer_timeout_s=infer_timeout_s)
    timeouts = route.calls.last.request.extensions["timeout"]
    assert timeouts == {"connect": 10.0, "read": read, "write": 240.0, "pool": 240.0}


@pytest.mark.parametrize("timeout_s", [0.4, 3.0, 20.0, 3600.0])
def test_a_server_is_looked_at_several_times_before_it_is_gone(timeout_s: float) -> None:
    timeouts = Timeouts.of(timeout_s, None)
    assert timeouts.poll_s <= 5.0
    assert 4 * timeouts.poll_s <= timeouts.gone_s == timeout_s


def test_patience_is_short_where_others_can_answer() -> None:
    """Alone a server is waited for as long as the configuration says."""
    timeouts = Timeouts.of(600.0, None)
    assert timeouts.patience(has_others=False) == Patience(silent_s=600.0, broken_s=600.0, has_others=False)
    beside = timeouts.patience(has_others=True)
    assert beside.has_others
    assert beside.broken_s <= beside.silent_s < 600.0
    short = Timeouts.of(1.0, 0.5).patience(has_others=True)
    assert (short.silent_s, short.broken_s) == (0.5, 1.0)


def test_a_silent_server_without_infer_timeout_is_given_up_when_health_is_gone(respx_mock: respx.MockRouter) -> None:
    """A server that is gone is noticed before the deadline of its calls."""
    respx_mock.post(f"{URL}/infer/").mock(side_effect=forever)
    health = respx_mock.get(f"{URL}/health/").mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(ServerUnreachableError) as caught:
        use(infer)
    assert health.call_count >= 2
    assert "refused" in caught.value.found


def test_a_slow_server_that_is_alive_is_waited_for(respx_mock: respx.MockRouter) -> None:
    respx_mock.post(f"{URL}/infer/").mock(side_effect=answer_after(0.5))
    health = respx_mock.get(f"{URL}/health/").respond(200)
    assert use(infer, gone_s=0.2)[0].response_token_ids == [7]
    assert health.call_count >= 2


@pytest.mark.parametrize("infer_timeout_s", [None, slow(1.2)])
def test_a_pause_of_the_learner_itself_is_no_silence_of_the_server(
    respx_mock: respx.MockRouter, infer_timeout_s: float | None
) -> None:
    """Ctrl-Z and `fg`, or a machine that stood still: else all servers would be lost at once."""

    async def healthy(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.1)
        return httpx.Response(200)

    async def paused(client: ServerClient) -> list[RolloutOutput]:
        pause_soon(after_s=0.1, for_s=1.0)
        return await infer(client)

    respx_mock.post(f"{URL}/infer/").mock(side_effect=answer_after(1.6))
    respx_mock.get(f"{URL}/health/").mock(side_effect=healthy)
    assert use(paused, gone_s=0.4, infer_timeout_s=infer_timeout_s)[0].response_token_ids == [7]


@pytest.mark.parametrize(("gone_s", "read_s"), [(240.0, 5.0), (0.2, 0.2)])
def test_a_look_at_a_server_ends_soon(respx_mock: respx.MockRouter, gone_s: float, read_s: float) -> None:
    health = respx_mock.get(f"{URL}/health/").respond(200)
    use(lambda c: c.health(), gone_s=gone_s)
    assert health.calls.last.request.extensions["timeout"]["read"] == read_s


def test_a_quick_answer_costs_no_look_at_health(respx_mock: respx.MockRouter) -> None:
    """512 servers are not asked twice."""
    respx_mock.post(f"{URL}/infer/").mock(side_effect=answer_after(0.1))
    health = respx_mock.get(f"{URL}/health/").respond(200)
    assert use(infer, gone_s=0.8)[0].response_token_ids == [7]
    assert not health.called


@pytest.mark.parametrize(
    ("health", "wanted"),
    [
        ([httpx.Response(200)], DeadlineError),
        (httpx.ConnectError("refused"), ServerUnreachableError),
        (forever, ServerUnreachableError),
    ],
    ids=["slow", "gone", "silent"],
)
def test_a_late_server_is_looked_at_once_more_where_others_can_answer(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch, health: Any, wanted: type[ProjectError]
) -> None:
    """Whether it is slow or gone decides what the run does with it."""
    monkeypatch.setattr(client_module, "LAST_LOOK_S", 0.2)
    respx_mock.post(f"{URL}/infer/").mock(side_effect=forever)
    respx_mock.get(f"{URL}/health/").mock(side_effect=health)
    patience = Patience(silent_s=30.0, broken_s=1.0, has_others=True)
    with pytest.raises(wanted) as caught:
        use(lambda c: c.infer(CALL, lambda *_: None, patience), gone_s=60.0, infer_timeout_s=0.2)
    assert type(caught.value) is wanted


def test_server_gone_within_the_deadline(respx_mock: respx.MockRouter) -> None:
    """R16: the message names the way out."""
    respx_mock.post(f"{URL}/infer/").mock(side_effect=httpx.ConnectError("refused"))
    respx_mock.get(f"{URL}/health/").mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(ServerUnreachableError) as caught:
        use(infer)
    assert "vllm.mode: colocate" in caught.value.remedy
    assert "rollout_backend: hf" in caught.value.remedy


def test_a_broken_connection_to_a_living_server_is_another_error(respx_mock: respx.MockRouter) -> None:
    respx_mock.post(f"{URL}/infer/").mock(side_effect=httpx.RemoteProtocolError("disconnected"))
    respx_mock.get(f"{URL}/health/").respond(200)
    with pytest.raises(ServerError) as caught:
        use(infer)
    assert type(caught.value) is ServerError


def test_a_weight_update_is_never_repeated(respx_mock: respx.MockRouter) -> None:
    route = respx_mock.post(f"{URL}/update_weights/").mock(
        return_value=error(ServerBusyError("busy"), {"Retry-After": "0"})
    )
    with pytest.raises(ServerBusyError):
        use(lambda c: c.update_weights(UPDATE), gone_s=2.0)
    assert route.call_count == 1


WEIGHT_CALLS: dict[str, Callable[[ServerClient, Patience | None], Awaitable[object]]] = {
    "init_communicator": lambda c, patience: c.init_communicator(INIT, patience),
    "update_weights": lambda c, patience: c.update_weights(UPDATE, patience),
}


@pytest.mark.parametrize("name", WEIGHT_CALLS)
def test_weights_are_sent_to_the_only_server_with_the_patience_of_the_configuration(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server's own deadline comes before the client's."""
    monkeypatch.setattr(client_module, "SILENT_S", 0.1)  # the patience where others can answer
    reply: dict[str, Any] = {"ver": 1, "num_bytes": 8, "num_tensors": 1, "seconds": 0.5}
    if name == "update_weights":
        scores = {"ver": 1, "logprobs": [], "prompt_token_ids": []}
        reply |= {"drain_s": 0.0, "scores": scores}

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.5)
        return httpx.Response(200, json=reply)

    route = respx_mock.post(f"{URL}/{name}/").mock(side_effect=slow)
    respx_mock.get(f"{URL}/health/").mock(side_effect=httpx.ConnectError("refused"))
    found: Any = use(lambda c: WEIGHT_CALLS[name](c, None), gone_s=60.0)
    assert name == "init_communicator" or (found.ver, found.num_bytes) == (1, 8)
    assert route.calls.last.request.extensions["timeout"]["read"] == 20.0 + client_module.REPLY_GRACE_S


@pytest.mark.parametrize("name", WEIGHT_CALLS)
def test_weights_wait_no_longer_for_a_server_than_the_caller_s_patience(
    respx_mock: respx.MockRouter, name: str
) -> None:
    respx_mock.post(f"{URL}/{name}/").mock(side_effect=forever)
    respx_mock.get(f"{URL}/health/").mock(side_effect=httpx.ConnectError("refused"))
    patience = Patience(silent_s=0.2, broken_s=0.2, has_others=True)
    began = time.monotonic()
    with pytest.raises(ServerUnreachableError, match=URL):
        use(lambda c: WEIGHT_CALLS[name](c, patience), gone_s=600.0)
    assert time.monotonic() - began < 30


def test_waiting_for_a_server_that_is_still_starting(respx_mock: respx.MockRouter) -> None:
    health = respx_mock.get(f"{URL}/health/").mock(
        side_effect=[httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200)]
    )
    use(lambda c: c.wait_healthy(), gone_s=2.0)
    assert health.call_count == 3


def test_a_server_that_is_starting_is_asked_with_pauses(respx_mock: respx.MockRouter) -> None:
    """A wait looks about four times in its time, not as often as the network allows."""
    health = respx_mock.get(f"{URL}/health/").respond(503)
    with pytest.raises(ServerUnreachableError):
        use(lambda c: c.wait_healthy(), gone_s=0.4)
    assert 2 <= health.call_count <= 8


def test_waiting_ends_at_once_where_the_answer_is_final(respx_mock: respx.MockRouter) -> None:
    health = respx_mock.get(f"{URL}/health/").respond(404)
    with pytest.raises(ServerMismatchError, match="base_url"):
        use(lambda c: c.wait_healthy(), gone_s=60.0)
    assert health.call_count == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://rollout.invalid", "https://rollout.invalid"])
def test_a_proxy_of_the_environment_sees_no_call(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """It would see the token."""

    async def ask() -> None:
        client = ServerClient(url, timeouts=Timeouts.of(1.0, None), token="geheim")
        with pytest.raises(ServerUnreachableError):
            await client.status()
        await client.aclose()

    with watched_proxy(monkeypatch) as asked:
        asyncio.run(ask())
    assert asked == []


@pytest.mark.parametrize("path", ["/status/", "/infer/"])
def test_a_packed_answer_is_refused_before_it_is_unpacked(path: str) -> None:
    """It could grow a thousandfold."""
    with respx.mock:
        sent = respx.route().respond(200, content=BOMB, headers={"Content-Encoding": "gzip"})
        with pytest.raises(RolloutError, match="Content-Encoding"):
            use(lambda client: client.status() if path == "/status/" else client.infer(CALL, lambda i, output: None))
        assert sent.calls[0].request.headers["accept-encoding"] == "identity"


def test_ready_is_another_question_than_healthy(respx_mock: respx.MockRouter) -> None:
    respx_mock.get(f"{URL}/health/").respond(200)
    ready = respx_mock.get(f"{URL}/ready/").mock(side_effect=[httpx.Response(200), httpx.Response(503)])
    use(lambda c: c.ready())
    with pytest.raises(ServerBusyError):
        use(lambda c: c.ready())
    assert ready.call_count == 2


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"Retry-After": "3"}, 3.0), ({"Retry-After": "0"}, 0.01), ({"Retry-After": "Wed, 21 Oct 2026"}, 1.0), ({}, 1.0)],
)
def test_a_busy_server_says_when_to_ask_again(headers: dict[str, str], seconds: float) -> None:
    """A date or nothing: after a second. Never at once."""
    assert replies.retry_after_s(httpx.Response(503, headers=headers)) == seconds


@pytest.mark.parametrize("number", [99, 101])
def test_an_answer_may_be_no_longer_than_allowed(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLY_BYTES", 100)
    respx_mock.get(f"{URL}/health/").respond(200, content=b"x" * number)
    if number <= 100:
        use(lambda c: c.health())
        return
    with pytest.raises(RolloutError, match="/health/ is too long") as caught:
        use(lambda c: c.health())
    assert caught.value.found == "more than 100 bytes"
    assert URL in caught.value.what


def test_scores_are_asked_for_again_of_a_busy_server(respx_mock: respx.MockRouter) -> None:
    busy = error(ServerBusyError("draining"), {"Retry-After": "0.02"})
    reply = {"ver": 3, "logprobs": [[-0.5, -1.0]], "prompt_token_ids": [[1]]}
    route = respx_mock.post(f"{URL}/score/").mock(side_effect=[busy, httpx.Response(200, json=reply)])
    call = ScoreCall(items=[ScoreItem(request=CALL.infer_requests[0], response_token_ids=[7, 8])])
    found = use(lambda c: c.score(call), gone_s=60.0)
    assert (found.ver, found.logprobs, found.prompt_token_ids) == (3, [[-0.5, -1.0]], [[1]])
    assert json.loads(route.calls.last.request.content)["items"][0]["response_token_ids"] == [7, 8]
