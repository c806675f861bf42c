"""`ServerBackend` over fake servers: distribution, seeds, order, versions, retries, logs (R07, R10-R16, R21, R30)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
import respx
from hypothesis import given
from hypothesis import strategies as st

from learner.config.sections.decoding import DecodingConfig
from learner.records import RolloutCallLog, Sample
from learner.rollout import client as client_module
from learner.rollout import server_backend
from learner.rollout.backend import MicroStep, Requests
from learner.rollout.requests import infer_request, request_config
from learner.rollout.server_backend import ServerBackend
from shared.aio import LoopThread
from shared.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    PromptTooLongError,
    RolloutError,
    ServerBusyError,
    ServerError,
    ServerMismatchError,
    ServerUnreachableError,
)
from shared.seeds import request_seed
from shared.wire import NDJSON, PROTOCOL_VERSION, ErrorBody, ServedWeights
from tests.unit.learner.rollout.fakes import FakeServer, config, error, output, sample, status

URLS = ["http://a.test/x", "http://b.test", "http://c.test"]
OWN = ("rank", "num_ranks", "token", "vocab_size", "on_call", "pixel_share")
Build = Callable[..., ServerBackend]


@pytest.fixture
def router() -> Iterator[respx.MockRouter]:
    with respx.mock(assert_all_called=False) as mock:
        yield mock


@pytest.fixture
def build(router: respx.MockRouter) -> Iterator[Build]:
    """Yield what makes a connected backend over the servers named; keyword arguments are split between config and
    constructor."""
    made: list[ServerBackend] = []

    def make(urls: list[str], *, connect: bool = True, **changes: Any) -> ServerBackend:
        own = {k: changes.pop(k) for k in OWN if k in changes}
        backend = ServerBackend(config(urls, **changes), run_seed=42, **own)
        made.append(backend)
        if connect:
            backend.connect()
        return backend

    yield make
    for backend in made:
        backend.close()
        backend.close()


def generate(backend: ServerBackend, n: int, *, first: int = 0, greedy: bool = False) -> list[int]:
    rollouts = backend.generate(
        [sample(i) for i in range(n)], global_step=7, micro_step_idx=3, first_req_idx=first, greedy=greedy
    )
    assert [r.sample.sample_id for r in rollouts] == [f"s{i}" for i in range(n)]
    return [r.response_token_ids[0] for r in rollouts]


def seed(req_idx: int) -> int:
    return request_seed(run_seed=42, global_step=7, micro_step_idx=3, req_idx=req_idx)


def test_requests_go_out_contiguously_with_seeds_and_come_back_in_order(router: respx.MockRouter, build: Build) -> None:
    """R07, R11: ceil(7/3) = 3, 3, 1; each call has the seed of its first request, counted over all ranks."""
    servers = [FakeServer(router, url) for url in URLS]
    logs: list[RolloutCallLog] = []
    assert generate(build(URLS, decode_batch_size=4, on_call=logs.append), 7, first=100) == list(range(7))
    assert [server.numbers() for server in servers] == [[[0, 1, 2]], [[3, 4, 5]], [[6]]]
    assert [server.seeds() for server in servers] == [[seed(100)], [seed(103)], [seed(106)]]
    assert {(c.base_url, c.seed, c.num_requests) for c in logs[0].calls} == {
        (URLS[0], seed(100), 3),
        (URLS[1], seed(103), 3),
        (URLS[2], seed(106), 1),
    }
    assert (logs[0].chunk, logs[0].num_requests, logs[0].splits, logs[0].ver) == (12, 7, [], 0)


def test_it_says_how_far_an_evaluation_is(
    router: respx.MockRouter, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that are learned say nothing: their step does."""
    monkeypatch.setattr(server_backend, "TELL_S", 0.0)
    FakeServer(router, URLS[0])
    backend, said = build(URLS[:1]), list[str]()
    backend.tell = said.append
    generate(backend, 3)
    assert said == []
    generate(backend, 3, greedy=True)
    assert said == [f"{i}/3 photographs answered" for i in (1, 2, 3)]


def test_no_requests_send_nothing(router: respx.MockRouter, build: Build) -> None:
    """R07: N = 0."""
    server = FakeServer(router, URLS[0])
    assert generate(build(URLS[:1]), 0) == []
    assert server.calls == []


