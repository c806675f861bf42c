"""Faults while a run goes on: `python -m bench.chaos --seconds 500 --out FILE`.

A real learner on two ranks trains on the rollouts of four servers, while faults hit the servers one after another. The
servers are real above the engine (`bench.chaos_server`); HTTP goes through a proxy beside each server that can break
it. Where this machine can make network namespaces (`bench.namespaces`), each server and its proxy have one of their
own, a "machine" that a link joins to the learner's; otherwise, or with `--loopback`, all share the loopback. The report
says which.

Faults:
- `kill`, `freeze`: SIGKILL, and started again later; SIGSTOP, and SIGCONT later;
- `partition`: the link is cut in the middle of a bucket. Loopback: the proxy passes nothing, and the receiver waits;
- `half-open`: the link is cut and the server killed behind it, so no FIN or RST arrives; later the link is back, with a
  new server. Loopback: the proxy keeps connections and passes nothing;
- `mute`: what the server sends is lost, what it is sent arrives. Namespaces only;
- `slow link`: 8 Mbit/s to the server (weights need 1.5 s). Namespaces only, if the kernel has `tbf`;
- `delay`: of all packets to the server, if the kernel has `netem`; otherwise of HTTP, by the proxy;
- `reset` (RST on all connections), `truncate` (an answer ends early), `corrupt` (an answer's bytes are overwritten): by
  the proxy;
- `flip`: a bit of a bucket; `second learner`: it opens a group of its own at the server.
The last one is `disk full`: no file of the learner can grow, which ends the run.

Checked at the end (exit code 1 if one does not hold):
- every answer that was accepted came from exactly the weights that the sync of its version sent, as a whole;
- every sample was learned once per epoch;
- no call lasted longer than its deadline, the last look at the server and one second;
- the run ended with a named error (`OutputError`) and a checkpoint that loads, and no process is left.

Faults may meet: one sync fails twice, or no server is left. That ends a run with a named error and a checkpoint. Then
the run is resumed and the campaign goes on; `resumed` counts that.

Per fault: how many, how many were noticed within eight seconds and before the next one on that server, seconds until
the first failed call of rank 0 or the server's loss (median, p99), and seconds until the end of the first step that
began after it. On two cores a step itself takes part of that. A fault on a connection is noticed only where something
travels: many meet a server while the learner learns.

With `--vllm` two servers are real to the bottom (the demo's model on CPU), on the loopback, and a fault hits one every
`--pause-s` seconds, if both serve. SIGKILL only hits the second one, so the first lives as long as the campaign. Every
ten seconds `bench.soak` notes what all processes hold: `--vllm --seconds 1800 --pause-s 20` is the soak. In place of
the check on answers there is the sync's own canary, at its usual tolerance, and what `bench.soak` wants.

The scores of the fake engine mean nothing to the real policy, so the canary's tolerance is wide open here; `tests/` has
the canary. An answer whose bytes change and still parse would not be noticed: answers carry no digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import random
import re
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer

from bench import chaos_server, forked, soak
from bench.chaos_server import TensorEngine, fingerprint
from bench.namespaces import Node, NoNamespacesError, enter, network
from bench.runs import say, small_server
from bench.training import DEMO_TASK
from shared.addresses import free_port, free_ports
from shared.config.parse import write_yaml
from shared.generation import Generation
from shared.tokens import TOKEN_VARIABLE
from shared.wire import RolloutInferRequest

NUM_RANKS = 2
NUM_SAMPLES, BATCH = 24, 8
SAVE_STEPS = 20
LAST_LOOK_S = 3.0
FAULTS = ("kill", "freeze", "delay", "reset", "half-open", "truncate", "corrupt", "flip", "partition", "second learner")
MUTE, SLOW_LINK = "mute", "slow link"  # made in namespaces only
DISK_FULL = "disk full"
LASTS_S = {"kill": 0.5, "freeze": 2.0, "half-open": 2.0, "partition": 2.0, "delay": 1.0, MUTE: 2.0, SLOW_LINK: 2.0}
SETTLES_S = 0.3  # least time between two faults of a server
QDISCS = {"delay": "netem delay 600ms 400ms", SLOW_LINK: "tbf rate 8mbit burst 16000 latency 400ms"}
PORT, PROXY_PORT, GROUP_PORT = 8000, 8001, 51216  # all ports of a namespace are free
TOKEN = "chaos"
NOTICED_WITHIN_S = 8.0
SAMPLE_EVERY_S = 10.0
NAMED_ERROR = r"^error .*\w+Error: "
RUNNING = get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The number of servers, and how long things take with them."""

    num_servers: int
    infer_timeout_s: float
    timeout_s: float
    start_s: float  # a server's start takes so long at most
    faults: float  # times LASTS_S


