"""A row that is learned alone, and the same row beside rollouts: `python -m bench.run --part jitter`.

One packed row of the policy's own answers, always the same one, is learned again and again by the product's
`Policy.backward`, in these ways:

- alone: no server runs.
- idle: a server that serves nobody runs on the same GPU.
- apart: the server generates; a process of its own sends, reads, parses, matches and makes segments.
- beside: the server generates; threads of the learner's process do that work, as in a run within its step.
- beside, long turns: the same with Python's own turns of the interpreter's lock (5 ms), which a run shortens
  (`shorten_turns`).

What `apart` takes more than `idle`, the GPU and the cores take: they are shared. What `beside` takes more than `apart`
is the learner's own process: its threads hold the interpreter's lock while the learner wants to launch kernels. With
`server_gpu` 1 the learner has the first GPU for itself.

Out, per way, of a row: wall seconds; seconds of the thread that learns on a core, and waiting for a core; and on CUDA
seconds between an event before and one after the row's kernels, and seconds in kernels (one row under torch's
profiler). What is left of the wall is waiting: for the device, or for the lock. On stderr: where the thread that learns
and the threads of the rollouts stand, by a sampling profiler in rows that do not count; it samples when it has the
lock, so a line that waits for the lock is seen more often than its share.

Rounds of `idle`, `apart` and `beside` take turns. The server has no weights of the learner's own: nothing is synced.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from bench.figures import Figure, sampled
from bench.models import VisionSize, vision_model
from bench.runs import learner_config, say, serve, served_by, small_server
from deploy.demo.build_data import Build
from deploy.demo.build_data import build as build_data
from deploy.launch import Process, Processes, supervised
from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.data.prompt import PromptEncoder
from learner.extensions import make_task
from learner.policy.load import Policy, load_policy
from learner.records import PackedRow, Segment
from learner.rollout.backend import MicroStep
from learner.rollout.server_backend import ServerBackend
from learner.run.environment import shorten_turns
from learner.steps.packing import pack_all
from learner.steps.segments import RolloutSource
from learner.tasks.rewards import Rewards
from learner.wiring.build import load_data
from shared.errors import DeadlineError

Way = Literal["alone", "idle", "apart", "beside", "beside, long turns"]
BESIDE_A_SERVER: tuple[Way, ...] = ("idle", "apart", "beside", "beside, long turns")
ROUNDS = 3
WARM_UP_ROWS = 3
SAMPLES = 64  # a step's, and a call's
SHOWN_LINES = 12
PYTHONS_TURN_S = 0.005
SAMPLE_EVERY_S = 0.002
_START_S = 180.0  # time for the producer's process to import and to connect
_STOP_S = 60.0
_KV_CACHE_BYTES = 8 << 30
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTimes:
    """Seconds of one row. `cpu_s`, `runnable_s`: of the thread that learns, on a core and waiting for one. `device_s`:
    between two events on the device."""

    wall_s: float
    cpu_s: float
    runnable_s: float
    device_s: float | None = None

    @property
    def waiting_s(self) -> float:
        """The time in which the thread was neither on a core nor waiting for one, but for the device or for the
        interpreter's lock."""
        return max(0.0, self.wall_s - self.cpu_s - self.runnable_s)


@dataclass(kw_only=True, slots=True)
class WayTimes:
    """The measurements of one way."""

    rows: list[RowTimes] = field(default_factory=list)
    kernels_s: float | None = None
    lines: dict[str, Counter[str]] = field(default_factory=dict)  # each thread's lines, and how often it stood there
    answers: int = 0
    answers_cpu_s: float = 0.0  # the threads' that made segments of them