def test_unequal_servers_and_two_ranks_keep_request_seeds(router: respx.MockRouter, build: Build) -> None:
    """R11: the same sample has the same seed under any number of ranks and servers."""
    servers = [FakeServer(router, URLS[0], world_size=1), FakeServer(router, URLS[1], world_size=3)]
    for rank in range(2):
        generate(build(URLS[:2], decode_batch_size=2, rank=rank, num_ranks=2), 4, first=4 * rank)
    seen = {}
    for server in servers:
        for call in server.calls:
            assert call["request_config"]["seed"] == call["infer_requests"][0]["seed"]
            seen |= dict.fromkeys([request["seed"] for request in call["infer_requests"]], server.base_url)
    assert sorted(seen) == [seed(i) for i in range(8)]
    assert [len(server.calls[0]["infer_requests"]) for server in servers] == [2, 2]


def test_a_window_is_sent_at_once_and_seeded_as_its_micro_steps_are(router: respx.MockRouter, build: Build) -> None:
    """R11: `generate_window` is distributed as one line of requests. A call may hold requests of several micro-steps,
    each with its own seed."""
    for url in URLS[:2]:
        FakeServer(router, url)
    sizes = (1, 0, 4, 3)
    samples = [sample(i) for i in range(sum(sizes))]
    window, start = [], 0
    for micro_step_idx, size in enumerate(sizes):
        own = samples[start : start + size]
        window.append(MicroStep(samples=own, micro_step_idx=micro_step_idx, first_req_idx=10 * micro_step_idx))
        start += size
    logs: list[RolloutCallLog] = []
    backend = build(URLS[:2], decode_batch_size=4, on_call=logs.append)
    rollouts = backend.generate_window(window, global_step=7)
    assert [[r.sample for r in part] for part in rollouts] == [step.samples for step in window]
    for micro_step, part in zip(window, rollouts, strict=True):
        place = {"global_step": 7, "micro_step_idx": micro_step.micro_step_idx}
        alone = backend.generate(micro_step.samples, first_req_idx=micro_step.first_req_idx, **place)
        assert [r.seed for r in part] == [r.seed for r in alone]
    assert (logs[0].num_requests, logs[0].num_micro_steps, logs[0].micro_step_idx) == (8, 4, 0)
    told = sorted((c.micro_step_idx, c.first_req_idx, c.num_requests) for c in logs[0].calls)
    assert told == [(0, 0, 4), (2, 23, 4)]
    assert backend.generate_window([replace(step, samples=[]) for step in window], global_step=7) == [[]] * 4


def test_world_sizes_are_asked_once_per_server(router: respx.MockRouter, build: Build) -> None:
    """R23."""
    servers = [FakeServer(router, url, world_size=2) for url in URLS]
    backend = build(URLS)
    for _ in range(3):
        generate(backend, 5)
    assert [server.sizes.call_count for server in servers] == [1, 1, 1]
    assert backend.world_sizes == (2, 2, 2)


def test_an_infeasible_cap_fails_at_connect(router: respx.MockRouter, build: Build) -> None:
    """R23."""
    FakeServer(router, URLS[0])
    with pytest.raises(ConfigError, match="decode_batch_size"):
        build(URLS[:1], num_ranks=2)


def test_more_requests_than_the_cap_are_refilled(router: respx.MockRouter, build: Build) -> None:
    """R21: decode_batch_size 4 on one GPU: in order, with their own seeds, as many as answers have come."""
    server = FakeServer(router, URLS[0])
    assert generate(build(URLS[:1], decode_batch_size=4), 10) == list(range(10))
    assert server.numbers() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert server.seeds() == [seed(0), seed(4), seed(8)]


def test_busy_then_success(router: respx.MockRouter, build: Build) -> None:
    """503 then success: one rollout per request, nothing split."""
    server = FakeServer(router, URLS[0])
    server.replies = [lambda call: error(ServerBusyError("draining"), {"Retry-After": "0.01"})]
    logs: list[RolloutCallLog] = []
    assert generate(build(URLS[:1], decode_batch_size=4, on_call=logs.append), 3) == [0, 1, 2]
    assert len(server.calls) == 2
    assert logs[0].splits == []


