"""Attacks in number: `python -m bench.hostile --name NAME [--part PART] [--frames 1000000] [--cases 10000]`.

Frames are what a peer says at once on one connection, or one bucket on a connection that has joined. They are mutated:
hellos, sealed buckets, pickles, what other programs' sockets say, and noise.

- `strangers`: 90% of the frames, to the port where a weight group meets. Meanwhile honest ranks meet there again and
  again, and send a bucket.
- `members`: 5%, by a peer that has joined but cannot seal: a bucket is loaded only if its seal is right.
- `engine`: 5%, to the HTTP port of a real server, which answers `/infer/` meanwhile. Its other sockets are counted:
  those that other machines can reach, and those that another user of this machine can connect to. On CPU the second
  kind is gloo's, on loopback: gloo keeps every connection for ever, so no frames go there (SECURITY.md).
- `calls`: bodies that schemathesis draws from the schema of every call, right and wrong ones, to the real app over an
  engine that echoes.

Wanted: no hang (nothing honest takes longer than HANG_S), nothing unpickled, no forged bucket, no answer of 500 or
more. Prints a table, writes `bench/results/NAME.json`; the exit code is 1 if a figure misses its bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer
from rich.console import Console

from bench.figures import RESULTS, Figure, save, show
from bench.listening import tcp_listeners, unix_listeners
from bench.models import vision_model
from bench.runs import say, serve, small_server
from deploy.launch import supervised
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import WorkerReply
from rollout_server.openai_api import OpenAICall
from rollout_server.service import RolloutService
from shared.addresses import free_port
from shared.errors import CommunicatorError, DeadlineError, ProjectError
from shared.generation import Generation, Scores
from shared.processes import descendants
from shared.sync.buckets import is_sealed, pack, seal, seal_key, spec_of
from shared.sync.group import start_join
from shared.sync.meeting import CARD_BYTES, HELLO_BYTES, Seat, meet, num_strangers
from shared.wire import RequestConfig, RolloutInferRequest, ScoreItem

HOST, SECRET = "127.0.0.1", b"of this group"
HANG_S = 10.0
Part = StrEnum("Part", ["strangers", "members", "engine", "calls"])
_BATCH = 32  # connections that are open at once
_HONEST_EVERY_S = 0.5
_SIZE = struct.Struct("<Q")


# ---- frames ----------------------------------------------------------------------------------------------------------


class _Bomb:
    """Says that it was unpickled: a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


class Frames:
    """Endless. `bomb`: a folder that exists once any of them was unpickled."""

    def __init__(self, seed: int, bomb: Path) -> None:
        self._random = random.Random(seed)
        self._pickles = [pickle.dumps(_Bomb(str(bomb)), protocol) for protocol in (0, 2, 5)]
        self._kinds = [self._noise, self._hello, self._pickle, self._zeromq, self._store, self._http]

    def __next__(self) -> bytes:
        frame = bytearray(self._random.choice(self._kinds)())
        for _ in range(self._random.choice((0, 0, 1, 5))):
            if frame:
                frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        return bytes(frame)

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 4, 31, 32, 64, HELLO_BYTES - 1, HELLO_BYTES, 2000)))

    def _hello(self) -> bytes:
        rank = self._random.choice((0, 1, 1, 1, 2, 2**32 - 1))
        return struct.pack("<I", rank) + self._random.randbytes(32) + bytes(CARD_BYTES) + self._random.randbytes(32)

    def _pickle(self) -> bytes:
        return self._random.choice(self._pickles).ljust(self._random.choice((0, HELLO_BYTES)), b"\0")

    def _zeromq(self) -> bytes:
        kind = self._random.choice((b"PUSH", b"DEALER", b"ROUTER", b"SUB"))
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        message = self._random.choice(self._pickles)
        return greeting + b"\x04" + bytes([len(ready)]) + ready + b"\x02" + _SIZE.pack(len(message))[::-1] + message

    def _store(self) -> bytes:
        key, value = b"/default/0", self._random.choice(self._pickles)
        return b"\x09\xce\xf7\x85\x3c" + b"\x00" + _SIZE.pack(len(key)) + key + _SIZE.pack(len(value)) + value

    def _http(self) -> bytes:
        return b"POST /update_weights/ HTTP/1.1\r\nContent-Length: 99\r\n\r\n" + self._random.choice(self._pickles)