TENSORS = Scale(num_servers=4, infer_timeout_s=1.5, timeout_s=6.0, start_s=60.0, faults=1.0)
VLLM = Scale(num_servers=2, infer_timeout_s=30.0, timeout_s=120.0, start_s=400.0, faults=6.0)
# Caches that are full within the first minutes; patience for cores that others use too.
SMALL_CACHES = {"mm_processor_cache_gb": 0.05, "kv_cache_memory_bytes": 64 << 20}
REAL_SERVER = {"dtype": "float32", "engine_stall_s": 300.0, "engine_args": SMALL_CACHES}
VLLM_FAULTS = tuple(kind for kind in FAULTS if kind not in ("flip", "partition"))  # those need `ChaosEngine`


@dataclass(frozen=True)
class Fault:
    kind: str
    url: str  # the server's; "": the learner
    at_s: float  # Unix seconds


# ---- servers -------------------------------------------------------------------------------------------------------


class ChaosEngine(TensorEngine):
    """Answers from a table, and does to its buckets what a file in `folder` says."""

    def __init__(self, table: Path, folder: Path, node: Node | None) -> None:
        known: dict[str, Any] = pickle.loads(table.read_bytes())
        self._prompts, self._answers = known["prompts"], known["answers"]
        super().__init__(self._from_table, answer_s=0.03)
        self.vocab_size = known["vocab_size"]
        self._folder, self._node = folder, node

    def _from_table(self, request: RolloutInferRequest, seed: int, weights: int) -> Generation:
        key = str(request.messages[0].content)
        tokens = self._answers[key][seed % len(self._answers[key])]
        return Generation(
            prompt_token_ids=list(self._prompts[key]),
            response_token_ids=list(tokens),
            text=str(weights),  # the learner does not read it, and the check does
            finish_reason="stop",
        )

    def _load(self, receiving: Any) -> None:
        if self._told("flip"):
            receiving.buffer[0] ^= 1
        if self._told("partition"):
            if self._node is None:
                time.sleep(LASTS_S["partition"])
            else:
                self._node.cut(LASTS_S["partition"])
        super()._load(receiving)

    def _told(self, what: str) -> bool:
        try:
            (self._folder / what).unlink()
        except FileNotFoundError:
            return False
        return True


def on_node(node: Node | None, work: Callable[..., None], *args: Any) -> BaseProcess:
    """Return a process that does `work(*args)` on `node`, or here."""
    process = RUNNING.Process(target=_entered, args=(node, work, args))
    process.start()
    return process


def _entered(node: Node | None, work: Callable[..., None], args: Sequence[Any]) -> None:
    if node is not None:
        enter(node.pid)
    work(*args)


def serve(host: str, port: int, table: Path, folder: Path, node: Node | None) -> None:
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os._exit(chaos_server.serve(port, ChaosEngine(table, folder, node), host=host, token=TOKEN))


def wait_for_answers(urls: Sequence[str], timeout_s: float) -> None:
    for url in urls:
        _wait(partial(_answers, url), timeout_s, "a server")