def test_busy_in_the_middle_of_a_stream(
    router: respx.MockRouter, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server had no memory for all images of a call: it keeps serving, and gets what is left again with the same
    seeds."""
    monkeypatch.setattr(client_module, "RETRY_AFTER_S", 0.01)
    server = FakeServer(router, URLS[0])

    def answer_one(call: dict[str, Any]) -> httpx.Response:
        middle = len(call["infer_requests"]) // 2
        asked = call["infer_requests"][middle]
        answered = output(asked, asked["seed"])
        busy = ErrorBody.of(ServerBusyError("too much memory")).model_dump()
        lines = [json.dumps({"index": middle, "output": answered}), json.dumps({"error": busy})]
        return httpx.Response(200, text="\n".join(lines), headers={"Content-Type": NDJSON})

    server.replies = [answer_one] * 2
    logs: list[RolloutCallLog] = []
    backend = build(URLS[:1], decode_batch_size=8, on_call=logs.append)
    assert generate(backend, 5) == list(range(5))
    assert server.numbers() == [[0, 1, 2, 3, 4], [0, 1], [3, 4], [0]]
    assert server.seeds() == [seed(0), seed(0), seed(3), seed(0)]
    assert logs[0].splits == [(3, 0, 4), (3, 0, 1)]


def test_timeout_then_split_and_retry(router: respx.MockRouter, build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """R30: a call that times out comes again in halves, with the same uuids and seeds, and both are logged."""
    server = FakeServer(router, URLS[0])

    def time_out(call: dict[str, Any]) -> httpx.Response:
        raise httpx.ReadTimeout("slow")

    server.replies = [time_out]
    logs: list[RolloutCallLog] = []
    backend = build(URLS[:1], decode_batch_size=8, infer_timeout_s=60.0, on_call=logs.append)
    assert generate(backend, 5, first=10) == list(range(5))
    assert server.numbers() == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4]]
    assert server.seeds() == [seed(10), seed(10), seed(12)]
    uuids = [[r["uuid"] for r in call["infer_requests"]] for call in server.calls]
    assert uuids[0] == uuids[1] + uuids[2]
    assert logs[0].splits == [(3, 10, 5)]
    assert ["did not answer in time" in call.error for call in logs[0].calls] == [True, False, False]
    assert all(0.0 <= call.seconds < 60.0 for call in logs[0].calls)
    assert "timed out" in caplog.text


def test_a_request_that_keeps_failing_ends_the_call(router: respx.MockRouter, build: Build) -> None:
    """R12, R30: nothing is skipped in silence."""
    server = FakeServer(router, URLS[0])

    def time_out_on_two(call: dict[str, Any]) -> httpx.Response | None:
        if 2 in [int(r["messages"][0]["content"].split()[-1]) for r in call["infer_requests"]]:
            raise httpx.ReadTimeout("slow")
        return None

    server.replies = [time_out_on_two] * 20
    logs: list[RolloutCallLog] = []
    with pytest.raises(DeadlineError):
        generate(build(URLS[:1], decode_batch_size=4, infer_timeout_s=60.0, on_call=logs.append), 4)
    assert logs[0].splits == [(3, 0, 4), (3, 2, 2)]


def test_a_wrong_request_is_not_sent_again(router: respx.MockRouter, build: Build) -> None:
    server = FakeServer(router, URLS[0])
    server.replies = [lambda call: error(PromptTooLongError("prompt of 9000 tokens"))]
    with pytest.raises(PromptTooLongError, match="9000"):
        generate(build(URLS[:1], decode_batch_size=4), 4)
    assert len(server.calls) == 1


def test_one_server_gone_ends_the_call_within_the_deadline(router: respx.MockRouter, build: Build) -> None:
    """R16: the other server's answers do not hide it."""
    servers = [FakeServer(router, url) for url in URLS[:2]]
    backend = build(URLS[:2], decode_batch_size=4, timeout_s=0.3)
    servers[1].health.mock(side_effect=httpx.ConnectError("refused"))
    servers[1].infer.mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(ServerUnreachableError, match=URLS[1]):
        generate(backend, 4)


def test_an_unreachable_server_fails_at_connect(router: respx.MockRouter, build: Build) -> None:
    """R16."""
    FakeServer(router, URLS[0]).health.mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(ServerUnreachableError, match="colocate"):
        build(URLS[:1], timeout_s=0.2)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, ServerMismatchError),
        ({"vocab_size": 511}, ServerMismatchError),
        ({"max_model_len": 512}, ConfigError),
    ],
)
def test_a_server_that_does_not_fit_fails_at_connect(
    router: respx.MockRouter, build: Build, changes: dict[str, Any], wanted: type[Exception]
) -> None:
    server = FakeServer(router, URLS[0])
    backend = build(URLS[:1], vocab_size=512, connect=False)
    server.status.respond(200, json=status(**changes))
    with pytest.raises(wanted, match=URLS[0]):
        backend.connect()


