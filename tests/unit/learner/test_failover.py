"""Servers that die, freeze, come back, join and leave while rollouts and syncs go on (D15, R40).

Real server processes above an engine without a model (`bench.chaos_server`), over real HTTP and real groups. An
answer's tokens name its request, its seed and the weights that made it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import chaos_server
from bench.chaos_server import NAN_TOKEN, fingerprint, logprobs
from learner.data.batches import Batches, ShareReader
from learner.data.encoding import LocalPool
from learner.data.sampler import sampler_of
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import EncodedPrompt, Segment, ServerChange
from learner.rollout import client
from learner.rollout.backend import MicroStep
from learner.rollout.control import Discovery, ServerControl, ServerRequest, ask, read_state
from learner.rollout.server_backend import ServerBackend
from learner.steps.ahead import Stage2Ahead
from learner.steps.packing import CompleteRows
from learner.steps.segments import SegmentSource
from learner.steps.shares import Bounds
from learner.steps.stage2 import Stage2Parts
from learner.sync import fitness
from learner.sync.canary import CanaryItem
from shared.addresses import free_port
from shared.errors import DeadlineError, ProjectError, ServerError
from shared.seeds import request_seed
from tests.syncs import ONE_RANK, server_sync
from tests.tiers import slow
from tests.unit.learner.data.fakes import CountingEncoder, make_run
from tests.unit.learner.rollout.fakes import config, sample
from tests.unit.learner.steps.fakes import segment
from tests.unit.learner.sync.fakes import Weights
from tests.unit.learner.trainer_world import Meeting, ThreadRanks
from tests.waits import DEADLINE_S, wait_until

INFER_TIMEOUT_S, SYNC_TIMEOUT_S = 2.0, 60.0


class Server:
    """One server process, forked from one that has imported what it needs."""

    _context = get_context("forkserver")
    _context.set_forkserver_preload(["bench.chaos_server"])

    def __init__(self) -> None:
        self.port, self.group_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._process: BaseProcess = self._context.Process(target=chaos_server.serve, args=(self.port,), daemon=True)
        self._process.start()

    def signal(self, signum: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signum)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(60)

    def wait_ready(self) -> None:
        wait_until(lambda: _answers(self.url))


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/", trust_env=False, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


class Learner:
    """Rollouts and syncs of one rank, without a policy."""

    def __init__(
        self,
        servers: list[Server],
        *,
        ranks: Ranks = ONE_RANK,
        min_servers: int | str = 1,
        infer_timeout_s: float = INFER_TIMEOUT_S,
        timeout_s: float = SYNC_TIMEOUT_S,
        control: ServerControl | None = None,
    ) -> None:
        self.weights = Weights()
        limits = {"timeout_s": timeout_s, "infer_timeout_s": infer_timeout_s, "min_servers": min_servers}
        section = config([server.url for server in servers], decode_batch_size=4, **limits)
        entries = [
            entry.model_copy(update={"group_port": server.group_port})
            for entry, server in zip(section.vllm.server.servers or (), servers, strict=True)
        ]
        vllm = section.vllm.model_copy(
            update={
                "server": section.vllm.server.model_copy(update={"servers": entries}),
                "sync": section.vllm.sync.model_copy(update={"bucket_bytes": 400}),
            }
        )
        place: dict[str, Any] = {"run_seed": 1, "rank": ranks.rank, "num_ranks": ranks.world_size}
        self.backend = ServerBackend(section.model_copy(update={"vllm": vllm}), **place)
        self.backend.connect()
        prompt = EncodedPrompt(token_ids=(1,), vision=None)
        canary = [CanaryItem(sample=sample(0), prompt=prompt, response_token_ids=(3, 4))]
        self.sync = server_sync(
            self.backend,
            self.weights,
            canary,
            lambda: [logprobs(self.weights.tensors, [3, 4])],
            config=vllm,
            ranks=ranks,
            control=control,
        )

    def synced(self) -> int:
        """Train, and sync; the version."""
        self.weights.step()
        return self.sync.sync().ver

    def roll_out(self, number: int, *, step: int = 0, after_first: Callable[[], None] = lambda: None) -> None:
        """Roll out, and check that all rollouts come, each by its own seed and the weights that were synced last."""
        window = [MicroStep(samples=[sample(i) for i in range(number)], micro_step_idx=0, first_req_idx=0)]
        found = {}
        with closing(self.backend.stream(window, global_step=step)) as rollouts:
            for place, rollout in rollouts:
                assert place not in found, "a request was answered twice"
                found[place] = rollout.response_token_ids
                if len(found) == 1:
                    after_first()
        wanted = fingerprint(self.weights.tensors)
        seeds = [request_seed(run_seed=1, global_step=step, micro_step_idx=0, req_idx=i) for i in range(number)]
        assert [found[i] for i in range(number)] == [(i, seed, wanted) for i, seed in enumerate(seeds)]

    @property
    def serving(self) -> list[str]:
        return [member.base_url for member in self.backend.membership.serving]

    def changes(self) -> list[tuple[str, str]]:
        return [_told(change) for change in self.sync.agree()]

    def close(self) -> None:
        self.sync.close()
        self.backend.close()


def _told(change: ServerChange) -> tuple[str, str]:
    return change.base_url, change.what


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Server]]:
    servers = [Server() for _ in range(3)]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def servers(processes: list[Server]) -> list[Server]:
    """Return all three, running and ready, whatever a test before has done to them."""
    for server in processes:
        server.signal(signal.SIGCONT) if server._process.is_alive() else server.start()
    for server in processes:
        server.wait_ready()
    return processes


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for servers that are killed or frozen: these do not come back by themselves."""
    monkeypatch.setattr(client, "BROKEN_S", 0.5)
    monkeypatch.setattr(client, "LAST_LOOK_S", 1.0)
    monkeypatch.setattr(fitness, "LAST_LOOK_S", 1.0)