def second_learner(url: str) -> None:
    """Opens a group that nobody joins."""
    call = {
        "incarnation": "a second learner",
        "secret": "0" * 64,
        "group_port": free_port(),
        "world_size": 2,
        "backend": "tcp",
        "timeout_s": 0.5,
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/init_communicator/", json=call, headers=headers, timeout=2.0, trust_env=False)


def be_proxy(host: str, port: int, target: int, orders: Connection) -> None:
    """Run the proxy in a process of its own, until `orders` ends."""
    asyncio.run(Proxy(host, target, orders).run(port))


class Proxy:
    """HTTP between learner and server, with faults. `orders` gives faults and seconds."""

    def __init__(self, host: str, target: int, orders: Connection) -> None:
        self._host, self._target, self._orders = host, target, orders
        self._fault, self._until = "", 0.0
        self._open: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()

    async def run(self, port: int) -> None:
        asyncio.get_running_loop().add_reader(self._orders.fileno(), self._obey)
        async with await asyncio.start_server(self._connected, self._host, port):
            await self._ended.wait()
            os._exit(0)  # ends with connections that are open

    def _obey(self) -> None:
        try:
            self._fault, seconds = self._orders.recv()
        except EOFError:
            self._ended.set()
            return
        self._until = time.monotonic() + seconds
        if self._fault == "reset":
            for writer in self._open:
                writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection(self._host, self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open.add(writer)
        pumps = [self._pump(reader, there, answers=False), self._pump(there_reader, writer, answers=True)]
        tasks = [asyncio.create_task(pump) for pump in pumps]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self._open.discard(writer)
        for one in (there, writer):
            one.transport.abort() if self._fault == "truncate" else one.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while content := await source.read(1 << 16):
                fault = self._fault if time.monotonic() < self._until else ""
                if fault == "delay":
                    await asyncio.sleep(random.uniform(0.2, 1.0))
                while self._fault in ("half-open", "partition") and time.monotonic() < self._until:
                    await asyncio.sleep(0.05)
                if answers and fault in ("truncate", "corrupt"):
                    self._until = 0.0  # ends the fault: it comes once
                    middle = len(content) // 2
                    if fault == "truncate":
                        sink.write(content[:middle])
                        await sink.drain()
                        return
                    content = content[:middle] + b"\xff" * min(16, len(content) - middle) + content[middle + 16 :]
                sink.write(content)
                await sink.drain()


@dataclass
class ProxiedServer:
    """A server and its proxy, both on `node` or on the loopback."""

    table: Path
    folder: Path
    node: Node | None
    shapes: Collection[str]  # faults that the kernel can make of the node's link
    scale: Scale = TENSORS
    model: Path = Path()
    busy_until: float = 0.0  # monotonic; under a fault until then

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.host = "127.0.0.1" if self.node is None else self.node.address
        ports = free_ports(3) if self.node is None else [PORT, PROXY_PORT, GROUP_PORT]
        self._port, self._proxy_port, self.group_port = ports
        self.url = f"http://{self.host}:{self._proxy_port}"
        orders, self._orders = RUNNING.Pipe(duplex=False)
        self._proxy = on_node(self.node, be_proxy, self.host, self._proxy_port, self._port, orders)
        orders.close()
        self.start()

    def start(self) -> None:
        self.process = on_node(self.node, serve, self.host, self._port, self.table, self.folder, self.node)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def join(self, timeout_s: float) -> None:
        self.process.join(timeout_s)

    def hit(self, kind: str, rng: random.Random) -> None:
        """Begin a fault; a thread ends it."""
        lasts_s = LASTS_S.get(kind, 1.0) * self.scale.faults
        self.busy_until = time.monotonic() + lasts_s + SETTLES_S
        if kind in ("kill", "freeze") or (kind == "half-open" and self.node is not None):
            if self.node is not None and kind == "half-open":
                self.node.cut(lasts_s)
            self.signal(signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
            self.busy_until = math.inf  # lasts until it is repaired
            threading.Timer(lasts_s * rng.uniform(0.5, 1.5), self._mend, (kind,)).start()
        elif kind == "second learner":
            on_node(self.node, second_learner, f"http://{self.host}:{self._port}")
        elif kind in ("flip", "partition"):
            (self.folder / kind).touch()
            if kind == "partition" and self.node is None:
                self._orders.send((kind, lasts_s))
        elif self.node is not None and kind in self.shapes:
            self.node.shape(lasts_s, QDISCS[kind])
        elif self.node is not None and kind == MUTE:
            self.node.mute(lasts_s)
        else:
            self._orders.send((kind, lasts_s))

    def _mend(self, kind: str) -> None:
        if kind == "freeze":
            self.signal(signal.SIGCONT)
        else:
            self.join(2.0)
            self.start()
        self.busy_until = time.monotonic() + SETTLES_S

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self._orders.close()
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.join(10.0)
        self._proxy.kill()
        self._proxy.join(5)


class VllmServer(ProxiedServer):
    """A real server of `model`, forked from a process that has imported vLLM. `table`: the folder of the scenes."""

    def start(self) -> None:
        settings = small_server(self.model, self.table)
        write_yaml(self.folder / "server.yaml", {**settings, **REAL_SERVER, "port": self._port})
        environment = os.environ | {TOKEN_VARIABLE: TOKEN, "OMP_WAIT_POLICY": "PASSIVE"}
        argv = ["--config", str(self.folder / "server.yaml")]
        with (self.folder / "log").open("ab") as log:
            self.program = forked.start(forked.SERVER, "rollout_server", argv, env=environment, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self.program.pid

    def signal(self, signum: int) -> None:
        """Freezes hit all its processes; a kill hits the first one, and the others must end by themselves."""
        if signum == signal.SIGKILL:
            os.kill(self.pid, signum)
        else:
            os.killpg(self.pid, signum)

    def join(self, timeout_s: float) -> None:
        self.program.wait(timeout_s)

    def end(self) -> None:
        super().end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # kills what should have ended by itself


# ---- the learner ---------------------------------------------------------------------------------------------------


def learn(config: Path, rank: int, port: int, folder: Path) -> None:
    """Run one rank, in a process of its own. Notes what it accepts, sends and learns."""
    from learner.__main__ import main
    from learner.policy.load import Policy
    from learner.policy.optim import Optimizer
    from learner.rollout import server_backend
    from learner.sync.server_delivery import ServerDelivery

    out = (folder / f"learner{rank}.log").open("ab")
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    group = {"WORLD_SIZE": NUM_RANKS, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in group.items()}, MASTER_ADDR="127.0.0.1")
    os.environ[TOKEN_VARIABLE] = TOKEN
    torch.set_num_threads(1)
    notes = (folder / f"notes{rank}.jsonl").open("a", buffering=1)
    read_rollout, deliver, backward, update = (
        server_backend.read_rollout,
        ServerDelivery.deliver,
        Policy.backward,
        Optimizer.update,
    )

    def note(**values: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk
            notes.write(json.dumps(values) + "\n")

    def accepted(output: Any, **place: Any) -> Any:
        rollout = read_rollout(output, **place)
        note(accepted=output.response.choices[0].message.content, ver=rollout.ver)
        return rollout

    def delivered(self: Any, source: Any, mode: Any, ver: int) -> Any:
        done = deliver(self, source, mode, ver)
        note(sent=str(fingerprint(dict(source.named_weights(self._dtype)))), ver=ver)
        return done

    def learned(self: Any, row: Any) -> Any:
        note(learned=[segment.sample_id for segment in row.segments])
        return backward(self, row)

    def updated(self: Any, *args: Any, **settings: Any) -> Any:
        note(step=True)
        return update(self, *args, **settings)

    note(start=True)
    server_backend.read_rollout, ServerDelivery.deliver = accepted, delivered  # type: ignore[method-assign]
    Policy.backward, Optimizer.update = learned, updated  # type: ignore[method-assign]
    os._exit(main(["train", "--config", str(config)]))


def write_table(model: Path, samples: Path, table: Path, config: Any) -> None:
    """Write what the engine answers: each sample's prompt as the learner encodes it, and its first objects."""
    from learner.policy.load import load_policy
    from learner.tasks.detection.task import DetectionTask
    from learner.wiring.steps import load_data

    policy = load_policy(config.model, device=torch.device("cpu"))
    task = DetectionTask(config.task, policy.tokenizer)
    prompts, answers = {}, {}
    for sample in load_data(config, task, policy.encoder).train:
        key = str(sample.messages[0]["content"])
        prompts[key] = list(policy.encoder.encode(sample).token_ids)
        texts = [task.serialize(sample.objects[:n], after=None).text for n in range(1, len(sample.objects) + 1)]
        answers[key] = [policy.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    vocab_size = policy.model.config.get_text_config().vocab_size
    table.write_bytes(pickle.dumps({"prompts": prompts, "answers": answers, "vocab_size": vocab_size}))


def write_samples(path: Path) -> None:
    lines = []
    for i in range(NUM_SAMPLES):
        boxes = [[4 * i % 60 + k, 3 * k, 4 * i % 60 + 20 + k, 30 + 3 * k] for k in range(1 + i % 3)]
        objects = [{"desc": "three", "bbox_2d": box} for box in boxes]
        turn = {"role": "user", "content": f"Detect every digit of scene {i}."}
        lines.append({"id": f"s{i}", "messages": [turn], "objects": objects, "width": 100, "height": 100})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def learner_config(
    model: Path,
    train: Path,
    folder: Path,
    servers: Sequence[ProxiedServer],
    *,
    scale: Scale = TENSORS,
    ahead: bool = False,
) -> dict[str, Any]:
    entries = [{"base_url": server.url, "group_port": server.group_port} for server in servers]
    server = {"servers": entries, "timeout_s": scale.timeout_s, "infer_timeout_s": scale.infer_timeout_s}
    server["min_servers"] = 1
    sync: dict[str, Any] = {"bucket_bytes": 200_000}
    if scale is TENSORS:
        sync["canary_tolerance"] = 1e9
    vllm = {"mode": "server", "server": server, "sync": sync}
    rollouts = {"decode_batch_size": 4, "decoding": {"max_new_tokens": 64}, "vllm": vllm}
    training = {
        "output_dir": str(folder / "run"),
        "max_steps": 1_000_000,
        "per_device_train_batch_size": BATCH // NUM_RANKS,
        "packing": False,
        "learning_rate": 1e-4,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "collective_timeout_s": 120.0,
        "stop_timeout_s": 20.0,
    }
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(train)},
        "training": training,
        "logging": {"trackers": []},
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": rollouts}},
        "global_max_length": 512,
    }
    if scale is VLLM:
        config |= {"model": {"path": str(model), "dtype": "float32"}, "task": DEMO_TASK, "global_max_length": 1024}
        training |= {"bf16": False, "learning_rate": 1e-5, "save_steps": 4}
        sync["mode"] = "full"
        rollouts["decoding"] = {"temperature": 0.0, "max_new_tokens": 32}
    if ahead:
        training |= {"packing": True, "effective_batch_size": BATCH, "per_device_train_batch_size": 2}
        config["custom"]["trainer_variant"] = "stage2_ab_training"
        config["stage2_ab"] = {
            "schedule": {"b_ratio": 1.0},
            "async_actor_learner": {"enabled": True, "max_starved_steps": 10_000},
        }
    return config


# ---- the campaign --------------------------------------------------------------------------------------------------


class Campaign:
    def __init__(
        self, folder: Path, seed: int, *, ahead: bool, kinds: Sequence[str] | None, loopback: bool, vllm: bool
    ) -> None:
        RUNNING.set_forkserver_preload(["bench.chaos", "learner.wiring.build", "learner.sync.server_delivery"])
        self.folder, self.rng, self.faults = folder, random.Random(seed), list[Fault]()
        self.ahead, self._stack = ahead, contextlib.ExitStack()
        self.scale = VLLM if vllm else TENSORS
        self._make_network(loopback or vllm)
        self.kinds = kinds or (VLLM_FAULTS if vllm else [*FAULTS, *self._more_kinds])
        say("starting servers")
        self.servers = self._vllm_servers() if vllm else self._tensor_servers()
        self.sample_ids = [json.loads(line)["id"] for line in self._train.read_text().splitlines()]
        self._wait_for_servers()
        self.config, self.num_resumed = folder / "run.yaml", 0
        self._write_config()
        self._start_run()

    def _tensor_servers(self) -> Sequence[ProxiedServer]:
        from bench.models import text_model
        from learner.config.load import config_of

        folder = self.folder
        self._model, table, self._train = text_model(folder, "tiny"), folder / "table", folder / "train.jsonl"
        write_samples(self._train)
        config = learner_config(self._model, self._train, folder, [])
        config["custom"] = {"trainer_variant": "sft"}
        write_table(self._model, self._train, table, config_of(config))
        nodes = [self._nodes.get(f"server{i}") for i in range(TENSORS.num_servers)]
        return [ProxiedServer(table, folder / f"server{i}", node, self._shapes) for i, node in enumerate(nodes)]

    def _vllm_servers(self) -> Sequence[ProxiedServer]:
        from bench.models import demo_model
        from deploy.demo.build_data import Build, build

        folder = self.folder
        build(Build(train=NUM_SAMPLES, val=1, test=1), folder / "data")
        self._model, self._train = demo_model(folder), folder / "data" / "train.jsonl"
        names = [f"server{i}" for i in range(VLLM.num_servers)]
        return [VllmServer(folder / "data", folder / name, None, (), VLLM, self._model) for name in names]

    def _write_config(self, **training: Any) -> None:
        place = (self._model, self._train, self.folder, self.servers)
        values = learner_config(*place, scale=self.scale, ahead=self.ahead)
        values["training"] |= training
        write_yaml(self.config, values)

    def _make_network(self, loopback: bool) -> None:
        """Make namespaces if the machine allows them; `network` says how it went."""
        self._hub: Node | None = None
        self._nodes: dict[str, Node] = {}
        self._shapes: list[str] = []
        self._more_kinds: list[str] = []
        self.network = "loopback, as asked for"
        if loopback:
            return
        try:
            names = [f"server{i}" for i in range(TENSORS.num_servers)]
            self._hub, self._nodes = self._stack.enter_context(network(names))
        except NoNamespacesError as refused:
            self.network = f"loopback: {refused}"
            return
        self._shapes = [kind for kind, qdisc in QDISCS.items() if self._nodes["server0"].can_shape(qdisc)]
        self._more_kinds = [MUTE, *(kind for kind in self._shapes if kind not in FAULTS)]
        by_kernel = f"shaped by the kernel: {', '.join(self._shapes) or 'nothing'}"
        self.network = f"a namespace for each server, one for the learner; {by_kernel}"

    def _wait_for_servers(self) -> None:
        start_s = self.scale.start_s
        waiting = on_node(self._hub, wait_for_answers, [server.url for server in self.servers], start_s)
        waiting.join(start_s * len(self.servers) + 5.0)
        if waiting.exitcode != 0:
            raise TimeoutError(f"a server does not answer; see {self.folder}")

    def _start_run(self) -> None:
        (port,) = free_ports(1)
        places = [(self.config, rank, port, self.folder) for rank in range(NUM_RANKS)]
        self.ranks = [on_node(self._hub, learn, *place) for place in places]

    def _resumed(self) -> bool:
        """Return True if the run has ended with a named error and a checkpoint, and goes on from there."""
        for rank in self.ranks:
            rank.join(40)
        said = (self.folder / "learner0.log").read_text().rpartition("resume_from_checkpoint: latest goes on")[2]
        if self._alive() or not re.search(NAMED_ERROR, said, re.M):
            return False
        time.sleep(3.0)  # the last faults end, because all servers must answer at the start
        self._wait_for_servers()
        self._write_config(resume_from_checkpoint="latest")
        number = len(self._steps())
        self._start_run()
        _wait(lambda: len(self._steps()) > number or not self._alive(), 120.0, "step after a resume")
        self.num_resumed += 1
        return self._alive()

    def warm_up(self) -> None:
        say("waiting for the first steps")
        _wait(lambda: len(self._steps()) >= 3 or not self._alive(), 2.0 * self.scale.start_s, "step 3")

    def run(self, seconds: float, pause_s: float, *, fills_disk: bool) -> None:
        self.began_s, end = time.time(), time.monotonic() + seconds
        while time.monotonic() < end and (self._alive() or self._resumed()):
            time.sleep(self._pause_s(pause_s))
            now = time.monotonic()
            quiet = [server for server in self.servers if server.busy_until < now]
            serving = [server for server in quiet if server.url in self._serving()]
            if len(serving) < 2:  # one must be left: losing all would end the run, and rightly so
                continue
            server, kind = self.rng.choice(quiet), self.rng.choice(self.kinds)
            if kind == "kill" and self.scale is VLLM:
                server = self.servers[1]  # the first one lives as long as the campaign
            if kind == "flip" and any((other.folder / "flip").exists() for other in self.servers):
                continue  # a sync is repeated once because of a damaged bucket: a second one rightly ends the run
            self.faults.append(Fault(kind, server.url, time.time()))
            server.hit(kind, self.rng)
        longer_s = max(LASTS_S.values()) * (self.scale.faults - 1.0)
        time.sleep((6.0 if fills_disk else 3.5) + longer_s)  # the last faults end
        self.died_early, self.disk_is_full = not self._alive(), fills_disk
        if fills_disk:
            self.faults.append(Fault(DISK_FULL, "", time.time()))
            self._fill_disk()
        else:
            for rank in self.ranks:
                if rank.is_alive():
                    assert rank.pid is not None
                    os.kill(rank.pid, signal.SIGINT)
        for rank in self.ranks:
            rank.join(40)
        self.ended_s = time.time()

    def _pause_s(self, mean_s: float) -> float:
        """Return the pause until the next fault. With real servers they come at equal distances, but only when both
        serve again."""
        if self.scale is TENSORS:
            return self.rng.expovariate(1.0 / mean_s)
        last_s = self.faults[-1].at_s if self.faults else self.began_s
        return max(0.5, last_s + mean_s - time.time())

    def programs(self) -> dict[str, int]:
        """Return the running programs that are under test."""
        ranks = {f"rank {i}": rank.pid for i, rank in enumerate(self.ranks) if rank.is_alive() and rank.pid}
        return {f"server {i}": server.pid for i, server in enumerate(self.servers)} | ranks

    def _fill_disk(self) -> None:
        """No file of the ranks grows beyond what the metrics have now. Python ignores the signal, so writes fail."""
        num_bytes = (self.folder / "run" / "metrics.jsonl").stat().st_size + 10
        for rank in self.ranks:
            if rank.is_alive():
                assert rank.pid is not None
                resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    def close(self) -> list[str]:
        """End everything; what did not end by itself."""
        left = [f"rank {i}" for i, rank in enumerate(self.ranks) if rank.is_alive()]
        for rank in self.ranks:
            rank.kill()
        for server in self.servers:
            server.end()
        self._stack.close()
        return left

    def _serving(self) -> set[str]:
        from learner.rollout.control import read_state

        return {s["base_url"] for s in read_state(self.folder / "run")["servers"] if s["state"] == "serving"}

    def _alive(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def _steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "step"]

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def notes(self, rank: int) -> Iterator[dict[str, Any]]:
        for line in (self.folder / f"notes{rank}.jsonl").read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


def broken_invariants(campaign: Campaign, left: list[str]) -> list[str]:
    """Return what does not hold, in words."""
    from learner.run.checkpoint import verify

    found = [f"{name} did not end" for name in left]
    notes = [list(campaign.notes(rank)) for rank in range(NUM_RANKS)]
    for part in notes:  # a resumed run counts its versions from what the servers have seen, so they may come again
        starts = accumulate("start" in note for note in part)
        for note, run in zip(part, starts, strict=True):
            note["run"] = run
    sent = {(note["run"], note["ver"]): note["sent"] for note in notes[0] if "sent" in note}
    accepted = [note for part in notes for note in part if "accepted" in note]
    wrong = [note for note in accepted if sent.get((note["run"], note["ver"])) != note["accepted"]]
    if campaign.scale is VLLM:
        wrong = []  # a model's answer does not name its weights
    if wrong or not accepted:
        found.append(f"{len(wrong)} of {len(accepted)} accepted answers by other weights, such as {wrong[:1]}")
    found += (_wrong_counts if campaign.ahead else _wrong_epochs)(notes, campaign.sample_ids)
    calls = [call for event in campaign.events() if event["event"] == "rollout_call" for call in event["calls"]]
    limit_s = campaign.scale.infer_timeout_s + LAST_LOOK_S + 1.0
    late = [call["seconds"] for call in calls if call["seconds"] > limit_s]
    if late:
        found.append(f"{len(late)} of {len(calls)} calls took longer than {limit_s:g} s: up to {max(late):.1f} s")
    codes = [rank.exitcode for rank in campaign.ranks]
    said = (campaign.folder / "learner0.log").read_text()
    # It is asked to stop, which may meet a fault that ends it at that moment.
    ended_well = codes == [130] * NUM_RANKS or (0 not in codes and bool(re.search(NAMED_ERROR, said, re.M)))
    if campaign.disk_is_full:
        ended_well = 0 not in codes and "OutputError" in said
    if campaign.died_early or not ended_well:
        found.append(f"the run ended early, or not with a named error: exit codes {codes}")
    checkpoints = list((campaign.folder / "run").glob("checkpoint-*"))
    for path in checkpoints:
        verify(path)
    if not checkpoints:
        found.append("no checkpoint")
    return found


def _wrong_epochs(notes: list[list[dict[str, Any]]], sample_ids: Sequence[str]) -> list[str]:
    """Each epoch's samples, over all ranks; the last epoch may not be whole."""
    by_rank = []
    for part in notes:
        steps: list[list[str]] = [[]]
        for note in part:
            if "start" in note:
                steps[-1] = []  # the run before it ended in the middle of a step
            steps[-1] += note.get("learned", [])
            if "step" in note:
                steps.append([])
        by_rank.append(steps[:-1])
    whole = [list(chain(*parts)) for parts in zip(*by_rank, strict=False)]
    per_epoch = NUM_SAMPLES // BATCH
    wanted = Counter(sample_ids)
    epochs = [list(chain(*whole[i : i + per_epoch])) for i in range(0, len(whole) - per_epoch + 1, per_epoch)]
    wrong = [i for i, epoch in enumerate(epochs) if Counter(epoch) != wanted]
    return [f"epochs {wrong[:5]} of {len(epochs)} did not learn each sample once"] if wrong or not epochs else []


def _wrong_counts(notes: list[list[dict[str, Any]]], sample_ids: Sequence[str]) -> list[str]:
    """Check a run ahead, whose steps begin before the last ones have ended: no sample falls behind."""
    learned = Counter(chain(*(note.get("learned", []) for part in notes for note in part)))
    counts = [learned[sample_id] for sample_id in sample_ids]
    return [f"samples were learned {min(counts)} to {max(counts)} times"] if max(counts) - min(counts) > 2 else []


def figures_of(campaign: Campaign) -> dict[str, Any]:
    events = campaign.events()
    step_ends = [event["time"] for event in events if event["event"] == "step"]
    lost = [(e["base_url"], e["time"]) for e in events if e["event"] == "server" and e["what"] == "lost"]
    failed = [
        (call["base_url"], call["began_at"] + call["seconds"])
        for event in events
        if event["event"] == "rollout_call"
        for call in event["calls"]
        if call["error"]
    ]
    rows: dict[str, Any] = {}
    for kind in campaign.kinds:
        own = [fault for fault in campaign.faults if fault.kind == kind]
        detections, recoveries = [], []
        for fault in own:
            after = [other.at_s for other in campaign.faults if other.url == fault.url and other.at_s > fault.at_s]
            until_s = min([fault.at_s + NOTICED_WITHIN_S, *after])  # anything later may be the next fault's
            seen = [t - fault.at_s for url, t in lost + failed if url == fault.url and fault.at_s < t < until_s]
            if seen:
                detections.append(min(seen))
            ends = [t - fault.at_s for t in step_ends if t > fault.at_s]
            if len(ends) > 1:
                recoveries.append(ends[1])
        rows[kind] = {
            "number": len(own),
            "noticed": len(detections),
            "detection_s": _spread(detections),
            "recovery_s": _spread(recoveries),
        }
    if campaign.disk_is_full:
        ended = [campaign.ended_s - campaign.faults[-1].at_s]
        rows[DISK_FULL] = {"number": 1, "noticed": 1, "detection_s": _spread(ended), "recovery_s": None}
    gaps = [b - a for a, b in pairwise(step_ends)]
    return {
        "servers": "vLLM" if campaign.scale is VLLM else "tensors",
        "network": campaign.network,
        "faults": len(campaign.faults),
        "resumed": campaign.num_resumed,
        "seconds": round(step_ends[-1] - campaign.began_s, 1) if step_ends else 0.0,
        "steps": len(step_ends),
        "step_s": _spread(gaps),
        "syncs": sum(event["event"] == "sync" for event in events),
        "lost": len(lost),
        "joined": sum(event["event"] == "server" and event["what"] == "joined" for event in events),
        "by_fault": rows,
    }


def _spread(values: list[float]) -> Mapping[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": round(statistics.median(ordered), 3), "p99": round(p99, 3)}


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/", trust_env=False, timeout=1.0).status_code == 200
    except httpx.TransportError:
        return False


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after {timeout_s:g} s")
        time.sleep(0.1)


def chaos(
    folder: Path,
    *,
    seconds: float,
    pause_s: float,
    seed: int,
    fills_disk: bool = True,
    ahead: bool = False,
    loopback: bool = False,
    vllm: bool = False,
    kinds: Sequence[str] | None = None,
    samples: Path | None = None,
) -> tuple[Campaign, list[str]]:
    """Run the campaign; what did not hold. Without `fills_disk` the run is ended by SIGINT. `ahead`: rollouts are made
    ahead of learning. `loopback`: no namespaces. `vllm`: real servers. `kinds`: of faults; by default all that are
    possible. `samples`: a file for what the processes hold meanwhile (`bench.soak`)."""
    campaign = Campaign(folder, seed, ahead=ahead, kinds=kinds, loopback=loopback, vllm=vllm)
    try:
        campaign.warm_up()
        with contextlib.ExitStack() as stack:
            if samples is not None:
                places = {"temporary": Path(tempfile.gettempdir()), "shm": Path("/dev/shm"), "run": folder / "run"}
                stack.enter_context(soak.sampling(campaign.programs, places, SAMPLE_EVERY_S, samples))
            campaign.run(seconds, pause_s, fills_disk=fills_disk)
    finally:
        left = campaign.close()
    return campaign, broken_invariants(campaign, left)


def main(
    seconds: Annotated[float, typer.Option(help="How long faults are injected.")] = 500.0,
    pause_s: Annotated[float, typer.Option(help="Mean pause between two faults.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
    ahead: Annotated[bool, typer.Option(help="Make rollouts ahead of learning (async_actor_learner).")] = False,
    loopback: Annotated[bool, typer.Option(help="No network namespaces, even if there could be.")] = False,
    vllm: Annotated[bool, typer.Option(help="Two real vLLM servers on CPU, and note what all processes hold.")] = False,
    keep: Annotated[Path | None, typer.Option(help="A folder for logs and the run; default: a temporary one.")] = None,
) -> None:
    """Inject faults into the servers of a real run, and check what must hold."""
    from bench import figures

    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or Path(temporary)).resolve()
        samples = (out.with_suffix(".samples.jsonl") if out else folder / "samples.jsonl") if vllm else None
        place: dict[str, Any] = {"ahead": ahead, "loopback": loopback, "vllm": vllm, "samples": samples}
        campaign, broken = chaos(folder, seconds=seconds, pause_s=pause_s, seed=seed, **place)
        result = {**figures.circumstances(), "seed": seed, "ahead": ahead, **figures_of(campaign)}
        if samples is not None:
            result["held"] = soak.figures_of(soak.read_samples(samples))
            broken += soak.grown(result["held"])
        result["broken"] = broken
    text = json.dumps(result, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    print(text)
    for line in broken:
        say(f"DOES NOT HOLD: {line}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    typer.run(main)
