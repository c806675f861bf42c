"""Two learner nodes and two servers, each in a network namespace of its own (R05, R17, R24): no loopback joins them.

The learner nodes run plain `torchrun --nnodes 2` with a c10d rendezvous, the servers listen on their node's address and
want a token. One run of two steps; every test looks at another side of what it left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.demo_model import build
from bench.forked import SERVER, Forked, start
from deploy.demo import build_data
from tests import runs
from tests.namespaces import Node, network
from tests.servers import DEFAULTS, stop

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PORT, GROUP_PORT, RENDEZVOUS_PORT = 8000, 51216, 29400  # free: each node has all ports to itself
TOKEN = "several-nodes"
NUM_STEPS = 2
ROLLOUTS_PER_STEP = 8
READY_S, LEARN_S = 300.0, 240.0
SERVERS, LEARNERS = ("server-0", "server-1"), ("learner-0", "learner-1")


@dataclass(frozen=True)
class Run:
    folder: Path
    nodes: dict[str, Node]
    traffic: dict[str, tuple[int, int]]  # bytes in and out of each node, when the learner had ended
    without_token: str  # server-0's answer to learner-1's request

    def events(self, event: str) -> list[dict[str, Any]]:
        return runs.events(self.folder / "run", event)

    def log(self, rank: int) -> str:
        return (self.folder / "run" / f"learner_rank{rank}.log").read_text()

    @property
    def urls(self) -> list[str]:
        return [f"http://{self.nodes[name].address}:{PORT}" for name in SERVERS]

    @property
    def model_bytes(self) -> int:
        return (self.folder / "model" / "model.safetensors").stat().st_size


def learner_config(folder: Path, urls: Sequence[str]) -> Path:
    rollouts = {
        "decode_batch_size": 4,
        "decoding": {"temperature": 1.0, "max_new_tokens": 16},
        "vllm": {"mode": "server", "server": {"base_url": list(urls), "group_port": [GROUP_PORT] * len(urls)}},
    }
    config = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": NUM_STEPS,
            "effective_batch_size": ROLLOUTS_PER_STEP,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "save_on_end": False,
            "collective_timeout_s": 90.0,
        },
        "logging": {"trackers": []},
        "custom": {"trainer_variant": "stage2_ab_training", "extra": {"rollout_matching": rollouts}},
        "stage2_ab": {"schedule": {"b_ratio": 1.0}},
        "global_max_length": 512,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def torchrun(node: Node, meeting_place: Node) -> list[str]:
    """Return torchrun's arguments as README.md has them. `is_host` is for this test alone: here all nodes have one
    machine's name."""
    flags = {
        "--nnodes": "2",
        "--nproc-per-node": "1",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{meeting_place.address}:{RENDEZVOUS_PORT}",
        "--rdzv-conf": f"is_host={node == meeting_place}",
        "--local-addr": node.address,
    }
    return ["-m", "torch.distributed.run", *(f"{name}={value}" for name, value in flags.items())]


