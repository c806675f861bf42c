"""Measure what rolling out while learning saves in `stage2_ab_training`: in turn, within the step, ahead of the steps.

Out: figures of two kinds. Simulated: the real step sources, dispatcher and pipeline, with a sleep for every rollout,
row and sync. All time that is not sleep is the product's own. Real: one server, and a learner run per way, as processes
with one thread each; figures are read from the runs' `metrics.jsonl`.

Wanted: a step whose rollouts run beside its learning takes at most 0.60 of the sum of both, and until its last request
is sent, at least 0.95 of the servers' places are in use. With rollouts ahead, the learner learns at least 0.9 of its
time, and makes at least 1.6 times the steps of one that waits for each step's rollouts. All but the second assume that
rollouts take as long as learning, so the measured ratio is a figure too. A simulated step has twelve rows:
with R rows no step can take less than (R + 1) / 2R of the sum, because learning begins with the first full row.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, cast, get_args

import numpy as np

from bench.figures import Figure, median, sampled
from bench.models import demo_model, demo_scenes
from bench.runs import Events, Server, learner_config, serve, served_by, start_learner, steps_of
from bench.training import DEMO_TASK
from deploy.launch import supervised
from learner.data.batches import Batches, MicroBatch, ShareReader
from learner.data.encoding import LocalPool
from learner.data.sampler import DistributedSampler
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import Channel, EncodedPrompt, Sample, Segment
from learner.rollout.backend import MicroStep
from learner.rollout.distribution import Answered, Batch, Dispatcher, distribute
from learner.rollout.server_backend import LoopThread
from learner.steps.ahead import Stage2Ahead
from learner.steps.in_step import Overlap, Stage2InStep
from learner.steps.packing import CompleteRows
from learner.steps.segments import SegmentSource, SegmentStream, StreamingSource
from learner.steps.shares import Bounds
from learner.steps.source import StepSource
from learner.steps.stage2 import Stage2Parts

Way = Literal["in turn", "within the step", "ahead"]
WANTED_WALL, WANTED_CAP_USE, WANTED_BUSY, WANTED_SPEED = 0.60, 0.95, 0.9, 1.6
SAMPLES_PER_STEP = 48
SAMPLES_PER_ROW = 4
ROWS_PER_STEP = SAMPLES_PER_STEP // SAMPLES_PER_ROW
SEGMENT_TOKENS = 4
SERVERS, DECODE_BATCH_SIZE = 2, 2  # simulated
REAL_SAMPLES_PER_STEP = 32  # keeps the sync before each step short in comparison
REAL_ROW_TOKENS = 640  # four or five of the demo's segments
WARM_UP_STEPS = 3
SLOWER = 1.15  # rollouts that take a little longer than learning must not halve Channel-B's share
_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of one step; `rollout_s`: while a call was running, beside learning or not."""

    channel: Channel
    wall_s: float
    learn_s: float
    rollout_s: float
    sync_s: float  # ends before the step: nothing runs beside a sync
    cap_use: float | None = None  # share of the servers' places in use until the last request was sent