def _swap(outputs: list[Any]) -> list[Any]:
    return outputs[::-1]


def _drop(outputs: list[Any]) -> list[Any]:
    return outputs[1:]


def _reseed(outputs: list[Any]) -> list[Any]:
    outputs[0]["rollout_infos"]["seed"] += 1
    return outputs


def _abort(outputs: list[Any]) -> list[Any]:
    outputs[0]["response"]["choices"][0]["finish_reason"] = "abort"
    return outputs


def _no_prompt(outputs: list[Any]) -> list[Any]:
    outputs[1]["prompt_token_ids"] = []
    return outputs


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (_swap, "uuid"),
        (_drop, "answers"),
        (_reseed, "seed"),
        (_abort, "finish_reason"),
        (_no_prompt, "prompt_token_ids"),
    ],
)
def test_malformed_answers_are_retried_and_then_named(
    router: respx.MockRouter, build: Build, spoil: Callable[[list[Any]], list[Any]], field: str
) -> None:
    server = FakeServer(router, URLS[0])

    def spoiled(call: dict[str, Any]) -> httpx.Response:
        seed = call["request_config"]["seed"]
        return httpx.Response(200, json=spoil([output(r, seed + i) for i, r in enumerate(call["infer_requests"])]))

    backend = build(URLS[:1], decode_batch_size=4)
    server.replies = [spoiled]
    assert generate(backend, 2) == [0, 1]
    sound = spoil is _no_prompt  # its first answer is right, and is kept
    assert server.numbers() == ([[0, 1], [1]] if sound else [[0, 1], [0], [1]])

    def always(call: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json=spoil([output(call["infer_requests"][0], 0)] * 2)[:0])

    server.replies = [spoiled, always]
    with pytest.raises(RolloutError, match=URLS[0]):
        generate(backend, 2)
    logs: list[RolloutCallLog] = []
    backend._on_call = logs.append
    server.replies = [spoiled]
    generate(backend, 2)
    assert field in logs[0].calls[0].error


def test_rollouts_of_another_version_are_refused(router: respx.MockRouter, build: Build) -> None:
    """R10: the server was restarted or another learner wrote to it; asking again would not help."""
    server = FakeServer(router, URLS[0], ver=4)
    backend = build(URLS[:1], decode_batch_size=4)
    backend.adopt(replace(backend.membership, served=ServedWeights(ver=5, incarnation="", weights="")))
    with pytest.raises(ServerMismatchError, match="ver 4; wanted ver 5"):
        generate(backend, 2)
    assert len(server.calls) == 1
    backend.adopt(replace(backend.membership, served=ServedWeights(ver=4, incarnation="", weights="")))
    assert generate(backend, 2) == [0, 1]


def test_before_the_first_sync_all_servers_must_agree(router: respx.MockRouter, build: Build) -> None:
    """One `generate` is one version."""
    for i, url in enumerate(URLS[:2]):
        FakeServer(router, url, ver=i)
    with pytest.raises(ServerMismatchError, match="different weight versions"):
        generate(build(URLS[:2], decode_batch_size=4), 2)


def test_what_a_request_holds(router: respx.MockRouter, build: Build) -> None:
    """R13, R14, R29: messages, image strings and decoding, nothing of the target."""
    server = FakeServer(router, URLS[0])
    decoding = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 64, "repetition_penalty": 1.1}
    backend = build(URLS[:1], decoding=decoding)
    generate(backend, 1)
    generate(backend, 1, greedy=True)
    request = server.calls[0]["infer_requests"][0]
    assert request["messages"] == [{"role": "user", "content": "<image>request 0"}]
    assert request["images"] == ["/data/0.png"]
    assert request["data_dict"] == {}
    sampled, greedy = (call["request_config"] for call in server.calls)
    assert sampled["max_tokens"] == greedy["max_tokens"] == 64
    assert (sampled["temperature"], sampled["top_p"], sampled["top_k"]) == (0.7, 0.9, 20)
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, -1)
    assert sampled["repetition_penalty"] == greedy["repetition_penalty"] == 1.1


