"""Simulate up to 512 rollout servers and 64 learner ranks on one machine: `python -m bench.scale --out FILE`.

What is real: rank 0 of the learner as a whole, with its trainer, pipeline, dispatcher, membership, packing, sync and
HTTP clients; and every server above its engine, with HTTP, gate and weight updates, over TCP. What is not:

- Engines. An answer takes as long as a call of a 4B model did in a committed run, drawn from all of that run's calls.
  One in a hundred takes four times as long. The engine holds tensors instead of a model (`chaos_server`).
- Learning. `backward` sleeps for as long as that run's learner took per sample, and nothing is updated.
- Ranks other than 0. `EchoRanks` packs and unpacks as many messages as there would be, all of them rank 0's own. The
  same messages between real processes over gloo are measured beside it (`agreement`).
- Images. Prompts are text of an image's length, so the encoding of pictures, which worker processes do, is not here.

Rank 0's CPU seconds are those of its process, so they hold whatever else runs here. Its share is of the least that a
step could take: learning, the CPU seconds of the sync, and sending the weights once. The learner's busy share counts
the wait for answers too, as it was here. A sync's wall seconds are given, but all servers share this machine's cores,
so they are an upper bound. For that reason too, a connection may take as long as `timeout_s`, and not ten seconds.

After two thirds of the steps one machine's servers are killed, if there are several machines. The run must go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import torch
import torch.distributed as dist
import typer
import uvicorn

from bench.chaos_server import TensorEngine
from bench.figures import RESULTS, circumstances, markdown_table
from bench.models import SHAPES, build
from bench.runs import read_events, say, steps_of
from learner.policy.parallel import Ranks
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.membership import Membership
from learner.rollout.server_backend import LoopThread
from rollout_server import service
from rollout_server.__main__ import _bind
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import WorkerReply
from rollout_server.service import RolloutService
from shared.addresses import free_port
from shared.aio import gather
from shared.config.parse import write_yaml
from shared.generation import Generation
from shared.sync.buckets import num_bucket_bytes, plan_buckets
from shared.wire import (
    Bucket,
    ExpectScoresCall,
    RequestConfig,
    RolloutInferRequest,
    ScoreReply,
    TensorSpec,
    UpdateWeightsCall,
    UpdateWeightsReply,
)

T = TypeVar("T")
SOURCE = RESULTS / "gpu-topologies-4-gpus-2026-11-22.json"  # a 4B model on H200
SOURCE_RUN, SOURCE_SAMPLES = ("2+2", "stage2_ab_training, in step"), 16  # each rank has so many samples a step
STRAGGLERS, STRAGGLER_TIMES = 0.01, 4.0
SAMPLES_PER_RANK, SAMPLES_PER_PACK, DECODE_BATCH_SIZE = 64, 8, 64
PACKS_PER_STEP = SAMPLES_PER_RANK // SAMPLES_PER_PACK
OBJECTS, PROMPT_WORDS, ROW_TOKENS = 14, 120, 4096
MAX_PER_MACHINE = 8
LOOK_S = 0.25  # time between two looks of a server at what arrives
WARM_UP_STEPS = 2
SHARES = 1  # one epoch's: steps until all samples were learned
HTTP_PORT, GROUP_PORT = 23000, 25000
MODEL_BYTES, NETWORK_BYTES_S = 8.04e9, 50e9  # 4B in bfloat16; a network card of 400 Gb/s
WANTED_CPU = 0.5
RUNNING = get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement. `group`: how many servers share a group of the weight sync; 0: all. `ahead`: rollouts run ahead
    of the steps, not within them."""

    servers: int
    ranks: int
    group: int = MAX_PER_MACHINE
    ahead: bool = False

    @property
    def name(self) -> str:
        groups = {0: "one group", 1: "a group per server"}.get(self.group, "a group per machine")
        return f"{self.servers} servers, {self.ranks} ranks, {groups}" + (", ahead" if self.ahead else "")