def measure(folder: Path, *, num_steps: int = 20) -> Iterator[Figure]:
    """Yield both kinds of figures."""
    yield from figures("simulated", {way: simulate(way, num_steps=num_steps) for way in get_args(Way)})
    slower = simulate("ahead", num_steps=num_steps, balance=SLOWER)
    share = sum(step.channel == "B" for step in slower) / len(slower)
    name = f"simulated: Channel-B share, ahead, rollouts {SLOWER:g} of learning"
    yield Figure(name=name, value=share, unit="of steps")
    yield from figures("real server", _real(folder, num_steps // 2))


def figures(kind: str, runs: dict[Way, list[Step]]) -> list[Figure]:
    """Figures of the steps after the warm-up, by way."""
    walls = [(s.wall_s - s.sync_s) / (s.rollout_s + s.learn_s) for s in runs["within the step"] if s.channel == "B"]
    ahead = runs["ahead"]
    busy = sum(s.learn_s for s in ahead) / sum(s.wall_s for s in ahead)
    share = sum(s.channel == "B" for s in ahead) / len(ahead)
    speed = _channel_b_rate(ahead) / _channel_b_rate(runs["in turn"])
    wall_name = f"{kind}: step without its sync against rollout + learning, within the step"
    uses = [step.cap_use for step in runs["within the step"] if step.cap_use is not None]
    use_name = f"{kind}: servers' places in use until a step's last request is sent, within the step"
    return [
        sampled(wall_name, walls, "ratio", at_most=WANTED_WALL),
        *([sampled(use_name, uses, "of all", at_least=WANTED_CAP_USE)] if uses else []),
        Figure(name=f"{kind}: learner busy, ahead", value=busy, unit="of the time", wanted=WANTED_BUSY),
        Figure(name=f"{kind}: steps/s, ahead against in turn", value=speed, unit="ratio", wanted=WANTED_SPEED),
        Figure(name=f"{kind}: Channel-B share, ahead", value=share, unit="of steps"),
        *(
            Figure(name=f"{kind}: rollouts against learning, {way}", value=_balance(steps), unit="ratio")
            for way, steps in runs.items()
        ),
        *(
            Figure(name=f"{kind}: step, {way}", value=median([s.wall_s for s in steps]), unit="s")
            for way, steps in runs.items()
        ),
    ]


def _channel_b_rate(steps: Sequence[Step]) -> float:
    return sum(s.channel == "B" for s in steps) / sum(s.wall_s for s in steps)


def _balance(steps: Sequence[Step]) -> float:
    return sum(s.rollout_s for s in steps) / sum(s.learn_s for s in steps)


# ---- simulated -----------------------------------------------------------------------------------------------------


def simulate(
    way: Way, *, num_steps: int, each_s: float = 0.01, sync_s: float = 0.01, balance: float = 1.0
) -> list[Step]:
    """Every step wants Channel-B; a sample takes `each_s` to learn, and `balance` times that of the servers' time."""
    server = SleepingServer(each_s * balance)
    source = _source(way, server)
    steps = [_simulated_step(source, server, index, each_s, sync_s) for index in range(WARM_UP_STEPS + num_steps)]
    source.stop()
    source.close()
    server.loop.close(_DEADLINE_S)
    return steps[WARM_UP_STEPS:]


def _simulated_step(source: StepSource, server: SleepingServer, index: int, each_s: float, sync_s: float) -> Step:
    learned_s, rolled_s, synced_s = 0.0, server.slept_s, 0.0
    begin = time.perf_counter()

    def sync() -> float:
        with source.fence() as fence:
            seconds = sleep(sync_s)
            server.ver += 1
            fence.synced(server.ver, updates=index)
        return seconds

    waits = False
    if source.wants_sync(index) and not (waits := source.postpones_sync(index)):
        synced_s = sync()
    channel = source.begin(index)
    for rows in source.micro_steps():
        for row in rows:
            learned_s += sleep(each_s * len(row.segments))
            if waits and source.is_quiet():
                waits, synced_s = False, sync()
    if waits:
        synced_s = sync()
    wall_s = time.perf_counter() - begin
    return Step(
        channel=channel,
        wall_s=wall_s,
        learn_s=learned_s,
        rollout_s=server.slept_s - rolled_s,
        sync_s=synced_s,
        cap_use=server.cap_use,
    )


def _source(way: Way, server: SleepingServer) -> StepSource:
    parts = Stage2Parts(
        b_ratio=1.0,
        packs_per_step=ROWS_PER_STEP,
        ranks=Ranks(),
        batches=cast(Batches, RepeatedBatch(SAMPLES_PER_STEP)),
        ground_truth=GroundTruth(),
        rollouts=server,
        row_maker=CompleteRows(capacity=SEGMENT_TOKENS * SAMPLES_PER_ROW),
        clock=PhaseClock(),
    )
    if way != "ahead":
        overlap = Overlap(rollouts=server, capacity=SEGMENT_TOKENS * SAMPLES_PER_ROW, in_order=False)
        return Stage2InStep(parts, overlap=overlap if way == "within the step" else None, deadline_s=_DEADLINE_S)
    samples, _ = some_samples(SAMPLES_PER_STEP)
    return Stage2Ahead(
        parts,
        ShareReader(
            samples,
            DistributedSampler(len(samples), num_ranks=1, rank=0, samples_per_rank=len(samples), seed=0),
            LocalPool(EmptyPrompts()),
        ),
        bounds=Bounds(start_below=2 * ROWS_PER_STEP, keep_at_most=3 * ROWS_PER_STEP, version_window=1),
        samples_per_pack=SAMPLES_PER_ROW,
        capacity=SERVERS * DECODE_BATCH_SIZE,
        total_steps=1_000_000,
        max_starved_steps=1_000_000,
        deadline_s=_DEADLINE_S,
    )


def sleep(seconds: float) -> float:
    """Sleep. Returns the seconds that it took."""
    begin = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begin


class SleepingServer(SegmentSource, StreamingSource):
    """Rollouts that only sleep, in proportion to their number."""

    channel: Channel = "B"
    needs_rollouts = True

    def __init__(self, each_s: float) -> None:
        self.ver, self.slept_s, self.each_s = 0, 0.0, each_s
        self.cap_use: float | None = None  # the last stream's
        self.loop = LoopThread("sleeping-servers")

    def segments(self, step: MicroStep, prompts: Sequence[EncodedPrompt], **place: Any) -> list[Segment]:
        ver = self.ver
        self.slept_s += sleep(self.each_s * len(step.samples))
        return [_segment(sample, ver) for sample in step.samples]

    def stream(self, step: MicroStep, prompts: Sequence[EncodedPrompt], **place: Any) -> SegmentStream:
        return SleepingStream(self, step.samples)


class SleepingStream(SegmentStream):
    """The stream that the product's dispatcher gets from servers whose answers take 0.5 to 1.5 of their mean time."""

    def __init__(self, server: SleepingServer, samples: Sequence[Sample]) -> None:
        self._server, self._samples = server, samples
        self._ended: SimpleQueue[int | None] = SimpleQueue()
        self._places = SERVERS * DECODE_BATCH_SIZE
        self._in_flight, self._num_sent = 0, 0
        self._used, self._since = 0.0, 0.0  # places x seconds in use, up to when
        self._future = server.loop.submit(self._roll_out())
        self._future.add_done_callback(lambda _: self._ended.put(None))

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        while (place := self._ended.get()) is not None:
            yield place, _segment(self._samples[place], self._server.ver)

    def close(self) -> None:
        self._future.cancel()

    async def _roll_out(self) -> None:
        plan = distribute(
            len(self._samples),
            rank=0,
            num_ranks=1,
            server_world_sizes=[1] * SERVERS,
            decode_batch_size=DECODE_BATCH_SIZE,
        )
        self._began = self._since = time.perf_counter()
        await Dispatcher(
            plan, send=self._send, on_answer=lambda place, _: self._ended.put(place), on_split=lambda *_: None
        ).run()
        self._server.slept_s += time.perf_counter() - self._began

    async def _send(self, server: int, batch: Batch, answered: Answered[None]) -> None:
        self._count(len(batch))
        self._num_sent += len(batch)
        if self._num_sent == len(self._samples):  # the end follows, with nothing left to send
            seconds = time.perf_counter() - self._began
            self._server.cap_use = self._used / (self._places * seconds) if seconds > 0.0 else None
        await asyncio.gather(*(self._answer(place, answered) for place in range(batch.start, batch.stop)))

    async def _answer(self, place: int, answered: Answered[None]) -> None:
        share = random.Random(place).uniform(0.5, 1.5)
        await asyncio.sleep(share * self._places * self._server.each_s)
        self._count(-1)
        answered(place, None)

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        self._used += self._in_flight * (now - self._since)
        self._since, self._in_flight = now, self._in_flight + change


class GroundTruth(SegmentSource):
    """Channel-A's segments, at once."""

    channel: Channel = "A"
    needs_rollouts = False

    def segments(self, step: MicroStep, prompts: Sequence[EncodedPrompt], **place: Any) -> list[Segment]:
        return [_segment(sample, None) for sample in step.samples]


class RepeatedBatch:
    """The same share for every step of one long epoch."""

    per_epoch = 1_000

    def __init__(self, size: int) -> None:
        self._taken: set[int] = set()
        samples, prompts = some_samples(size)
        self._batch = MicroBatch(
            samples=samples, prompts=prompts, epoch=0, micro_batch=0, first_req_idx=0, ends_epoch=False
        )

    def __next__(self) -> MicroBatch:
        return self.take(self.left(0)[0])

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def take(self, position: int, **_: Any) -> MicroBatch:
        self.skip(position)
        return self._batch

    def skip(self, position: int) -> None:
        self._taken.add(position)

    def left(self, epoch: int) -> list[int]:
        first = epoch * self.per_epoch
        return [position for position in range(first, first + self.per_epoch) if position not in self._taken]


class EmptyPrompts:
    def encode(self, sample: Sample) -> EncodedPrompt:
        return EncodedPrompt(token_ids=(1,), vision=None)


def some_samples(number: int) -> tuple[tuple[Sample, ...], tuple[EncodedPrompt, ...]]:
    """Samples without content, and their prompts."""
    samples = (Sample(sample_id=str(i), messages=(), images=(), objects=(), width=1, height=1) for i in range(number))
    return tuple(samples), (EncodedPrompt(token_ids=(1,), vision=None),) * number


def _segment(sample: Sample, ver: int | None) -> Segment:
    ids = np.zeros(SEGMENT_TOKENS, dtype=np.int64)
    weights = ids.astype(np.float32)
    return Segment(
        sample_id=sample.sample_id, input_ids=ids, labels=ids, loss_weights=weights, prompt_length=1, ver=ver
    )


# ---- real ----------------------------------------------------------------------------------------------------------


def _real(folder: Path, num_steps: int) -> dict[Way, list[Step]]:
    """Run the three ways one after the other against one server."""
    model, data = demo_model(folder), demo_scenes(folder)
    runs: dict[Way, list[Step]] = {}
    with supervised() as processes:
        settings = {"model": str(model), "allowed_image_roots": [str(data)], "cpu_threads": 1}
        server = serve(processes, folder, "stage2_server", settings)
        for way in get_args(Way):
            name = way.replace(" ", "_")
            config = real_run(way, model, data, folder / name, server, num_steps)
            # Learner and server have one thread each, so that two cores are enough.
            learner = start_learner(processes, folder, name, config, prefix=("env", "OMP_NUM_THREADS=1"))
            runs[way] = _steps(learner.events())
    return runs


def _steps(events: Events) -> list[Step]:
    """The steps after the warm-up. Rollouts beside learning count like those that the learner waited for."""
    return [
        Step(
            channel=step["channel"],
            wall_s=step["step_s"],
            learn_s=step["learn_s"],
            rollout_s=step.get("rollout_s", 0.0) + step.get("stage2_ab/rollout_s", 0.0),
            sync_s=step.get("sync_s", 0.0),
        )
        for step in steps_of(events)[WARM_UP_STEPS:]
    ]


def real_run(way: Way, model: Path, data: Path, run_dir: Path, server: Server, num_steps: int) -> dict[str, Any]:
    matching = {
        "rollout_backend": "vllm",
        "decode_batch_size": 2,  # few at once, so that rollouts take about as long as learning
        "decoding": {"temperature": 1.0, "max_new_tokens": 96},
        "vllm": served_by(server),
    }
    # Packs of two steps. With packs of one step, a step that lacks one pack does not help the next step.
    queue = {"prefetch_target_packs": 2 * REAL_SAMPLES_PER_STEP, "queue_limit": 3 * REAL_SAMPLES_PER_STEP}
    return learner_config(
        model,
        data / "train.jsonl",
        run_dir,
        steps=WARM_UP_STEPS + num_steps,
        batch_size=REAL_SAMPLES_PER_STEP,
        per_device=1,
        variant="stage2_ab_training",
        matching=matching,
        model={"dtype": "float32"},
        task=DEMO_TASK,
        # A row has one sample in the two ways that are compared. The third needs packing.
        training={"packing": way == "within the step", "learning_rate": 1.0e-5, "bf16": False},
        logging={"trackers": []},
        stage2_ab={"schedule": {"b_ratio": 1.0}, "async_actor_learner": {"enabled": way == "ahead", **queue}},
        global_max_length=REAL_ROW_TOKENS,
    )