@pytest.mark.parametrize(
    ("mode", "temperature", "wanted"),
    [(None, 0.0, 0.0), (None, 0.5, 0.5), ("greedy", 0.5, 0.0), ("sample", 0.5, 0.5), ("sample", 0.0, None),
     ("beam", 0.0, None)],
)  # fmt: skip
def test_decode_modes(mode: Any, temperature: float, wanted: float | None) -> None:
    """R29: temperature above 0 samples; beam search is not to be had from a server."""
    decoding = DecodingConfig(decode_mode=mode, temperature=temperature)
    if wanted is None:
        with pytest.raises(ConfigError, match="decode_mode"):
            request_config(decoding)
    else:
        assert request_config(decoding).temperature == wanted


def test_a_message_that_cannot_travel_names_the_sample(router: respx.MockRouter, build: Build) -> None:
    FakeServer(router, URLS[0])
    wrong = Sample(
        sample_id="odd", messages=({"role": "tool", "content": "x"},), images=(), objects=(), width=1, height=1
    )
    with pytest.raises(DataError, match="odd"):
        build(URLS[:1]).generate([wrong], global_step=0, micro_step_idx=0, first_req_idx=0)


def test_d16_a_swallowed_reply_is_a_failed_call_that_is_sent_again(router: respx.MockRouter, build: Build) -> None:
    """The server answers /health/ all the while. The halves carry the same uuids, and all samples get their rollout."""
    server = FakeServer(router, URLS[0])
    uuids: list[set[str]] = []

    async def swallow_the_first(request: httpx.Request) -> httpx.Response:
        uuids.append({one["uuid"] for one in json.loads(request.content)["infer_requests"]})
        if len(uuids) == 1:
            await asyncio.sleep(60)
        return server._infer(request)

    server.infer.mock(side_effect=swallow_the_first)
    logs: list[RolloutCallLog] = []
    backend = build(URLS[:1], decode_batch_size=4, infer_timeout_s=0.3, on_call=logs.append)
    assert generate(backend, 4) == list(range(4))
    assert [len(one) for one in uuids] == [4, 2, 2]
    assert uuids[1] | uuids[2] == uuids[0]
    (late,) = [call for call in logs[0].calls if call.error]
    assert URLS[0] in late.error
    assert "waiting for the reply" in late.error
    assert logs[0].splits == [(3, 0, 4)]


# ---- rollouts as they end ------------------------------------------------------------------------------------------