POINTS = (
    Point(servers=1, ranks=1),
    Point(servers=8, ranks=1),
    Point(servers=8, ranks=8),
    Point(servers=64, ranks=8),
    Point(servers=64, ranks=64),
    Point(servers=512, ranks=1),
    Point(servers=512, ranks=64),
    Point(servers=512, ranks=64, group=1),
    Point(servers=512, ranks=64, group=0),
    Point(servers=512, ranks=64, ahead=True),
)


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of each call of a 4B model's servers, and of learning one sample on a rank."""

    calls_s: Sequence[float]
    learn_s: float


@cache
def measured() -> MeasuredTimes:
    runs = json.loads(SOURCE.read_text())["runs"]
    run = next(run for run in runs if (run["topology"], run["mode"]) == SOURCE_RUN)
    spans = [span for step in run["timeline"] for span in step["spans"]]
    calls = sorted(end - begin for name, _, begin, end in spans if name.startswith("http"))
    return MeasuredTimes(calls, run["phases_s"]["learn_s"] / SOURCE_SAMPLES)


def seconds_of(seed: int) -> float:
    """Return how long the answer with this seed takes."""
    draw = random.Random(seed)
    seconds = draw.choice(measured().calls_s)
    return seconds * STRAGGLER_TIMES if draw.random() < STRAGGLERS else seconds


# ---- servers ---------------------------------------------------------------------------------------------------------


class TimedEngine(TensorEngine):
    """Answers with as many of a sample's objects as the answer's seconds are of the longest one's. No look at a group
    waits on a thread, because many servers share a process."""

    def __init__(self, table: Mapping[str, Any], gpu: str) -> None:
        super().__init__(self._from_table)
        self._table, self.vocab_size, self.gpus = table["known"], table["vocab_size"], [gpu]

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        await asyncio.sleep(seconds_of(seed or 0))
        return [self._from_table(request, seed or 0, 0)]

    def _from_table(self, request: RolloutInferRequest, seed: int, weights: int) -> Generation:
        prompt, answers = self._table[str(request.messages[0].content)]
        number = round(min(1.0, seconds_of(seed) / measured().calls_s[-1]) * (len(answers) - 1))
        tokens = list(answers[number])
        return Generation(prompt_token_ids=list(prompt), response_token_ids=tokens, text="", finish_reason="stop")

    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
        if method in ("sync_poll", "sync_poll_join"):
            await asyncio.sleep(LOOK_S)
            args = (0.0,)
        work: Callable[..., WorkerReply] = getattr(self, f"_{method}", lambda *_: WorkerReply())
        return [work(*args)]


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """The place where a server listens. Servers with one GPU's name never share a group."""

    host: str
    index: int  # index at this host
    gpu: str

    @property
    def entry(self) -> dict[str, Any]:
        return {"base_url": f"http://{self.host}:{HTTP_PORT + self.index}", "group_port": GROUP_PORT + self.index}