@pytest.fixture
def learner(servers: list[Server]) -> Iterator[Learner]:
    with closing(Learner(servers)) as made:
        assert made.synced() >= 1
        yield made


@pytest.mark.parametrize("signum", [signal.SIGKILL, slow(signal.SIGSTOP)])
def test_a_server_lost_in_the_middle_of_a_step(servers: list[Server], learner: Learner, signum: int) -> None:
    """Its requests go to the others with the same seeds; the next sync goes to the others; the version rises."""
    urls = [server.url for server in servers]
    before = learner.backend.membership.served
    learner.roll_out(60, after_first=lambda: servers[1].signal(signum))
    assert before is not None
    # rises by two if it had answered all of its requests: then the sync finds the loss
    assert learner.synced() > before.ver
    learner.roll_out(12, step=1)
    assert learner.serving == [urls[0], urls[2]]
    assert learner.changes() == [(urls[1], "lost")]


@pytest.mark.parametrize("signum", [slow(signal.SIGKILL), signal.SIGSTOP])
def test_a_server_lost_before_a_sync_comes_back(servers: list[Server], learner: Learner, signum: int) -> None:
    """The sync is repeated without it. Once it is ready again, or a new process is, it serves after a full sync."""
    urls = [server.url for server in servers]
    servers[0].signal(signum)
    begin, before = time.monotonic(), learner.sync.ver
    assert learner.synced() > before
    assert time.monotonic() - begin < SYNC_TIMEOUT_S
    assert learner.serving == urls[1:]
    learner.roll_out(12)
    if signum == signal.SIGSTOP:
        servers[0].signal(signal.SIGCONT)
    else:
        servers[0]._process.join(60)
        servers[0].start()
    servers[0].wait_ready()
    wait_until(lambda: not learner.sync._delivery.is_current())  # it was seen
    learner.synced()
    learner.roll_out(12, step=2)
    assert learner.serving == urls
    assert learner.changes() == [(urls[0], "lost"), (urls[0], "joined")]