@dataclass
class Sent:
    """Counts of what became of frames."""

    taken: int = 0  # the whole frame was sent, and the other side has said something or hung up
    answered: int = 0  # it has said something
    hangs: int = 0

    def add(self, other: Sent) -> None:
        self.taken += other.taken
        self.answered += other.answered
        self.hangs += other.hangs


def send_frames(address: tuple[str, int | None], frames: list[bytes]) -> Sent:
    """Send each on a connection of its own, all open at once."""
    links, sent = [], Sent()
    for frame in frames:
        link = socket.socket()
        link.settimeout(HANG_S)
        # This side must not keep TIME_WAIT: a million connections would use up the ports.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            link.connect(address)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough
                link.sendall(frame)
                link.shutdown(socket.SHUT_WR)
            links.append(link)
        except OSError:  # nobody listens just now
            link.close()
    for link in links:
        sent.add(_hear_out(link))
    return sent


def _hear_out(link: socket.socket) -> Sent:
    """Listen until the other side hangs up."""
    answered = 0
    with link:
        try:
            while link.recv(1 << 12):
                answered = 1
        except TimeoutError:
            return Sent(hangs=1, answered=answered)
        except OSError:  # a reset ends the connection too, and that is all that is asked of the other side
            pass
    return Sent(taken=1, answered=answered)


# ---- the group's port ------------------------------------------------------------------------------------------------


@dataclass
class Met:
    """Records what the server's side of a group has seen."""

    strangers: int = 0
    buckets: int = 0  # honest ones, that were let through
    forged: int = 0  # others that were let through
    refused: int = 0
    unpickled: int = 0
    slowest_s: float = 0.0


def bucket() -> torch.Tensor:
    tensor = torch.arange(1024, dtype=torch.float32)
    made = pack([spec_of("w", tensor)], {"w": tensor}, "cpu")
    seal(made, key=seal_key(SECRET), ver=1, index=0)
    return made


def _worker(pipe: Connection, port: int, seconds: float) -> None:
    """Rank 0 in a process of its own: meets, takes what comes as long as the peer is there, and meets again."""
    met, honest, listening = Met(), bucket(), [True]

    def audit(event: str, _: tuple[object, ...]) -> None:
        if listening[0] and event == "pickle.find_class":
            met.unpickled += 1

    sys.addaudithook(audit)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not pipe.poll():
        with contextlib.suppress(CommunicatorError, DeadlineError):
            group = start_join("tcp", HOST, port, 0, 2, 60.0, secret=SECRET).result()
            try:
                while True:
                    received = torch.zeros_like(honest)
                    group.broadcast(received, 1, HANG_S)
                    if not is_sealed(received, key=group.seal_key, ver=1, index=0):
                        met.refused += 1
                    elif torch.equal(received, honest):
                        met.buckets += 1
                    else:
                        met.forged += 1
            finally:
                group.close()
    listening[0] = False
    met.strangers = num_strangers()
    pipe.send(met)


def _stranger(pipe: Connection, port: int, bomb: Path, num_frames: int) -> None:
    """Send until `num_frames` of its frames were greeted: between two meetings nobody listens."""
    frames, sent = Frames(1, bomb), Sent()
    while sent.answered < num_frames:
        sent.add(send_frames((HOST, port), [next(frames) for _ in range(min(_BATCH, num_frames - sent.answered))]))
    pipe.send(sent)


@contextlib.contextmanager
def _group(seconds: float) -> Iterator[tuple[int, Callable[[], Met]]]:
    """Yield a port with a worker behind it, and what to call at the end."""
    context, port = multiprocessing.get_context("fork"), free_port()
    near, far = context.Pipe()
    worker = context.Process(target=_worker, args=(far, port, seconds), daemon=True)
    worker.start()

    def end() -> Met:
        near.send("end")
        while not near.poll(0.2):  # it waits for a peer, so one comes
            with contextlib.suppress(ProjectError):
                start_join("tcp", HOST, port, 1, 2, 5.0, secret=SECRET).result().close()
        met = near.recv()
        assert isinstance(met, Met)
        return met

    try:
        yield port, end
    finally:
        worker.kill()
        worker.join()