def measure(
    folder: Path,
    *,
    size: VisionSize = "demo",
    rows: int = 10,
    row_tokens: int = 4096,
    max_new_tokens: int = 192,
    server_gpu: int = 0,
    compile: bool | None = None,
) -> Iterator[Figure]:
    """Measure `rows` of `row_tokens` in each of ROUNDS rounds of each way. `compile` None: as a run decides."""
    on_gpu = torch.cuda.is_available()
    shorten_turns()
    model, data = vision_model(folder, size), folder / "jitter-data"
    build_data(Build(train=2 * SAMPLES, val=0, test=0, style="hard"), data)
    measured: dict[Way, WayTimes] = {}
    with supervised() as processes:
        settings = small_server(
            model,
            data,
            on_gpu=on_gpu,
            max_num_seqs=SAMPLES,
            graph_sizes=_GRAPH_SIZES,
            gpu_memory_utilization=0.3,
            kv_cache_bytes=_KV_CACHE_BYTES,
        )
        server = serve(processes, folder, "jitter-server", settings, devices=[server_gpu] if on_gpu else ())
        config = run_config(model, data, folder / "run", served_by(server), row_tokens, max_new_tokens, compile)
        learner = Learner(config)
        with Producing(config) as producing, ProducerProcess(processes, folder, config) as apart:
            learner.row = pack_all(producing.call(), row_tokens)[0]
            say(f"a row of {len(learner.row.segments)} answers, {learner.row.num_tokens} tokens")
            learner.rows(WARM_UP_ROWS)  # compiles
            beside: Mapping[Way, Callable[[], Any]] = {
                "idle": nothing,
                "apart": apart.running,
                "beside": producing.running,
                "beside, long turns": lambda: long_turns(producing),
            }
            for _ in range(ROUNDS):
                for way in BESIDE_A_SERVER:
                    learner.measure(measured.setdefault(way, WayTimes()), rows, beside[way])
            for way in BESIDE_A_SERVER:
                learner.look_closely(measured[way], rows, beside[way])
            measured["beside"].answers, measured["beside"].answers_cpu_s = producing.answers, producing.cpu_s
        processes.forget(server.process)
    alone = measured.setdefault("alone", WayTimes())
    for _ in range(ROUNDS):
        learner.measure(alone, rows, nothing)
    learner.look_closely(alone, rows, nothing)
    for way, found in measured.items():
        say(shown(way, found))
    yield from figures(measured)


def run_config(
    model: Path,
    data: Path,
    run_dir: Path,
    vllm: Mapping[str, Any],
    row_tokens: int,
    max_new_tokens: int,
    compile: bool | None,
) -> RunConfig:
    matching = {
        "decode_batch_size": SAMPLES,
        "decoding": {"temperature": 1.0, "max_new_tokens": max_new_tokens},
        "vllm": vllm,
    }
    return config_of(
        learner_config(
            model,
            data / "train.jsonl",
            run_dir,
            steps=1,
            batch_size=SAMPLES,
            matching=matching,
            model={"dtype": "bfloat16" if torch.cuda.is_available() else "float32"}
            | ({} if compile is None else {"compile": compile}),
            data={"num_workers": 0},
            task={"iou_threshold": 0.3},
            global_max_length=row_tokens,
        )
    )


def figures(measured: Mapping[Way, WayTimes]) -> Iterator[Figure]:
    """Yield what a row took in each way, and what it took more beside rollouts."""
    for way, found in measured.items():
        yield sampled(f"{way}: a row", [row.wall_s for row in found.rows], "s")
        yield sampled(f"{way}: the learning thread on a core", [row.cpu_s for row in found.rows], "s")
        yield sampled(f"{way}: it waits for a core", [row.runnable_s for row in found.rows], "s")
        yield sampled(f"{way}: it waits for the device or the lock", [row.waiting_s for row in found.rows], "s")
        if device := [row.device_s for row in found.rows if row.device_s is not None]:
            yield sampled(f"{way}: between the row's events on the device", device, "s")
        if found.kernels_s is not None:
            yield Figure(name=f"{way}: the row's kernels", value=found.kernels_s, unit="s")
    walls = {way: sampled("", [row.wall_s for row in found.rows], "s").value for way, found in measured.items()}
    for way, other in (
        ("idle", "alone"),
        ("apart", "idle"),
        ("beside", "apart"),
        ("beside", "alone"),
        ("beside, long turns", "beside"),
    ):
        if way in walls and other in walls:
            yield Figure(name=f"a row {way} against {other}", value=walls[way] / walls[other], unit="ratio")
    beside = measured.get("beside")
    if beside is not None and beside.answers:
        value = 1000.0 * beside.answers_cpu_s / beside.answers
        yield Figure(name="the rollouts' threads on a core, per answer", value=value, unit="ms")


def shown(way: Way, found: WayTimes) -> str:
    """Return the lines at which each thread stood most often."""
    text = [f"{way}: where the threads stand"]
    for name, lines in found.lines.items():
        total = sum(lines.values())
        text.append(f"  {name}, {total} samples")
        text += [f"    {count / total:6.1%}  {line}" for line, count in lines.most_common(SHOWN_LINES)]
    return "\n".join(text)