def machines_of(point: Point) -> list[list[ServerPlace]]:
    """Return the servers of each machine. Servers that are to share a group have one address, and GPUs of their own."""
    per_machine = min(MAX_PER_MACHINE, max(1, point.servers // 8))
    places = []
    for i in range(point.servers):
        machine, index = (0, i) if point.group == 0 else divmod(i, per_machine)
        gpu = "shared" if point.group == 1 else f"gpu{i}"
        places.append(ServerPlace(host=f"127.77.{machine // 250}.{machine % 250 + 1}", index=index, gpu=gpu))
    return [places[i : i + per_machine] for i in range(0, point.servers, per_machine)]


def run_machine(places: Sequence[ServerPlace], table: Path, log: Path) -> None:
    """Run the servers of one machine as a process, until it is killed."""
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    known = pickle.loads(table.read_bytes())
    service._versions = dict  # vLLM's would have to be imported

    async def serve_all() -> None:
        for place in places:
            await _listen(place, known)
        await asyncio.Event().wait()

    asyncio.run(serve_all())


async def _listen(place: ServerPlace, table: Mapping[str, Any]) -> None:
    """Listen as `serving.serve` does, without looking ten times a second whether to end."""
    config = ServerConfig(model="tensors", host=place.host, port=HTTP_PORT + place.index)
    app = create_app(RolloutService(TimedEngine(table, place.gpu), config, ""), None)
    settings = uvicorn.Config(
        app, ws="none", log_level="error", access_log=False, timeout_keep_alive=30, lifespan="off"
    )
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    await server.startup(sockets=[_bind(config)])


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


@dataclass
class CollectiveTraffic:
    """The amount that the collectives of this process have carried."""

    number: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EchoRanks(Ranks):
    """Rank 0 of `world_size` ranks that all say what rank 0 says. Messages are pickled and read as with gloo; nothing
    travels."""

    told: CollectiveTraffic = field(default_factory=CollectiveTraffic)

    def all_reduce_max(self, value: float) -> float:
        self.told.number += 1
        return float(value)

    def all_gather_object(self, value: T) -> list[T]:
        content = pickle.dumps(value)
        self._count(content)
        return [value, *(pickle.loads(content) for _ in range(self.world_size - 1))]

    def broadcast_object(self, value: T | None) -> T:
        content = pickle.dumps(value)
        self._count(content)
        found: T = pickle.loads(content)
        return found

    def all_reduce_tensor(self, tensor: torch.Tensor) -> None: ...

    def broadcast_tensor(self, tensor: torch.Tensor) -> None: ...

    def _count(self, content: bytes) -> None:
        self.told.number += 1
        self.told.num_bytes += len(content)


def learn(config: Path, num_ranks: int, notes: Path, log: Path) -> None:
    """Run rank 0 as a process. Writes what each step has used into `notes`."""
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    from learner.__main__ import main
    from learner.policy.load import Policy, RowLoss
    from learner.policy.optim import Optimizer
    from learner.sync.sync import Sync
    from learner.wiring import build as wiring

    os.environ |= {"WORLD_SIZE": str(num_ranks), "RANK": "0"}
    torch.set_num_threads(1)
    told, used = CollectiveTraffic(), {"sync": 0.0, "agree": 0.0}
    lines = notes.open("w", buffering=1)

    def init_ranks(environment: Mapping[str, str], *, timeout_s: float) -> Ranks:
        return EchoRanks(rank=0, world_size=num_ranks, timeout_s=timeout_s, told=told)

    def counted(name: str, work: Callable[..., T]) -> Callable[..., T]:
        def with_count(*args: Any, **settings: Any) -> T:
            before = time.process_time()
            try:
                return work(*args, **settings)
            finally:
                used[name] += time.process_time() - before

        return with_count

    def backward(self: Any, row: Any) -> RowLoss:
        time.sleep(measured().learn_s * len(row.segments))
        weights = sum(float(segment.loss_weights.sum()) for segment in row.segments)
        return RowLoss(loss_sum=weights, weight_sum=weights, num_supervised=1, counts={})

    def update(self: Any, global_step: int, *, share: float) -> tuple[float, float]:
        line = {"cpu_s": time.process_time(), **{f"{name}_cpu_s": value for name, value in used.items()}}
        lines.write(json.dumps({**line, "collectives": told.number, "collective_bytes": told.num_bytes}) + "\n")
        return 0.0, 0.0

    def timeouts(cls: Any, timeout_s: float, infer_timeout_s: float | None, **settings: int) -> Timeouts:
        return replace(timeouts_of(timeout_s, infer_timeout_s, **settings), connect_s=timeout_s)

    timeouts_of = Timeouts.of
    Timeouts.of = classmethod(timeouts)  # type: ignore[assignment, method-assign]
    wiring.init_ranks = init_ranks
    Policy.backward, Policy.reduce_gradients = backward, lambda *_, **__: None  # type: ignore[method-assign]
    Optimizer.update = update  # type: ignore[assignment, method-assign]
    Sync.sync, Sync.agree = counted("sync", Sync.sync), counted("agree", Sync.agree)  # type: ignore[method-assign]
    os._exit(main(["train", "--config", str(config)]))


def learner_config(model: Path, folder: Path, point: Point, steps: int) -> dict[str, Any]:
    entries = [place.entry for machine in machines_of(point) for place in machine]
    server = {"servers": entries, "timeout_s": 120.0, "infer_timeout_s": 60.0, "min_servers": 1}
    # There are as many buckets as 8 GB have; the tolerance is open because these engines' scores mean nothing to a real
    # policy.
    sync = {"canary_samples": 2, "canary_tolerance": 1e9, "bucket_bytes": 400_000}
    return {
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "num_workers": 0},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": steps,
            "effective_batch_size": SAMPLES_PER_RANK * point.ranks,
            "per_device_train_batch_size": SAMPLES_PER_PACK,
            "save_on_end": False,
            "eval_on_end": False,
            "learning_rate": 1e-5,
        },
        "logging": {"trackers": [], "progress_bar": False},
        "stage2_ab": {
            "schedule": {"b_ratio": 1.0},
            "async_actor_learner": {
                "enabled": point.ahead,
                "prefetch_target_packs": 2 * PACKS_PER_STEP,
                "queue_limit": 4 * PACKS_PER_STEP,
                "max_starved_steps": 10_000,
            },
        },
        "custom": {
            "trainer_variant": "stage2_ab_training",
            "extra": {
                "rollout_matching": {
                    "decode_batch_size": DECODE_BATCH_SIZE,
                    "decoding": {"max_new_tokens": 512},
                    "vllm": {"mode": "server", "server": server, "sync": sync},
                }
            },
        },
        "global_max_length": ROW_TOKENS,
    }