def meet_once(port: int) -> float:
    """An honest rank joins and sends a bucket; its seconds. Raises ProjectError."""
    begin = time.monotonic()
    member = start_join("tcp", HOST, port, 1, 2, HANG_S, secret=SECRET).result()
    member.broadcast(bucket(), 1, HANG_S)
    member.close()
    return time.monotonic() - begin


def strangers(num_frames: int, bomb: Path) -> list[Figure]:
    """Let honest ranks meet while `num_frames` frames come."""
    say(f"strangers: {num_frames} frames to a group's port")
    begin, meetings, hangs = time.monotonic(), [], 0
    with _group(3600.0) as (port, end):
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        stranger = context.Process(target=_stranger, args=(far, port, bomb, num_frames), daemon=True)
        stranger.start()
        while not near.poll(_HONEST_EVERY_S):
            try:
                meetings.append(meet_once(port))
            except ProjectError as error:
                say(f"a meeting failed: {error}")
                hangs += 1
        sent = near.recv()
        met = end()
    hangs += sent.hangs
    return [
        Figure(name="strangers: frames", value=sent.answered, unit="frames", wanted=num_frames),
        Figure(name="strangers: seconds", value=time.monotonic() - begin, unit="s"),
        Figure(name="strangers: connections that were read, dropped and counted", value=met.strangers, unit=""),
        Figure(name="strangers: honest meetings meanwhile", value=len(meetings), unit="", wanted=1),
        Figure(name="strangers: slowest of these", value=max(meetings, default=0.0), unit="s", **at_most(HANG_S)),
        Figure(name="strangers: hangs", value=hangs, unit="", **at_most(0)),
        Figure(name="strangers: unpickled", value=met.unpickled + bomb.exists(), unit="objects", **at_most(0)),
        Figure(name="strangers: forged buckets loaded", value=met.forged, unit="", **at_most(0)),
    ]


def at_most(bound: float) -> dict[str, Any]:
    return {"wanted": bound, "at_least": False}


# ---- a member that cannot seal ---------------------------------------------------------------------------------------


class Forger:
    """Mutations of a sealed bucket; every hundredth is the bucket itself, a few have another size."""

    def __init__(self, seed: int, bomb: Path) -> None:
        self._random, self._honest = random.Random(seed), bytes(bucket().tolist())
        self._pickle = pickle.dumps(_Bomb(str(bomb)))
        self.num_honest = 0

    @staticmethod
    def is_short(i: int) -> bool:
        """Return True if frame `i` has another size. It ends the group."""
        return i % 500 == 7

    def frame(self, i: int) -> bytes:
        """Return the payload with its size before it."""
        content = bytearray(self._honest)
        if i % 100 == 0:
            self.num_honest += 1
        elif self.is_short(i):
            content = content[: self._random.randrange(len(content))]
        elif i % 10 == 3:
            content[: len(self._pickle)] = self._pickle
        elif i % 10 == 4:
            content[:] = self._random.randbytes(len(content))
        else:
            for _ in range(self._random.choice((1, 1, 2, 20))):
                content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        return _SIZE.pack(len(content)) + bytes(content)


def members(num_frames: int, bomb: Path) -> list[Figure]:
    """A peer knows the group's secret well enough to join, and not the seal's key."""
    say(f"members: {num_frames} buckets")
    begin, forger, sent, hangs = time.monotonic(), Forger(2, bomb), 0, 0
    with _group(3600.0) as (port, end):
        while sent < num_frames:
            member = Seat(
                host=HOST, port=port, rank=1, world_size=2, timeout_s=HANG_S, device=torch.device("cpu"), secret=SECRET
            )
            try:
                meeting = meet(member, b"", threading.Event())
            except DeadlineError:
                hangs += 1
                continue
            link = meeting.links[0]
            link.settimeout(HANG_S)
            with contextlib.suppress(OSError):  # counted below
                while sent < num_frames:
                    link.sendall(forger.frame(sent))
                    sent += 1
                    if forger.is_short(sent - 1):
                        break
                link.shutdown(socket.SHUT_WR)
            hangs += _hear_out(link).hangs
        met = end()
    return [
        Figure(name="members: frames", value=sent, unit="frames", wanted=num_frames),
        Figure(name="members: seconds", value=time.monotonic() - begin, unit="s"),
        Figure(name="members: refused by their seal", value=met.refused, unit="", wanted=1),
        Figure(name="members: honest buckets let through", value=met.buckets, unit="", wanted=1),
        Figure(name="members: hangs", value=hangs, unit="", **at_most(0)),
        Figure(name="members: unpickled", value=met.unpickled + bomb.exists(), unit="objects", **at_most(0)),
        Figure(name="members: forged buckets loaded", value=met.forged, unit="", **at_most(0)),
    ]