def window_of(n: int) -> list[MicroStep]:
    return [MicroStep(samples=[sample(i) for i in range(n)], micro_step_idx=3, first_req_idx=0)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_only_what_is_learned_asks_for_pixels(router: respx.MockRouter, build: Build, share: float) -> None:
    """R48: neither greedy answers nor those at another temperature, streamed or not."""
    server = FakeServer(router, URLS[0])
    backend = build(URLS[:1], pixel_share=share)
    hows: list[dict[str, Any]] = [{}, {"greedy": True}, {"temperature": 1.0}]
    for how in hows:
        backend.generate_window(window_of(1), global_step=7, **how)
    for how in hows[:2]:
        list(backend.stream(window_of(1), global_step=7, **how))
    asked = [call["infer_requests"][0].get("pixels", False) for call in server.calls]
    assert asked == [share > 0, False, False, share > 0, False]


def test_rollouts_are_handed_on_as_they_end(router: respx.MockRouter, build: Build) -> None:
    """D9: those of the fast server before the slow one has answered; the whole of it is `generate_window`."""
    slow, fast = (FakeServer(router, url) for url in URLS[:2])
    go = threading.Event()

    async def wait(request: httpx.Request) -> httpx.Response:
        while not go.is_set():
            await asyncio.sleep(0.01)
        return slow._infer(request)

    slow.infer.mock(side_effect=wait)
    logs: list[RolloutCallLog] = []
    backend = build(URLS[:2], decode_batch_size=2, on_call=logs.append)
    ended = []
    for place, rollout in backend.stream(window_of(4), global_step=7):
        assert rollout.sample.sample_id == f"s{place}"
        ended.append(place)
        if len(ended) == 2:
            go.set()
    assert (ended[:2], sorted(ended)) == ([2, 3], [0, 1, 2, 3])
    assert [sorted(call.first_req_idx for call in log.calls) for log in logs] == [[0, 2]]
    whole = backend.generate_window(window_of(4), global_step=7)
    assert [rollout.seed for rollout in whole[0]] == [seed(i) for i in range(4)]
    assert len(fast.calls) == 2


def test_a_stream_can_be_given_up_from_another_thread(router: respx.MockRouter, build: Build) -> None:
    """The iteration ends without an error, and so do the calls under way."""
    server = FakeServer(router, URLS[0])
    began, cancelled = threading.Event(), threading.Event()

    async def never(request: httpx.Request) -> httpx.Response:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    server.infer.mock(side_effect=never)
    rollouts = build(URLS[:1], decode_batch_size=2).stream(window_of(2), global_step=7)
    ended: list[Any] = []
    iterating = threading.Thread(target=lambda: ended.extend(rollouts))
    iterating.start()
    assert began.wait(60.0)
    rollouts.close()
    iterating.join(60.0)
    assert not iterating.is_alive()
    assert cancelled.wait(60.0)
    assert ended == []


@given(
    run_seed=st.integers(0, 2**31),
    global_step=st.integers(0, 10**6),
    numbers=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    cuts=st.sets(st.integers(1, 20), max_size=4),
)
def test_a_seed_depends_on_the_run_the_step_and_the_request_only(
    run_seed: int, global_step: int, numbers: list[int], cuts: set[int]
) -> None:
    """R11: however many ranks share a step's requests, and however they are cut into calls, request `i` of the step has
    one seed, which it brings."""
    wanted = [request_seed(run_seed=run_seed, global_step=global_step, micro_step_idx=0, req_idx=i) for i in range(40)]
    first = 0
    for number in numbers:  # the ranks' shares
        step = MicroStep(samples=[sample(i) for i in range(number)], micro_step_idx=0, first_req_idx=first)
        asked = Requests.of([step], run_seed=run_seed, global_step=global_step)
        assert list(asked.seeds) == wanted[first : first + number]
        edges = sorted({0, number, *(cut for cut in cuts if cut < number)})
        for start, stop in pairwise(edges):
            calls = [infer_request(sample(i), seed=asked.seeds[i]).seed for i in range(start, stop)]
            assert calls == wanted[first + start : first + stop]
        first += number


def test_a_loop_that_is_closed_ends_what_still_runs() -> None:
    """A call in flight is cancelled, which is no error of the close."""
    loop = LoopThread("test-loop")
    assert loop._thread.daemon, "an interpreter that exits because of an error must not wait for an answer"
    waiting = loop.submit(asyncio.sleep(600))
    loop.run(asyncio.sleep(0))
    loop.close(10.0)
    assert loop.closed
    assert waiting.cancelled()
    loop.close(10.0)


def test_a_loop_that_is_closed_waits_for_what_a_call_does_at_its_end() -> None:
    loop, begun, ended = LoopThread("test-loop"), threading.Event(), threading.Event()

    async def call() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.2)
            ended.set()

    loop.submit(call())
    assert begun.wait(60.0)
    loop.close(60.0)
    assert ended.is_set()


def test_a_lost_server_is_left_out_while_enough_are_left(build: Build) -> None:
    """R16: the error says how many are missing, and which failed."""
    backend = build(URLS, connect=False, min_servers=2)
    gone = ServerUnreachableError("the rollout server does not answer")
    left = backend.lose(URLS[0], gone)
    assert [member.base_url for member in left.serving] == URLS[1:]
    assert backend.usable() == left
    with pytest.raises(ServerError, match="too few rollout servers") as caught:
        backend.lose(URLS[1], gone)
    assert caught.value.__cause__ is gone
    assert URLS[0] in caught.value.found
    assert URLS[1] in caught.value.found
    assert backend.lost().keys() == set(URLS[:2])
    backend.adopt(left, told=URLS[:1])
    assert backend.lost().keys() == {URLS[1]}, "the ranks have not agreed on it yet"


def test_a_server_that_may_not_be_lost_ends_the_run_with_its_error(build: Build) -> None:
    gone = ServerUnreachableError("the rollout server does not answer")
    for backend in (build(URLS, connect=False), build(URLS[:1], connect=False, min_servers=1)):
        with pytest.raises(ServerUnreachableError) as caught:
            backend.lose(URLS[0], gone)
        assert caught.value is gone
        assert backend.lost() == {}


def test_each_of_hundreds_of_servers_is_looked_at_less_often(build: Build) -> None:
    urls = [f"http://server-{i}.test" for i in range(320)]
    assert build(urls, connect=False, timeout_s=240.0).timeouts.poll_s == 10.0