# ---- model, samples, answers -----------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """Make as many tensors as the 4B model's language part, each of them small."""
    path = folder / "model"
    vocab_size, _, _, heads, kv_heads, _, _ = SHAPES["tiny"]
    layers = SHAPES["4B"][2]
    SHAPES["tiny"] = (vocab_size, 32, layers, heads, kv_heads, 8, 64)
    build(path, "tiny", device=torch.device("cpu"))
    return path


def write_samples(path: Path, number: int) -> None:
    words = " ".join(str(i % 10) for i in range(PROMPT_WORDS))
    with path.open("w") as out:
        for i in range(number):
            boxes = [[4 * i % 60 + k, 3 * k, 4 * i % 60 + 20 + k, 30 + 3 * k] for k in range(OBJECTS)]
            turn = {"role": "user", "content": f"Detect every digit of scene {i}. {words}"}
            objects = [{"desc": "three", "bbox_2d": box} for box in boxes]
            line = {"id": f"s{i}", "messages": [turn], "objects": objects, "width": 100, "height": 100}
            out.write(json.dumps(line) + "\n")


def write_table(config: dict[str, Any], table: Path) -> None:
    """Write each sample's prompt, as the learner encodes it, and its first objects, one more in each answer."""
    from learner.config.load import config_of
    from learner.policy.load import load_policy
    from learner.tasks.detection.task import DetectionTask
    from learner.wiring.build import load_data

    parsed = config_of(config)
    policy = load_policy(parsed.model, device=torch.device("cpu"))
    task = DetectionTask(parsed.task, policy.tokenizer)
    known: dict[str, Any] = {}
    answers: dict[Any, list[list[int]]] = {}  # many samples have the same objects
    for sample in load_data(parsed, task, policy.encoder).train:
        if sample.objects not in answers:
            texts = [task.serialize(sample.objects[:n], after=None).text for n in range(1, len(sample.objects) + 1)]
            answers[sample.objects] = [policy.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        prompt = list(policy.encoder.encode(sample).token_ids)
        known[str(sample.messages[0]["content"])] = prompt, answers[sample.objects]
    vocab_size = policy.model.config.get_text_config().vocab_size
    table.write_bytes(pickle.dumps({"known": known, "vocab_size": vocab_size}))


# ---- one measurement -------------------------------------------------------------------------------------------------


def measure(point: Point, model: Path, table: Path, samples: Path, *, steps: int, limit_s: float) -> dict[str, Any]:
    """Servers and rank 0 as processes, for `steps` steps; what rank 0 used."""
    with tempfile.TemporaryDirectory(prefix="scale-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "train.jsonl").symlink_to(samples)
        config = folder / "run.yaml"
        write_yaml(config, learner_config(model, folder, point, steps))
        places = machines_of(point)
        machines = [_start(stack, run_machine, machine, table, folder / "servers.log") for machine in places]
        _wait_for([place for machine in places for place in machine], limit_s)
        say("servers answer")
        notes, log = folder / "notes.jsonl", folder / "learner.log"
        notes.touch()
        rank_0 = _start(stack, learn, config, point.ranks, notes, log)
        peak = _watch(rank_0, notes, machines, kill_after=steps * 2 // 3, limit_s=limit_s)
        if rank_0.exitcode not in (0, None):
            tail = log.read_text(errors="replace")[-2000:]
            return {**asdict(point), "error": f"rank 0 ended with {rank_0.exitcode}", "log": tail}
        events = read_events(folder / "run")
        return {**asdict(point), **_summary(point, events, _lines(notes)), "peak_connections": peak}


def _start(stack: contextlib.ExitStack, work: Callable[..., None], *args: Any) -> BaseProcess:
    process = RUNNING.Process(target=work, args=args)
    process.start()

    def end() -> None:
        process.kill()
        process.join(10)

    stack.callback(end)
    return process


def _wait_for(places: Sequence[ServerPlace], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        for place in places:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{place.entry['base_url']}/health/").status_code == 200:
                        break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{place} does not answer")
                time.sleep(0.1)


def _watch(
    rank_0: BaseProcess, notes: Path, machines: Sequence[BaseProcess], *, kill_after: int, limit_s: float
) -> int:
    """Wait for rank 0's end, and kill a machine on the way. Returns the most sockets that rank 0 had open."""
    deadline, peak, victim = time.monotonic() + limit_s, 0, machines[-1] if len(machines) > 1 else None
    while rank_0.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            peak = max(peak, _num_sockets(Path(f"/proc/{rank_0.pid}/fd")))
        if victim is not None and len(_lines(notes)) >= kill_after:
            victim.kill()
            victim = None
        rank_0.join(0.1)
    return peak


def _num_sockets(folder: Path) -> int:
    number = 0
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            number += str(file.readlink()).startswith("socket:")
    return number


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _summary(point: Point, events: Sequence[Mapping[str, Any]], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the warm-up; a note is written at each step's end, so differences are a step's."""
    steps = steps_of(events)[WARM_UP_STEPS:]
    rows = []
    for before, after, step in zip(notes[WARM_UP_STEPS - 1 :], notes[WARM_UP_STEPS:], steps, strict=False):
        used = {name: after[name] - before[name] for name in after}
        learn_s, wait_s = step["learn_s"], step.get("wait_s", 0.0)
        least_s = learn_s + used["sync_cpu_s"] + _transfer_s(1)
        rows.append(
            {
                **used,
                "learn_s": learn_s,
                "wait_s": wait_s,
                "step_wall_s": step["step_s"],
                "sync_wall_s": step.get("sync_s", 0.0),
                "busy": learn_s / (least_s + wait_s),
                "busy_here": learn_s / step["step_s"],
                "cpu_share": used["cpu_s"] / least_s,
            }
        )
    if not rows:
        return {"error": f"{len(notes)} steps within the time limit, {WARM_UP_STEPS + 1} are needed"}
    found: dict[str, Any] = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    lost = [event for event in events if event["event"] == "server" and event.get("what") == "lost"]
    return {
        "steps": len(rows),
        "of_rollouts": sum(step["channel"] == "B" for step in steps),
        **found,
        "longest_step_s": round(max(step["step_s"] for step in steps), 2),
        "servers_lost": len(lost),
    }


def _num_groups(point: Point) -> int:
    machines = machines_of(point)
    return {0: 1, 1: point.servers}.get(point.group, len(machines))


def _transfer_s(num_groups: int) -> float:
    """Compute the seconds of a transfer, which is not measured: rank 0's network card sends the model once to each
    group."""
    return num_groups * MODEL_BYTES / NETWORK_BYTES_S


# ---- agreement of real ranks -----------------------------------------------------------------------------------------


def agreement(num_ranks: int, num_servers: int, *, rounds: int = 20) -> dict[str, Any]:
    """`num_ranks` processes over gloo tell each other what they lost (nothing) and take over a membership, as at each
    step's end. CPU seconds are rank 0's."""
    port = free_port()
    reader, writer = RUNNING.Pipe(duplex=False)
    with contextlib.ExitStack() as stack:
        for rank in range(num_ranks):
            _start(stack, _agree, rank, num_ranks, num_servers, port, rounds, writer)
        if not reader.poll(300.0):
            raise TimeoutError(f"{num_ranks} ranks did not agree within 300 s")
        return {"ranks": num_ranks, "servers": num_servers, **reader.recv()}


def _agree(rank: int, num_ranks: int, num_servers: int, port: int, rounds: int, writer: Any) -> None:
    from learner.rollout.membership import Member

    torch.set_num_threads(1)
    limit = timedelta(seconds=240)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", limit, num_ranks, rank)
    ranks = Ranks(rank=rank, world_size=num_ranks, timeout_s=limit.total_seconds())
    members = tuple(Member(base_url=f"http://server-{i}:8000", group_port=51216) for i in range(num_servers))
    membership = Membership(members=members)
    ranks.barrier()
    begin, cpu = time.monotonic(), time.process_time()
    for _ in range(rounds):
        ranks.all_gather_object({})
        ranks.broadcast_object(membership)
    seconds, cpu = (time.monotonic() - begin) / rounds, (time.process_time() - cpu) / rounds
    ranks.barrier()
    if rank == 0:
        writer.send({"seconds": round(seconds, 5), "cpu_s": round(cpu, 5)})
        time.sleep(1.0)


# ---- the HTTP calls of a sync ----------------------------------------------------------------------------------------


def fan_out(num_servers: int) -> dict[str, Any]:
    """Measure what one sync's calls to so many servers take of rank 0: the real clients, over TCP. The servers are one
    small process that answers an update as soon as it has heard what the canary must score. Nothing is broadcast."""
    ready, told = RUNNING.Pipe(duplex=False)
    with contextlib.ExitStack() as stack:
        _start(stack, _answer_all, num_servers, told)
        if not ready.poll(60.0):
            raise TimeoutError("the servers do not listen")
        backend = LoopThread("fan-out")
        begin = time.process_time()
        timeouts = Timeouts.of(120.0, None)
        hosts = (f"http://127.78.{i // 250}.{i % 250 + 1}:{HTTP_PORT}" for i in range(num_servers))
        clients = [ServerClient(host, timeouts=timeouts) for host in hosts]
        made_s = time.process_time() - begin
        rounds = [_one_update(backend, clients, ver) for ver in range(1, 4)]
        peak = _num_sockets(Path("/proc/self/fd"))
        backend.submit(gather(client.aclose() for client in clients)).result(30.0)
        backend.close(10.0)
    wall_s, cpu_s = (statistics.median(one[i] for one in rounds) for i in (0, 1))
    found = {"clients_cpu_s": made_s, "cpu_s": cpu_s, "wall_s": wall_s}
    return {"servers": num_servers, "connections": peak, **{name: round(value, 3) for name, value in found.items()}}


def _one_update(backend: LoopThread, clients: Sequence[ServerClient], ver: int) -> tuple[float, float]:
    specs = [TensorSpec(name=f"model.layers.{i}.weight", dtype="bfloat16", shape=(4096, 2560)) for i in range(398)]
    buckets = [Bucket(tensors=part, num_bytes=num_bucket_bytes(part)) for part in plan_buckets(specs, 512 << 20)]
    call = UpdateWeightsCall(incarnation="scale", ver=ver, buckets=buckets, timeout_s=120.0)
    expected = ExpectScoresCall(incarnation="scale", ver=ver, logprobs=[[-0.5] * 64] * 2, tolerance=0.1)
    begin, cpu = time.monotonic(), time.process_time()
    updates = [backend.submit(client.update_weights(call)) for client in clients]
    time.sleep(_transfer_s(1))
    for told in [backend.submit(client.expect_scores(expected)) for client in clients]:
        told.result(120.0)
    for update in updates:
        update.result(120.0)
    return time.monotonic() - begin, time.process_time() - cpu


def _answer_all(num_servers: int, told: Any) -> None:
    """Serve HTTP to one learner as a process, as little of it as that needs."""
    scores = ScoreReply(ver=1, prompt_token_ids=[], logprobs=[])
    reply = UpdateWeightsReply(
        ver=1, num_bytes=1, num_tensors=1, seconds=0.1, drain_s=0.0, scores=scores
    ).model_dump_json()

    async def listen() -> None:
        for i in range(num_servers):
            heard = asyncio.Semaphore(0)
            serve = partial(_answer, heard, reply.encode())
            await asyncio.start_server(serve, f"127.78.{i // 250}.{i % 250 + 1}", HTTP_PORT)
        told.send("listening")
        await asyncio.Event().wait()

    asyncio.run(listen())


async def _answer(
    heard: asyncio.Semaphore, reply: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(OSError, EOFError):
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            length = re.search(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            content = b"{}"
            if b"/update_weights/" in head:
                await heard.acquire()
                content = reply
            elif b"/expect_scores/" in head:
                heard.release()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
            await writer.drain()
    writer.close()


# ---- the program -----------------------------------------------------------------------------------------------------


def measure_all(points: Sequence[Point], *, steps: int, limit_s: float) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        samples, table = folder / "train.jsonl", folder / "table"
        model = make_model(folder)
        write_samples(samples, SHARES * SAMPLES_PER_RANK * max(point.ranks for point in points))
        config = learner_config(model, folder, Point(servers=1, ranks=1), 1)
        setting_up = RUNNING.Process(target=write_table, args=(config, table))
        setting_up.start()
        setting_up.join(limit_s)
        for point in points:
            say(point.name)
            yield measure(point, model, table, samples, steps=steps, limit_s=limit_s)


def rows_of(points: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for one in points:
        point = Point(**{name: one[name] for name in ("servers", "ranks", "group", "ahead")})
        if "error" in one:
            rows.append([point.name, one["error"]])
            continue
        rows.append(
            [
                point.name,
                f"{one['busy']:.2f}",
                str(one["peak_connections"]),
                f"{one['cpu_share']:.0%}",
                f"{one['sync_cpu_s']:.2f}",
                f"{_transfer_s(_num_groups(point)):.2f}",
                f"{one['sync_wall_s']:.2f}",
            ]
        )
    return rows


HEAD = ("", "learner busy", "connections", "rank 0's CPU", "sync, CPU s", "sync, transfer s (computed)", "sync here, s")


def main(
    out: Annotated[Path, typer.Option(help="The result file; it is written after each measurement.")],
    only: Annotated[list[int] | None, typer.Option(help="Numbers of measurements, from 0; again for each.")] = None,
    steps: Annotated[int, typer.Option(min=WARM_UP_STEPS + 3, help="Of each run.")] = 12,
    limit_s: Annotated[float, typer.Option(help="Longest time of one measurement, seconds.")] = 300.0,
) -> None:
    """Measure each point, print a table. Exit code 1 if a run fails or rank 0 takes more than half a core."""
    points = [POINTS[i] for i in only] if only else POINTS
    found: dict[str, Any] = {**circumstances(), "steps": steps, "points": [], "agreement": [], "fan_out": []}
    for one in measure_all(points, steps=steps, limit_s=limit_s):
        found["points"].append(one)
        out.write_text(json.dumps(found, indent=1) + "\n")
        say(str(one))
    for servers in (1, 8, 64, 512):
        found["fan_out"].append(fan_out(servers))
        say(f"HTTP calls of a sync: {found['fan_out'][-1]}")
    for ranks in sorted({point.ranks for point in points if point.ranks > 1}):
        found["agreement"].append(agreement(ranks, max(point.servers for point in points)))
        say(f"agreement: {found['agreement'][-1]}")
        out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(markdown_table(HEAD, rows_of(found["points"]))))
    sys.exit(any("error" in one or one["cpu_share"] > WANTED_CPU for one in found["points"]))


if __name__ == "__main__":
    typer.run(main)