# ---- the engine's sockets --------------------------------------------------------------------------------------------


def engine(num_frames: int, bomb: Path, folder: Path) -> list[Figure]:
    """A real server's processes."""
    say("engine: a real server starts")
    config = small_server(vision_model(folder, "tiny"), folder)
    with supervised() as processes:
        server = serve(processes, folder, "server", {**config, "dtype": "float32"})
        pids, own_port = [server.pid, *descendants(server.pid)], httpx.URL(server.url).port
        listeners, paths = tcp_listeners(pids), unix_listeners(pids)
        say(f"engine: {num_frames} frames to its HTTP port; it has {len(listeners) - 1 + len(paths)} other sockets")
        frames, answers, sent, begin = Frames(3, bomb), [], Sent(), time.monotonic()
        for i, start in enumerate(range(0, num_frames, _BATCH)):
            sent.add(send_frames((HOST, own_port), [next(frames) for _ in range(min(_BATCH, num_frames - start))]))
            if i % 100 == 0 or start + _BATCH >= num_frames:
                answers.append(_answer_s(server.url))
        seconds = time.monotonic() - begin
        elsewhere = [address for address, _ in listeners if not address.startswith("127.")]
        others = [path for path in paths if path.stat().st_mode & 0o022]
    return [
        Figure(name="engine: frames", value=sent.taken, unit="frames", wanted=num_frames),
        Figure(name="engine: seconds", value=seconds, unit="s"),
        Figure(name="engine: sockets that other machines can reach", value=len(elsewhere), unit="", **at_most(0)),
        Figure(name="engine: Unix sockets that other users can write to", value=len(others), unit="", **at_most(0)),
        Figure(name="engine: TCP sockets on loopback besides HTTP", value=len(listeners) - 1, unit=""),
        Figure(name="engine: answers to /infer/ meanwhile", value=len(answers), unit="", wanted=1),
        Figure(name="engine: slowest of these", value=max(answers), unit="s", **at_most(HANG_S)),
        Figure(name="engine: hangs", value=sent.hangs, unit="", **at_most(0)),
        Figure(name="engine: unpickled", value=int(bomb.exists()), unit="objects", **at_most(0)),
    ]


def _answer_s(url: str) -> float:
    """Return the seconds of one small `/infer/`. Infinite if there is no answer."""
    body = {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}], "request_config": {"max_tokens": 2}}
    begin = time.monotonic()
    try:
        with httpx.Client(trust_env=False, timeout=HANG_S) as http:
            http.post(f"{url}/infer/", json=body).raise_for_status()
    except httpx.HTTPError as error:
        say(f"no answer: {error!r}")
        return float("inf")
    return time.monotonic() - begin


# ---- calls -----------------------------------------------------------------------------------------------------------


class EchoEngine:
    """Takes everything, and has one worker."""

    model, dtype, weights, vocab_size, max_model_len = "echo", "float32", "of the checkpoint", 1000, 100
    architecture: dict[str, str] = {}
    gpus: list[str] = []
    dead = False

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        text = str(request.messages[0].content)
        return [Generation(prompt_token_ids=[1], response_token_ids=[2], text=text, finish_reason="stop")] * config.n

    def text_of(self, token_ids: list[int]) -> str:
        return str(token_ids)

    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores:
        return Scores(prompt_token_ids=[1], logprobs=[-0.5] * len(response_token_ids))

    async def models(self) -> bytes:
        return b"{}"

    async def complete(self, call: OpenAICall, ver: int) -> bytes | AsyncGenerator[str]:
        return _events() if call.stream else b"{}"

    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
        return [WorkerReply(runs_meanwhile=True)]

    async def reset_caches(self) -> None: ...
    def together(self, items: Sequence[ScoreItem]) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def serve_adapter(self, name: str | None) -> None: ...
    def check_answers(self) -> None: ...
    async def watch(self) -> None: ...
    def shutdown(self) -> None: ...


async def _events() -> AsyncGenerator[str]:
    yield "data: [DONE]\n\n"