@pytest.mark.slow
@pytest.mark.parametrize("min_servers", [1, "all"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_servers_that_are_all_silent_are_waited_for(servers: list[Server], signum: int, min_servers: int | str) -> None:
    """R16: the wait lasts until the deadline that it names, `timeout_s`, and not until one connection was refused."""
    with closing(Learner(servers[:2], min_servers=min_servers)) as learner:
        learner.synced()
        for server in servers[:2]:
            server.signal(signum)

        def come_back() -> None:
            for server in servers[:2]:
                server.signal(signal.SIGCONT) if signum == signal.SIGSTOP else server.kill()
                if signum == signal.SIGKILL:
                    server.start()

        back = threading.Timer(3.0, come_back)
        back.start()
        learner.synced()
        back.join()
        assert learner.serving
        learner.roll_out(4)


def test_servers_that_stay_silent_end_the_run_at_the_deadline(servers: list[Server]) -> None:
    with closing(Learner(servers[:2], timeout_s=3.0)) as learner:
        learner.synced()
        for server in servers[:2]:
            server.kill()
        began = time.monotonic()
        with pytest.raises(ServerError, match="too few"):
            learner.synced()
        assert time.monotonic() - began > 2.5


@pytest.mark.slow
def test_a_server_frozen_in_the_group_that_another_one_joined(servers: list[Server]) -> None:
    """When that group was opened, one server alone was serving. It is not the only one any more."""
    with closing(Learner(servers[:2])) as learner:
        learner.synced()
        servers[1].kill()
        learner.synced()
        assert learner.serving == [servers[0].url]
        servers[1].start()
        servers[1].wait_ready()
        wait_until(lambda: not learner.sync._delivery.is_current())  # it was seen
        learner.synced()
        assert learner.serving == [servers[0].url, servers[1].url]
        servers[0].signal(signal.SIGSTOP)
        began = time.monotonic()
        learner.synced()
        assert time.monotonic() - began < SYNC_TIMEOUT_S
        assert learner.serving == [servers[1].url]
        learner.roll_out(4)


def test_a_server_killed_while_buckets_travel(servers: list[Server], learner: Learner) -> None:
    """Nobody serves mixed weights: the others get the whole update again, in a group without it."""

    def killing(dtype: Any = None) -> Iterator[tuple[str, Any]]:
        for i, (name, tensor) in enumerate(learner.weights.tensors.items()):
            if i == 2:
                servers[2].kill()
            yield name, tensor

    whole = learner.weights.named_weights
    learner.weights.named_weights = killing  # type: ignore[method-assign]
    learner.synced()
    learner.weights.named_weights = whole  # type: ignore[method-assign]
    learner.roll_out(12)
    assert learner.serving == [server.url for server in servers[:2]]


def test_a_server_that_answers_garbage(servers: list[Server], learner: Learner) -> None:
    """It says that it is well, and each answer is nonsense. The others take its requests, with the same seeds."""
    urls = [server.url for server in servers]
    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense, bind_and_activate=False) as garbage:

        def replace_it() -> None:
            servers[1].kill()
            garbage.server_address = ("127.0.0.1", servers[1].port)
            garbage.server_bind()
            garbage.server_activate()
            threading.Thread(target=garbage.serve_forever, daemon=True).start()

        learner.roll_out(60, after_first=replace_it)
        learner.synced()
        learner.roll_out(12, step=1)
        assert learner.serving == [urls[0], urls[2]]
        assert learner.changes()[0] == (urls[1], "lost")
        garbage.shutdown()


class Nonsense(BaseHTTPRequestHandler):
    """200, whatever is asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        body = b'{"index": 0, "output": {"nonsense": [1, 2]}}\n'
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_server_that_is_poisoned_in_the_middle_of_a_step(servers: list[Server], learner: Learner) -> None:
    """A log-probability that is no number: it refuses all requests from then on, and the next sync heals it."""
    urls = [server.url for server in servers]
    turn = {"role": "user", "content": "canary 0"}
    call = {"items": [{"request": {"messages": [turn]}, "response_token_ids": [NAN_TOKEN]}]}

    def poison() -> None:
        assert httpx.post(f"{urls[1]}/score/", json=call, trust_env=False, timeout=60.0).is_error

    learner.roll_out(60, after_first=poison)
    assert learner.changes() == [(urls[1], "lost")]
    learner.roll_out(12, step=1)
    assert learner.serving == [urls[0], urls[2]]
    wait_until(lambda: urls[1] in [member.base_url for member in learner.sync._delivery.members.to_reach()])
    learner.synced()
    learner.roll_out(12, step=2)
    assert learner.serving == urls


def test_a_bad_bucket_is_sent_again(servers: list[Server], learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: a bit flips on the way. All three go on."""
    from learner.sync import broadcast_groups

    broadcast, spoiled = broadcast_groups.ServerGroups.broadcast, []

    def flip_once(self: Any, bucket: Any) -> Any:
        if not spoiled:
            spoiled.append(True)
            bucket[0] ^= 1
        return broadcast(self, bucket)

    monkeypatch.setattr(broadcast_groups.ServerGroups, "broadcast", flip_once)
    learner.synced()
    learner.roll_out(12)
    assert spoiled
    assert len(learner.serving) == 3


def test_servers_are_added_and_removed(servers: list[Server], tmp_path: Path) -> None:
    """R40: both at a step's end; the added one serves after the next sync."""
    urls = [server.url for server in servers]
    with closing(Learner(servers[:2], control=ServerControl(tmp_path))) as learner:
        learner.synced()
        learner.roll_out(6)
        ask(tmp_path, ServerRequest(action="add", base_url=urls[2], group_port=servers[2].group_port))
        ask(tmp_path, ServerRequest(action="remove", base_url=urls[0]))
        assert learner.changes() == [(urls[0], "removed"), (urls[2], "added")]
        assert learner.serving == [urls[1]]
        learner.roll_out(6, step=1)
        wait_until(lambda: urls[2] in [member.base_url for member in learner.sync._delivery.members.to_reach()])
        learner.synced()
        learner.roll_out(6, step=2)
        assert learner.changes() == [(urls[2], "joined")]
        assert [(s["base_url"], s["state"]) for s in read_state(tmp_path)["servers"]] == [
            (urls[1], "serving"),
            (urls[2], "serving"),
        ]


def test_servers_appear_in_a_list_and_disappear_from_it(servers: list[Server], tmp_path: Path) -> None:
    """R40: as if a user had added and removed them. Those that the list never named stay."""
    urls, listed = [server.url for server in servers], tmp_path / "servers"
    listed.write_text(f"{urls[1]}\n{urls[2]} {servers[2].group_port}\n")
    discovery = Discovery(str(listed), every_s=0.01)
    with closing(Learner(servers[:2], control=ServerControl(tmp_path, discovery))) as learner:
        learner.synced()
        wait_until(lambda: learner.changes() == [(urls[2], "added")])
        wait_until(lambda: urls[2] in [member.base_url for member in learner.sync._delivery.members.to_reach()])
        learner.synced()
        learner.roll_out(6)
        assert learner.serving == urls
        listed.write_text(f"{urls[2]} {servers[2].group_port}  # the other one is drained\n")
        wait_until(lambda: (urls[1], "removed") in learner.changes())
        learner.synced()
        learner.roll_out(6, step=1)
        assert learner.serving == [urls[0], urls[2]]


def test_a_server_under_a_second_url_does_not_join_twice(servers: list[Server], tmp_path: Path) -> None:
    alias = servers[1].url.replace("127.0.0.1", "localhost")
    with closing(Learner(servers[:2], control=ServerControl(tmp_path))) as learner:
        learner.synced()
        ask(tmp_path, ServerRequest(action="add", base_url=alias, group_port=servers[1].group_port))
        assert learner.changes() == [(alias, "added")]
        wait_until(lambda: alias in [member.base_url for member in learner.sync._delivery.members.to_reach()])
        learner.synced()
        learner.roll_out(6)
        assert learner.serving == [server.url for server in servers[:2]]
        assert "already" in learner.backend.membership.out[0].because


@pytest.mark.slow
@pytest.mark.parametrize(("min_servers", "wanted"), [("all", DeadlineError), (3, ServerError)])
def test_too_few_servers_end_the_run(servers: list[Server], min_servers: int | str, wanted: type[ProjectError]) -> None:
    with closing(Learner(servers, min_servers=min_servers, infer_timeout_s=1.0)) as learner:
        learner.synced()
        with pytest.raises(wanted, match=servers[1].url):
            learner.roll_out(60, after_first=servers[1].kill)


def test_a_loss_that_one_rank_sees_is_every_rank_s_at_the_next_agreement(servers: list[Server]) -> None:
    meeting = Meeting(2)
    learners: list[Learner] = []
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            with closing(Learner(servers, ranks=ThreadRanks(rank=rank, world_size=2, meeting=meeting))) as learner:
                learners.append(learner)
                learner.synced()
                if rank == 1:
                    learner.roll_out(40, after_first=servers[1].kill)
                meeting.exchange(rank, None)
                learner.changes()
                assert learner.serving == [servers[0].url, servers[2].url]
                learner.synced()
                learner.roll_out(20, step=1)
        except BaseException as error:
            errors.append(error)
            meeting.fail()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert {learner.backend.membership for learner in learners} == {learners[0].backend.membership}


# ---- rollouts ahead of learning ------------------------------------------------------------------------------------

PER_SHARE, NUM_SHARES, NUM_EPOCHS = 48, 3, 2
Told = tuple[int, int]  # a request's number and its seed, as the answer's tokens name them


class ServedSegments(SegmentSource):
    """Rollouts of real servers. `during`: what happens while the share of that step is rolled out."""

    channel = "B"
    needs_rollouts = True

    def __init__(self, learner: Learner, during: dict[int, Callable[[], None]]) -> None:
        self._learner, self._during = learner, during
        self.weights: dict[int, int] = {}  # fingerprints by version
        self.told: dict[tuple[int, str], Told] = {}

    def segments(
        self, step: MicroStep, prompts: Sequence[EncodedPrompt], *, global_step: int, clock: PhaseClock
    ) -> list[Segment]:
        if happens := self._during.pop(global_step, None):
            threading.Timer(0.05, happens).start()
        [rollouts] = self._learner.backend.generate_window([step], global_step=global_step)
        for rollout in rollouts:
            number, seed, weights = rollout.response_token_ids
            assert rollout.ver is not None
            assert (seed, weights) == (rollout.seed, self.weights[rollout.ver]), "other weights than those synced"
            self.told[global_step, rollout.sample.sample_id] = (number, seed)
        return [segment(rollout.sample.sample_id, rollout.ver) for rollout in rollouts]


def learn_ahead(learner: Learner, during: dict[int, Callable[[], None]]) -> dict[tuple[int, str], Told]:
    """Learn two epochs of Channel-B, each share rolled out ahead of its step. All samples are learned once per
    epoch."""
    samples = [sample(i) for i in range(PER_SHARE * NUM_SHARES)]
    settings, plan = make_run(samples_per_rank=PER_SHARE)
    place: dict[str, Any] = {"config": settings, "plan": plan, "rank": 0}
    rollouts = ServedSegments(learner, during)
    parts = Stage2Parts(
        b_ratio=1.0,
        packs_per_step=PER_SHARE // 4,
        ranks=ONE_RANK,
        batches=Batches(samples, encoder=CountingEncoder(), **place),
        ground_truth=rollouts,  # is not asked
        rollouts=rollouts,
        row_maker=CompleteRows(16),
        clock=PhaseClock(),
    )
    source = Stage2Ahead(
        parts,
        ShareReader(samples, sampler_of(len(samples), **place), LocalPool(CountingEncoder())),
        bounds=Bounds(start_below=24, keep_at_most=36, version_window=1, max_update_lag=4),
        samples_per_pack=4,
        capacity=PER_SHARE,
        total_steps=NUM_SHARES * NUM_EPOCHS,
        max_starved_steps=20,
        deadline_s=DEADLINE_S,
    )
    learned: list[str] = []
    with closing(source):
        for step in range(NUM_SHARES * NUM_EPOCHS):
            if source.wants_sync(step):
                with source.fence() as fence:
                    learner.weights.step()
                    weights, ver = fingerprint(learner.weights.tensors), learner.sync.sync().ver
                    rollouts.weights[ver] = weights
                    fence.synced(ver, updates=step)
            wait_until(lambda at=step: bool(source._ready(at).complete))  # type: ignore[misc]
            assert source.begin(step) == "B"
            rows = [row for micro_step in source.micro_steps() for row in micro_step]
            learned += [part.sample_id for row in rows for part in row.segments]
            learner.changes()
        source.stop()
    epochs = [learned[i * len(samples) : (i + 1) * len(samples)] for i in range(NUM_EPOCHS)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(one.sample_id for one in samples)] * NUM_EPOCHS
    return rollouts.told


def test_a_server_killed_while_rollouts_run_ahead(servers: list[Server], learner: Learner) -> None:
    """Every sample has the seed that it has without the kill, and is learned once; a sync goes to the others."""
    undisturbed = learn_ahead(learner, {})
    assert learn_ahead(learner, {1: servers[1].kill, 4: servers[2].kill}) == undisturbed
    assert learner.serving == [servers[0].url]