# ---- the learner's side ----------------------------------------------------------------------------------------------


class Learner:
    """A policy on the first GPU, or on the CPU, and the row that it learns. The thread that calls is the one that
    learns."""

    row: PackedRow

    def __init__(self, config: RunConfig) -> None:
        on_gpu = torch.cuda.is_available()
        self._device = torch.device("cuda:0" if on_gpu else "cpu")
        self._policy: Policy = load_policy(config.model, device=self._device, bf16=on_gpu)
        say(f"not compiled: {self._policy.why_not_compiled}" if self._policy.why_not_compiled else "compiled")

    def measure(self, found: WayTimes, rows: int, beside: Callable[[], Any]) -> None:
        """Learn `rows` rows inside `beside()`."""
        with beside():
            found.rows += self.rows(rows)

    def look_closely(self, found: WayTimes, rows: int, beside: Callable[[], Any]) -> None:
        """Look at the same under profilers. Their times do not count."""
        with beside():
            with sampling() as found.lines:
                self.rows(rows)
            if self._device.type == "cuda":
                with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                    self.rows(1)
                found.kernels_s = sum(e.self_device_time_total for e in profiled.key_averages()) / 1e6

    def rows(self, number: int) -> list[RowTimes]:
        return [self._one() for _ in range(number)]

    def _one(self) -> RowTimes:
        self._policy.model.zero_grad(set_to_none=False)
        self._wait()
        on_gpu = self._device.type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        wall_s, (cpu_s, runnable_s) = time.perf_counter(), schedule(threading.get_native_id())
        if events:
            events[0].record()
        self._policy.backward(self.row)
        if events:
            events[1].record()
        self._wait()
        end_s, (cpu_end_s, runnable_end_s) = time.perf_counter(), schedule(threading.get_native_id())
        return RowTimes(
            wall_s=end_s - wall_s,
            cpu_s=cpu_end_s - cpu_s,
            runnable_s=runnable_end_s - runnable_s,
            device_s=events[0].elapsed_time(events[1]) / 1000.0 if events else None,
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def schedule(native_id: int) -> tuple[float, float]:
    """Return seconds that a thread of this process was on a core, and that it waited for one (Linux)."""
    on_core, runnable, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    return int(on_core) / 1e9, int(runnable) / 1e9


@contextmanager
def long_turns(producing: Producing) -> Iterator[None]:
    """`producing.running()`, with the turns of a Python that nobody has changed."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS_TURN_S)
    try:
        with producing.running():
            yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def sampling(every_s: float = SAMPLE_EVERY_S) -> Iterator[dict[str, Counter[str]]]:
    """Sample where the threads of this process stand meanwhile, by their names; threads that wait for work are left
    out."""
    lines: dict[str, Counter[str]] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != threading.get_ident() and (line := where(frame)):
                    lines.setdefault(names.get(ident, "unnamed"), Counter())[line] += 1

    thread = threading.Thread(target=look, name="sampler", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join(_STOP_S)


# Functions in which a thread waits for work; `__iter__` of server_backend.py waits for an answer.
_WAITS = {"wait", "select", "poll", "get", "_recv_bytes", "accept"}


def where(frame: FrameType) -> str:
    """Return the innermost line, and the innermost one of this project below which it was called; empty if the thread
    waits for work."""
    code = frame.f_code
    name = Path(code.co_filename).name
    if code.co_name in _WAITS or (name, code.co_name) == ("server_backend.py", "__iter__"):
        return ""
    inner = f"{name}:{frame.f_lineno} {code.co_name}"
    ours: FrameType | None = frame
    while ours is not None and not _is_ours(ours.f_code.co_filename):
        ours = ours.f_back
    if ours is None or ours is frame:
        return inner
    return f"{inner} < {Path(ours.f_code.co_filename).name}:{ours.f_lineno} {ours.f_code.co_name}"


_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = tuple(str(_ROOT / name) for name in ("learner", "shared"))


def _is_ours(file: str) -> bool:
    return file.startswith(_ROOMS)


# ---- the rollouts' side ----------------------------------------------------------------------------------------------


class Producing:
    """Segments of answers of real servers, call after call, made as a run within its step makes them: a thread of its
    own reads each answer as it ends, and the client's loop has another. To be used as a context."""

    def __init__(self, config: RunConfig) -> None:
        self._encoder = PromptEncoder.load(config.model.path, rules=config.data.image_rules)
        task = make_task(config.task, self._encoder.tokenizer)
        self._backend = ServerBackend(config.rollout_matching, run_seed=config.training.seed)
        self._source = RolloutSource(
            self._backend,
            task,
            Rewards(tokenizer=self._encoder.tokenizer, functions={}, weights={}, task=task),
            loss=config.loss,
            image_processing=self._encoder.image_processing,
        )
        self._samples = load_data(config, task, self._encoder).train[:SAMPLES]
        self._prompts = [self._encoder.encode(sample) for sample in self._samples]
        self._calls = 0
        self._error: BaseException | None = None
        self.answers, self.cpu_s = 0, 0.0

    def __enter__(self) -> Producing:
        self._backend.connect()
        return self

    def __exit__(self, *exc: object) -> None:
        self._backend.close()

    def call(self) -> list[Segment]:
        """Return the segments of one call, in order."""
        self._calls += 1
        step = MicroStep(samples=self._samples, micro_step_idx=0, first_req_idx=0)
        stream = self._source.stream(step, self._prompts, global_step=self._calls)
        try:
            ended = dict(stream)
        finally:
            stream.close()
        return [ended[i] for i in range(len(self._samples))]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make one call after the other meanwhile, from the moment at which the first one has answered. Raises what
        ended them, DeadlineError."""
        ended, first = threading.Event(), threading.Event()

        def run() -> None:
            own, loop = threading.get_native_id(), self._loop_id()
            before = schedule(own)[0] + schedule(loop)[0]
            try:
                while not ended.is_set():
                    self.answers += len(self.call())
                    first.set()
            except BaseException as error:  # the thread's edge: the caller raises it
                self._error = error
            finally:
                first.set()
                self.cpu_s += schedule(own)[0] + schedule(loop)[0] - before

        thread = threading.Thread(target=run, name="rollout-producer", daemon=True)
        thread.start()
        try:
            _in_time(first.wait(_START_S), "the first answers", _START_S)
            yield
        finally:
            ended.set()
            thread.join(_STOP_S)
        if self._error is not None:
            raise self._error
        _in_time(not thread.is_alive(), "the last answers", _STOP_S)

    def _loop_id(self) -> int:
        (found,) = (thread.native_id for thread in threading.enumerate() if thread.name == "rollout-client")
        assert found is not None, "the client's loop runs"
        return found


class ProducerProcess:
    """`Producing` in a process of its own, which works between a line "go" and a line "stop"."""

    def __init__(self, processes: Processes, folder: Path, config: RunConfig) -> None:
        path = folder / "jitter-producer.json"
        path.write_text(config.model_dump_json())
        argv = [sys.executable, "-c", "from bench.jitter import produce; produce()", str(path)]
        self._log = (folder / "jitter-producer.log").open("wb")
        self._popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self._process = Process("jitter-producer", self._popen)  # type: ignore[arg-type]
        self._processes = processes
        processes.started.append(self._process)

    def __enter__(self) -> ProducerProcess:
        self._answer("ready")
        return self

    def __exit__(self, *exc: object) -> None:
        self._processes.forget(self._process)
        self._log.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._say("go")
        self._answer("answered")
        yield
        self._say("stop")
        self._answer("stopped")

    def _say(self, word: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(word + "\n")
        self._popen.stdin.flush()

    def _answer(self, wanted: str) -> None:
        """Raises DeadlineError."""
        found: list[str] = []
        assert self._popen.stdout is not None
        thread = threading.Thread(target=lambda: found.append(self._popen.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        thread.start()
        thread.join(_START_S)
        said = found[0].strip() if found else "nothing"
        _in_time(said == wanted, f"{wanted!r} of the producer's process, which said {said!r}", _START_S)


def produce() -> None:
    """Run the producer's process."""
    config = RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    with Producing(config) as producing:
        print("ready", flush=True)
        while sys.stdin.readline().strip() == "go":
            with producing.running():
                print("answered", flush=True)
                sys.stdin.readline()
            print("stopped", flush=True)


def _in_time(met: bool, what: str, deadline_s: float) -> None:
    if not met:
        raise DeadlineError(
            f"{what} did not come in time", found=f"{deadline_s:g} s", wanted="an answer", remedy="see the server's log"
        )