@dataclass
class AnswerCounts:
    num_cases: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)  # 5xx, and what is no answer at all

    def add(self, other: AnswerCounts) -> None:
        self.num_cases += other.num_cases
        self.defects += other.defects
        for status, number in other.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + number


class Caller:
    """Sends bodies to one path, each to a server that no earlier one has changed."""

    def __init__(self, path: str) -> None:
        self.path, self.answers = path, AnswerCounts()
        self._http = _client()

    async def send(self, content: bytes) -> None:
        self.answers.num_cases += 1
        try:
            async with asyncio.timeout(HANG_S):
                reply = await self._http.post(self.path, content=content)
        except Exception as error:  # a hang, or an exception that left the app
            self.answers.defects.append(f"{self.path} {content[:200]!r}: {error!r}")
            return
        status = reply.status_code
        self.answers.statuses[status] = self.answers.statuses.get(status, 0) + 1
        if status >= 500:
            self.answers.defects.append(f"{self.path} {content[:200]!r}: {reply.text[:300]}")
        if not 400 <= status < 500:
            self._http = _client()


def _client() -> httpx.AsyncClient:
    app = create_app(RolloutService(EchoEngine(), ServerConfig(model="echo")), None)
    headers = {"Content-Type": "application/json"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{HOST}", headers=headers)


async def _document() -> dict[str, Any]:
    """The server's own description of its calls."""
    async with _client() as http:
        found: dict[str, Any] = (await http.get("/openapi.json")).json()
        return found


def _call(job: tuple[str, bool, int]) -> AnswerCounts:
    """Send so many bodies to one path, which fit its schema or do not."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis import openapi as from_openapi

    path, fits, num_cases = job
    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    cases = from_openapi.from_dict(asyncio.run(_document()))[path]["POST"].as_strategy(generation_mode=mode)
    caller = Caller(path)
    quick = settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with asyncio.Runner() as runner:

        @quick
        @given(case=cases)
        def run(case: Any) -> None:
            content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
            runner.run(caller.send(content))

        run()
    return caller.answers


def calls(num_cases: int, processes: int = 2) -> list[Figure]:
    """Half of the bodies fit the schema, half do not."""
    say(f"calls: {num_cases} bodies")
    answers, begin = AnswerCounts(), time.monotonic()
    described = asyncio.run(_document())["paths"]
    paths = [path for path, methods in described.items() if "requestBody" in methods.get("post", {})]
    jobs = [(path, fits, -(-num_cases // (2 * len(paths)))) for path in paths for fits in (True, False)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for one in pool.imap_unordered(_call, jobs):
            answers.add(one)
    for defect in answers.defects[:5]:
        say(defect)
    say(f"calls: statuses {dict(sorted(answers.statuses.items()))}")
    return [
        Figure(name="calls: cases", value=answers.num_cases, unit="cases", wanted=num_cases),
        Figure(name="calls: seconds", value=time.monotonic() - begin, unit="s"),
        Figure(name="calls: understood", value=answers.statuses.get(200, 0), unit="cases", wanted=1),
        Figure(name="calls: 5xx, hangs, exceptions", value=len(answers.defects), unit="", **at_most(0)),
    ]


# ---- the program -----------------------------------------------------------------------------------------------------


def main(
    name: Annotated[str, typer.Option(help="Of the result file.")] = "hostile",
    part: Annotated[list[Part] | None, typer.Option(help="Only this one; again for each.")] = None,
    frames: Annotated[int, typer.Option(help="In all.")] = 1_000_000,
    cases: Annotated[int, typer.Option(help="Bodies that schemathesis draws.")] = 10_000,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Attack, print, write."""
    num_engine, num_members = frames // 20, frames // 20
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as temporary:
        folder = Path(temporary)
        bomb = folder / "unpickled"
        attacks: dict[Part, Callable[[], list[Figure]]] = {
            Part.strangers: lambda: strangers(frames - num_members - num_engine, bomb),
            Part.members: lambda: members(num_members, bomb),
            Part.engine: lambda: engine(num_engine, bomb, folder),
            Part.calls: lambda: calls(cases),
        }
        for chosen in part or attacks:
            figures += attacks[chosen]()
    console = Console()
    show(figures, console)
    console.print(f"written: {save(name, figures, out)}")
    sys.exit(any(figure.good is False for figure in figures))


if __name__ == "__main__":
    typer.run(main)