@dataclass(frozen=True)
class World:
    """Starts programs on nodes, each with its output in a file, and leaves none behind."""

    folder: Path
    nodes: dict[str, Node]
    stack: contextlib.ExitStack

    def serve(self, name: str) -> Forked:
        """Start a server, forked (`bench.forked`)."""
        path, node = self.folder / f"{name}.yaml", self.nodes[name]
        config = {"model": str(self.folder / "model"), "host": node.address, "port": PORT}
        path.write_text(yaml.safe_dump({**DEFAULTS, **config, "allowed_image_roots": [str(self.folder)]}))
        environment = {**os.environ, "ROLLOUT_SERVER_TOKEN": TOKEN, "NO_PROXY": "*"}
        with self.path(name).open("wb") as out:
            process = start(
                SERVER,
                "rollout_server",
                ["--config", str(path)],
                env=environment,
                stdout=out,
                stderr=out,
                node=node.pid,
            )
        self.stack.callback(stop, process)
        return process

    def start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "ROLLOUT_SERVER_TOKEN": TOKEN, "NO_PROXY": "*", "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with self.path(name).open("wb") as out:
            process = subprocess.Popen(
                [*self.nodes[name].enter, sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.stack.callback(stop, process)
        return process

    def finish(self, processes: dict[str, subprocess.Popen[bytes]], timeout_s: float) -> None:
        """All must end well; where one does not, the test fails with everyone's last words."""
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < deadline:
            if any(process.poll() for process in processes.values()):
                break
            time.sleep(0.05)
        codes = {name: process.poll() for name, process in processes.items()}
        assert set(codes.values()) == {0}, f"{codes} after at most {timeout_s:g} s\n{self.last_words()}"

    def last_words(self) -> str:
        return "\n".join(f"--- {path.stem}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("multinode")
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(network([*SERVERS, *LEARNERS]))
        world = World(folder, nodes, stack)
        build(folder / "model", "tiny", seed=0)
        build_data.build(build_data.Build(train=NUM_STEPS * ROLLOUTS_PER_STEP, val=0, test=1), folder)
        servers = [world.serve(name) for name in SERVERS]
        config = str(learner_config(folder, [f"http://{nodes[name].address}:{PORT}" for name in SERVERS]))
        wait = ["-m", "deploy.wait_ready", "--config", config, "--timeout-s", str(READY_S)]
        world.finish({"learner-0": world.start("learner-0", wait)}, READY_S + 30.0)
        refusal = ask_without_token(nodes["learner-1"], nodes["server-0"])
        launcher = {name: torchrun(nodes[name], nodes["learner-0"]) for name in LEARNERS}
        learn = ["-m", "learner", "--config", config]
        world.finish({name: world.start(name, [*launcher[name], *learn]) for name in LEARNERS}, LEARN_S)
        traffic = {name: node.traffic() for name, node in nodes.items()}
        for server in servers:  # both at once; each is waited for when the stack closes
            server.terminate()
        yield Run(folder, nodes, traffic, refusal)


def ask_without_token(node: Node, server: Node) -> str:
    command = [*node.enter, sys.executable, "-c", ASK, f"http://{server.address}:{PORT}/status/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0).stdout


ASK = """
import sys, urllib.error, urllib.request
try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=30)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


def test_every_step_is_one_update_of_both_nodes(finished: Run) -> None:
    """R24, R31: two ranks, one on each node, share each step."""
    steps = finished.events("step")
    assert [(step["channel"], step["num_segments"]) for step in steps] == [("B", ROLLOUTS_PER_STEP)] * NUM_STEPS
    assert finished.events("plan")[0]["world_size"] == 2


def test_both_servers_were_synced_before_each_step(finished: Run) -> None:
    """R09, R10: from node learner-0 alone, over the servers' own addresses, and checked on each of them."""
    syncs = finished.events("sync")
    assert [sync["global_step"] for sync in syncs] == list(range(NUM_STEPS))
    assert all(sync["canary_gap"] < 0.05 for sync in syncs), syncs
    for name in SERVERS:
        received, _ = finished.traffic[name]
        assert received > NUM_STEPS * finished.model_bytes


def test_each_node_asks_the_servers_of_its_share(finished: Run) -> None:
    """R07: rank 0's slots are the first half of the line, which is the first server's; rank 1's are the second's."""
    calls = [call for event in finished.events("rollout_call") for call in event["calls"]]
    assert {call["base_url"] for call in calls} == {finished.urls[0]}
    assert not any(call["error"] for call in calls)
    asked = re.findall(r"CallRecord\(base_url='([^']+)'.*?error='([^']*)'", finished.log(1))
    assert set(asked) == {(finished.urls[1], "")}


def test_gradients_cross_the_network_between_the_nodes(finished: Run) -> None:
    """Every byte between the ranks went over the nodes' own addresses, though the machine's name may mean the loopback:
    in a namespace the other node's loopback can't be reached at all."""
    received, sent = finished.traffic["learner-1"]
    assert min(received, sent) > NUM_STEPS * finished.model_bytes / 2


def test_a_node_without_the_token_is_refused(finished: Run) -> None:
    assert finished.without_token.startswith("401 ")
