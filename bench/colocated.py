"""Measure where a colocated sync and its rollouts spend their time: `python -m bench.colocated --data BCCD --out FILE`.

The race's run (`bench.race`) is built in this process, without its training steps, so nothing is compiled for learning.
In turn: a sync, and the rollouts of a step. One of each is profiled. Then come syncs whose canary launches every kernel
of the learner's layers from Python, in place of CUDA graphs. Last, the engine alone gets the same prompts, each
rendered by itself, as the rollouts ask for them, and without seeds, log-probabilities, images, or all of these.

Out: FILE with the seconds and parts of each sync and rollout, and the engine's seconds alone. In `STEM-logs` beside
it: what Python did (`sync.txt`, `rollouts.txt`, by cProfile) and what the device did (`sync-device.txt`,
`rollouts-device.txt`, by torch's profiler). Profiled calls are slower, so read only shares there. Without a GPU:
`--size tiny`.

With `--engines` there is no learner. Instead bare vLLM makes the same rollouts, in ENGINES one after the other: as in a
run, in a process of its own, and with other settings. FILE gets the seconds of each.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench.figures import circumstances
from bench.photographs import PROMPT, Size
from bench.race import GROUP, Photographs, Race, apart, learner_settings, race_of
from bench.runs import read_events, say
from learner.run.environment import prepare_for_vllm
from learner.run.files import write_atomically

_LINES = 60  # a profile shows so many
WAYS: dict[str, tuple[str, ...]] = {
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
    """The race's run, ready for its first step."""

    def __init__(self, race: Race, run_dir: Path, stack: ExitStack) -> None:
        import torch

        from learner.config.load import config_of
        from learner.config.plan import resolve
        from learner.policy.parallel import init_ranks
        from learner.rollout.backend import MicroStep
        from learner.rollout.colocate import ColocateBackend
        from learner.wiring.build import build, load_data

        config = config_of(learner_settings(race, run_dir), world_size=1)
        ranks = init_ranks({}, timeout_s=60.0)
        stack.callback(ranks.close)
        self.trainer = build(config, resolve(config, 1), ranks, token=None, stack=stack)
        self._run_dir = run_dir
        assert isinstance(self.trainer.backend, ColocateBackend)
        self.backend, self.engine = self.trainer.backend, self.trainer.backend.engine
        samples = load_data(config, self.trainer.task, self.trainer.policy.encoder).train[: race.photographs]
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
        assert self.trainer.sync is not None
        self.parts = dict(self.trainer.sync.sync().parts)

    def launch_layers(self) -> None:
        """Run the canary's layers from Python from now on."""
        assert self.trainer.sync is not None
        scorer: Any = self.trainer.sync._delivery._canary.scorer  # type: ignore[attr-defined]
        for way in scorer._sent.values():
            way.scorer._layers = None

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


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    whole_model: Annotated[bool, typer.Option(help="Train the whole model instead of a LoRA.")] = False,
    photographs: Annotated[Photographs, typer.Option(help="large: scaled to 1,024 image tokens.")] = "published",
    size: Annotated[Size, typer.Option(help="Of the model.")] = "4B",
    rounds: Annotated[int, typer.Option(min=3, help="The first two are warm-up.")] = 6,
    share: Annotated[float, typer.Option(help="Of the GPU's memory, for vLLM.")] = 0.3,
    scratch: Annotated[Path, typer.Option(help="For the model and large photographs, kept there.")] = Path("/dev/shm"),
    brief: Annotated[bool, typer.Option(help="Without the engine alone, and without profiles.")] = False,
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
    logs = out.with_name(f"{out.stem}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    prepare_for_vllm(os.environ)
    found: dict[str, Any] = {"sync": [], "rollouts": [], "sync_without_graphs": [], "alone": {}}

    def keep() -> None:
        write_atomically(out, json.dumps({**circumstances(), **options, **found}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="colocated-") as folder, ExitStack() as stack:
        began = time.monotonic()
        world = World(race, Path(folder) / "run", stack)
        found["start_s"] = time.monotonic() - began
        scheduler = world.engine._llm.llm_engine.vllm_config.scheduler_config
        found["async_scheduling"] = getattr(scheduler, "async_scheduling", None)
        say(f"built in {found['start_s']:.0f} s; vLLM schedules ahead: {found['async_scheduling']}")
        for _ in range(rounds):
            for name, work in (("sync", world.sync), ("rollouts", world.rollouts)):
                row = {"seconds": world.timed(work), **world.parts}
                found[name].append(row)
                say(f"{name}: " + ", ".join(f"{part} {value:.3f}" for part, value in row.items()))
        found["tokens"] = world.num_tokens
        keep()
        for name, work in () if brief else (("sync", world.sync), ("rollouts", world.rollouts)):
            with profiled(logs, name, on_gpu=world.on_gpu):
                work()
        world.launch_layers()
        for _ in range(3):
            found["sync_without_graphs"].append({"seconds": world.timed(world.sync), **world.parts})
            say("sync without graphs: " + ", ".join(f"{part} {value:.3f}" for part, value in world.parts.items()))
        keep()
        for name, without in () if brief else WAYS.items():
            found["alone"][name] = [world.alone(without) for _ in range(3)]
            say(f"the engine alone, {name}: " + ", ".join(f"{one:.3f}" for one in found["alone"][name]))
            keep()
    sync_s, whole = (median(row["seconds"] for row in found[name][2:]) for name in ("sync", "rollouts"))
    print(f"sync {sync_s:.3f} s, rollouts {whole:.3f} s", flush=True)
    if not brief:
        found["share_of_engine"] = median(found["alone"]["as the rollouts"]) / whole
        keep()
        print(f"the engine alone: {found['share_of_engine']:.3f} of the rollouts", flush=True)


if __name__ == "__main__":
    typer.run(main)
