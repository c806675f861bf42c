"""Measure where a colocated sync and its rollouts spend their time: `python -m bench.colocated --data BCCD --out FILE`.

The race's run (`bench.race`) is built in a process of its own, without its training steps, so nothing is compiled for
learning. In turn: a sync, and the rollouts of a step. The first sync is sampled: what compiles there, and in which
functions its time goes. Then come syncs in several ways: as in a run, where the learner scores beside the engine; with
the learner's scores before the load; and without the CUDA graph that a sync replays. Before each the adapter is changed
a little, so the canary checks what was replayed. One way waits for the device at the end of each part, so that its work
counts where it was launched. Merging alone is timed too, against the operations of peft one by one. One sync and one
call of rollouts are profiled. Last, the engine alone gets the same prompts, each rendered by itself, as the rollouts
ask for them, and without seeds, log-probabilities, images, or all of these.

Out: FILE with the seconds and parts of each sync and rollout, the engine's seconds alone, and `exit`: the process's
exit code, and lines of vLLM's allocator among its last words. In `STEM-logs` beside it: `run.log`, all that the process
said; `first-sync.txt`; what Python did (`sync.txt`, `rollouts.txt`, by cProfile) and what the device did
(`sync-device.txt`, `rollouts-device.txt`, by torch's profiler). Profiled calls are slower, so read only shares there.
Without a GPU: `--size tiny`.

With `--engines` there is no learner. Instead bare vLLM makes the same rollouts, in ENGINES one after the other: as in a
run, in a process of its own, and with other settings. FILE gets the seconds of each.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any

import typer

from bench.figures import circumstances
from bench.photographs import PROMPT, Size
from bench.race import GROUP, Photographs, Race, apart, learner_settings, race_of
from bench.runs import read_events, say
from learner.run.environment import prepare_for_vllm
from learner.run.files import write_atomically

_LINES = 60  # a profile shows so many
SAMPLE_S = 0.02
INSIDE = "BENCH_COLOCATED_INSIDE"  # is set in the process that measures
ALLOCATOR = "cumem"
LAST_WORDS_S = 20.0  # compilers that outlive the process a little hold its output
WARM_UP_SYNCS = 3  # each way begins with so many: they capture anew
ALONE: dict[str, tuple[str, ...]] = {
    "as the rollouts": (),
    "no seeds": ("seeds",),
    "no logprobs": ("logprobs",),
    "no images": ("images",),
    "nothing of these": ("seeds", "logprobs", "images"),
}
# Environment and arguments of vLLM.
ENGINES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "as in a run": ({}, {}),
    "in a process of its own": ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, {}),
    "no scheduling ahead": ({}, {"async_scheduling": False}),
    "model runner 1": ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {}),
}


class World:
    """The race's run, ready for its first step. `vllm`: further keys of that section."""

    def __init__(
        self, race: Race, run_dir: Path, stack: ExitStack, vllm: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        import torch

        from learner.config.load import config_of
        from learner.config.plan import resolve
        from learner.policy.parallel import init_ranks
        from learner.rollout.backend import MicroStep
        from learner.rollout.colocate import ColocateBackend
        from learner.wiring.build import build
        from learner.wiring.steps import load_data

        settings = learner_settings(race, run_dir)
        settings["custom"]["extra"]["rollout_matching"]["vllm"] |= vllm
        config = config_of(settings, world_size=1)
        ranks = init_ranks({}, timeout_s=60.0)
        stack.callback(ranks.close)
        self.trainer = build(config, resolve(config, 1), ranks, token=None, stack=stack)
        self._run_dir = run_dir
        assert isinstance(self.trainer.evaluations.backend, ColocateBackend)
        self.backend, self.engine = self.trainer.evaluations.backend, self.trainer.evaluations.backend.engine
        samples = load_data(config, self.trainer.basis.task, self.trainer.policy.encoder).train[: race.photographs]
        together = [sample for sample in samples for _ in range(GROUP)]
        self._window = [MicroStep(samples=together, micro_step_idx=0, first_req_idx=0)]
        self._samples = together
        self.on_gpu = race.on_gpu
        self._wait = torch.cuda.synchronize if race.on_gpu else lambda: None

    def timed(self, work: Callable[[], Any]) -> float:
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - began

    def sync(self) -> None:
        assert self.trainer.syncs.sync is not None
        receipt = self.trainer.syncs.sync.sync()
        self.parts = dict(receipt.parts)
        self.gaps = {"canary_gap": receipt.canary_gap, "merge_gap": receipt.merge_gap}

    @property
    def _delivery(self) -> Any:
        assert self.trainer.syncs.sync is not None
        return self.trainer.syncs.sync._delivery

    @property
    def _scorers(self) -> list[Any]:
        """The canary's, where weights travel otherwise than they are trained."""
        return [way.scorer for way in self._delivery._canary.scorer._sent.values() if way.scorer is not None]

    @property
    def captured(self) -> bool:
        """True if a sync replays the learner's pass."""
        return any(one.is_captured for one in self._scorers)

    def launch_passes(self) -> None:
        """Run the learner's pass from Python from now on."""
        for scorer in self._scorers:
            scorer._record = scorer._graph = None

    def score_before(self) -> None:
        """Let the learner score before the load from now on, and not beside the engine."""
        self._delivery._scores_beside = lambda: False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let each part of a sync wait for the device at its end."""
        delivery, part = self._delivery, self._delivery._part

        @contextmanager
        def waited(name: str) -> Iterator[None]:
            with part(name):
                yield
                self._wait()

        delivery._part = waited
        try:
            yield
        finally:
            del delivery._part

    def change(self) -> None:
        """Change the adapter a little, in place of a step: the canary then sees whether these weights arrive."""
        import torch

        with torch.no_grad():
            for _, parameter in self.trainer.policy.trainable:
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)

    def merges(self) -> dict[str, float]:
        """Return the seconds of merging all adapters once, each the best of five: as a sync does, and as peft does, one
        operation after the other."""
        import torch
        from peft.tuners.lora import LoraLayer

        from learner.policy.weights import merged_weight

        layers: list[Any] = [one for one in self.trainer.policy.model.modules() if isinstance(one, LoraLayer)]
        dtype = self.engine.dtype

        @torch.no_grad()
        def by_peft() -> None:
            for layer in layers:
                (name,) = layer.active_adapters
                delta = (layer.lora_B[name].weight @ layer.lora_A[name].weight).mul_(layer.scaling[name])
                delta.add_(layer.get_base_layer().weight).to(dtype)

        @torch.no_grad()
        def by_sync() -> None:
            for layer in layers:
                merged_weight(layer, dtype)

        ways = {"as a sync": by_sync, "one by one": by_peft}
        return {name: min(self.timed(way) for _ in range(5)) for name, way in ways.items()} if layers else {}

    def rollouts(self) -> None:
        (rollouts,) = self.backend.generate_window(self._window, global_step=1)
        self.num_tokens = sum(len(rollout.response_token_ids) for rollout in rollouts)
        self.parts = read_events(self._run_dir)[-1]["parts"]

    def alone(self, without: Collection[str]) -> float:
        """Return the seconds of the engine for the same prompts, with empty caches."""
        from shared.generation import Prompt, sampling_params

        how = self.backend._decoding.of().model_copy(update={"logprobs": "logprobs" not in without})
        prompts = self.backend._prompts(self._samples)
        if "images" in without:
            prompts = [Prompt(token_ids=list(range(20, 20 + len(prompt.token_ids))), images=[]) for prompt in prompts]
        params = [sampling_params(how, None if "seeds" in without else i) for i in range(len(prompts))]
        vllm = self.engine._llm.llm_engine
        vllm.reset_prefix_cache()
        vllm.reset_encoder_cache()
        with self.engine.awake():
            return self.timed(lambda: self.engine._run(prompts, params))


@contextmanager
def sampled(file: Path) -> Iterator[None]:
    """Look every SAMPLE_S where this thread is. FILE gets the share of the time spent in and below each function, and
    the kernels that triton compiled, by the second."""
    began, here, ended = time.perf_counter(), threading.get_ident(), threading.Event()
    below: Counter[str] = Counter()

    def look() -> None:
        while not ended.wait(SAMPLE_S):
            frame, names = sys._current_frames().get(here), set()
            while frame is not None:
                code = frame.f_code
                names.add(f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_firstlineno} {code.co_qualname}")
                frame = frame.f_back
            below.update(names)
            below["all"] += 1

    compiled: list[str] = []
    with compiling(lambda name: compiled.append(f"{time.perf_counter() - began:7.2f} s  {name}")):
        watcher = threading.Thread(target=look, name="samples", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(timeout=5.0)
    total = max(1, below.pop("all", 0))
    lines = [f"{count / total:6.1%}  {name}" for name, count in below.most_common(150)]
    file.write_text("\n".join(["compiled by triton:", *compiled, "", f"{total} samples:", *lines]) + "\n")


@contextmanager
def compiling(tell: Callable[[str], None]) -> Iterator[None]:
    """`tell` hears the name of each kernel that triton has compiled. Nothing without triton."""
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    before = knobs.runtime.jit_post_compile_hook

    def heard(**kwargs: Any) -> Any:
        tell(str(getattr(kwargs.get("fn"), "name", "?")))
        return before(**kwargs) if before is not None else None

    knobs.runtime.jit_post_compile_hook = heard
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before


@contextmanager
def profiled(logs: Path, name: str, *, on_gpu: bool) -> Iterator[None]:
    """Two files in `logs`: by Python function, and by kernel."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as device, cProfile.Profile() as python:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    text = io.StringIO()
    for order in ("cumulative", "tottime"):
        pstats.Stats(python, stream=text).sort_stats(order).print_stats(_LINES)
    (logs / f"{name}.txt").write_text(text.getvalue())
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = device.key_averages().table(sort_by=by, row_limit=_LINES, max_name_column_width=90)
    (logs / f"{name}-device.txt").write_text(table)


def bare(race: Race, environment: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds of the rollouts by vLLM alone, again and again with empty caches, in this process."""
    prepare_for_vllm(os.environ)
    os.environ.update(environment)
    from vllm import LLM

    from learner.data.prompt import PromptEncoder
    from learner.records import Sample
    from shared.generation import CPU_ENGINE_ARGS, sampling_params
    from shared.images import ImageRules
    from shared.wire import RequestConfig

    began = time.monotonic()
    args: dict[str, Any] = {"gpu_memory_utilization": race.share}
    if not race.on_gpu:
        args = {**CPU_ENGINE_ARGS, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    args |= {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": race.rollouts, "disable_log_stats": True}
    llm = LLM(model=str(race.model), seed=0, **args, **arguments)
    start_s = time.monotonic() - began
    encoder = PromptEncoder.load(str(race.model), rules=ImageRules(roots=((race.data / "images").resolve(),)))
    names = (race.data / "splits" / "train.txt").read_text().split()[: race.photographs]
    files = [str(next((race.data / "images").glob(f"{name}.*"))) for name in names]
    turn = {"role": "user", "content": PROMPT}
    samples = [
        Sample(sample_id=file, messages=(turn,), images=(file,), objects=(), width=640, height=480) for file in files
    ]
    asked = [prompt.for_engine() for prompt in map(encoder.for_engine, samples) for _ in range(GROUP)]
    how = RequestConfig(max_tokens=race.tokens, temperature=1.0, logprobs=True)
    seconds = []
    for _ in range(5):
        llm.llm_engine.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()
        began = time.perf_counter()
        outputs = llm.generate(asked, [sampling_params(how, i) for i in range(len(asked))], use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    llm.llm_engine.engine_core.shutdown()  # otherwise this process would wait for the engine's
    return {"start_s": start_s, "seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}


def inside(race: Race, out: Path, rounds: int, syncs: int, *, brief: bool, options: Mapping[str, Any]) -> None:
    """Measure in this process."""
    logs = out.with_name(f"{out.stem}-logs")
    prepare_for_vllm(os.environ)
    found: dict[str, Any] = {"sync": [], "rollouts": [], "ways": {}, "alone": {}}

    def keep() -> None:
        write_atomically(out, json.dumps({**circumstances(), **options, **found}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="colocated-") as folder, ExitStack() as stack:
        began = time.monotonic()
        world = World(race, Path(folder) / "run", stack)
        found["start_s"] = time.monotonic() - began
        scheduler = world.engine._llm.llm_engine.vllm_config.scheduler_config
        found["async_scheduling"] = getattr(scheduler, "async_scheduling", None)
        say(f"built in {found['start_s']:.0f} s; vLLM schedules ahead: {found['async_scheduling']}")
        for i in range(rounds):
            for name, work in (("sync", world.sync), ("rollouts", world.rollouts)):
                with sampled(logs / "first-sync.txt") if i == 0 and name == "sync" else nullcontext():
                    row = {"seconds": world.timed(work), **world.parts}
                found[name].append(row)
                say(f"{name}: {_row(row)}")
            world.change()
            keep()
        found["tokens"] = world.num_tokens
        found["merges"] = world.merges()
        say(f"merging alone: {_row(found['merges'])}")
        with profiled(logs, "sync", on_gpu=world.on_gpu):
            world.sync()
        _ways(world, found, syncs, keep)
        keep()
        if not brief:
            with profiled(logs, "rollouts", on_gpu=world.on_gpu):
                world.rollouts()
        for name, without in () if brief else ALONE.items():
            found["alone"][name] = [world.alone(without) for _ in range(3)]
            say(f"the engine alone, {name}: " + ", ".join(f"{one:.3f}" for one in found["alone"][name]))
            keep()
    print((logs / "first-sync.txt").read_text().partition("\n\n")[0], flush=True)
    _summary(found, brief=brief)
    keep()


def _ways(world: World, found: dict[str, Any], syncs: int, keep: Callable[[], None]) -> None:
    """Syncs in each way. Each way leaves out what the one before it had, so that one start is enough."""

    def nothing() -> None:
        """Leave it as in a run."""

    ways: dict[str, tuple[Callable[[], None], AbstractContextManager[None]]] = {
        "as in a run": (nothing, nullcontext()),
        "as in a run, waiting for the device after each part": (nothing, world.waiting()),
        "scores before the load": (world.score_before, nullcontext()),
        "nothing captured": (world.launch_passes, nullcontext()),
        "nothing captured, waiting for the device after each part": (nothing, world.waiting()),
    }
    for name, (leave_out, within) in ways.items():
        leave_out()
        rows = []
        with within:
            for _ in range(WARM_UP_SYNCS + syncs):
                world.change()
                rows.append({"seconds": world.timed(world.sync), **world.parts})
        found["ways"][name] = {"captured": world.captured, "syncs": rows[WARM_UP_SYNCS:]}
        found["ways"][name]["median"] = {part: median(row[part] for row in rows[WARM_UP_SYNCS:]) for part in rows[-1]}
        say(f"{name}, median of {syncs}: {_row(found['ways'][name]['median'])}; captured: {world.captured}")
        keep()


def _summary(found: dict[str, Any], *, brief: bool) -> None:
    first, run = found["sync"][0], found["ways"]["as in a run"]["median"]
    rollouts = median(row["seconds"] for row in found["rollouts"][2:])
    print(f"first sync {_row(first)}", flush=True)
    print(f"sync {_row(run)}", flush=True)
    print(f"rollouts {rollouts:.3f} s", flush=True)
    if not brief:
        found["share_of_engine"] = median(found["alone"]["as the rollouts"]) / rollouts
        print(f"the engine alone: {found['share_of_engine']:.3f} of the rollouts", flush=True)


def _row(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {value:.3f}" for part, value in parts.items())


def outside(out: Path) -> int:
    """Run this call again in a process of its own, and note how it ended. Its exit code."""
    logs = out.with_name(f"{out.stem}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.colocated", *sys.argv[1:]]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env={**os.environ, INSIDE: "1"}, **piped)

    def pass_on() -> None:
        with (logs / "run.log").open("w", buffering=1) as log:
            for line in process.stdout or ():
                log.write(line)
                print(line, end="", flush=True)

    reader = threading.Thread(target=pass_on, name="output", daemon=True)
    reader.start()
    code = process.wait()
    reader.join(timeout=LAST_WORDS_S)
    words = [line.strip() for line in (logs / "run.log").read_text().splitlines() if ALLOCATOR in line]
    errors = [line for line in words if "rror" in line]
    if out.is_file():
        found = json.loads(out.read_text())
        write_atomically(out, json.dumps({**found, "exit": {"code": code, "allocator": errors}}, indent=1) + "\n")
    seen = f"{len(errors)} times: {errors[0]}" if errors else "not seen"
    print(f"exit code {code}; an error of vLLM's allocator: {seen}", flush=True)
    return code


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    whole_model: Annotated[bool, typer.Option(help="Train the whole model instead of a LoRA.")] = False,
    photographs: Annotated[Photographs, typer.Option(help="large: scaled to 1,024 image tokens.")] = "published",
    size: Annotated[Size, typer.Option(help="Of the model.")] = "4B",
    rounds: Annotated[int, typer.Option(min=3, help="The first two are warm-up.")] = 6,
    syncs: Annotated[int, typer.Option(min=1, help="In each way, after the warm-up.")] = 8,
    share: Annotated[float, typer.Option(help="Of the GPU's memory, for vLLM.")] = 0.3,
    scratch: Annotated[Path, typer.Option(help="For the model and large photographs, kept there.")] = Path("/dev/shm"),
    brief: Annotated[bool, typer.Option(help="Only syncs and rollouts: no profiles, no engine alone.")] = False,
    engines: Annotated[bool, typer.Option(help="Bare vLLM in several settings, without a learner.")] = False,
) -> None:
    """Measure syncs and rollouts, and where their time goes."""
    options: dict[str, Any] = {"size": size, "photographs": photographs, "whole_model": whole_model}
    race = race_of(data, scratch, steps=rounds, share=share, **options)
    if engines:
        rows: dict[str, Any] = {}
        for name, settings in ENGINES.items():
            rows[name] = apart(bare, race, *settings)
            say(f"{name}: " + ", ".join(f"{one:.3f}" for one in rows[name]["seconds"]))
            write_atomically(out, json.dumps({**circumstances(), **options, "engines": rows}, indent=1) + "\n")
        return
    if os.environ.get(INSIDE):
        inside(race, out, rounds, syncs, brief=brief, options=options)
    else:
        sys.exit(outside(out))


if __name__ == "__main__":
    typer.run(main)
