"""One GRPO step on one GPU, here and elsewhere: `python -m bench.race --data BCCD --out FILE --against swift`.

The same work on all sides: Qwen3-VL-4B's shape with random weights, LoRA of rank 64 on all linear layers (or the whole
model), colocated vLLM, 8 photographs x 8 rollouts x 256 tokens, gradient checkpointing, one update. The sides run one
after the other, each in a process of its own. Random models end no answer, so all answers have the same length.
`race_trl.py`, `race_swift.py` and `race_unsloth.py` say the rivals' settings. A rival's own packages are in
`SITES/site-SIDE`, if there is such a folder.

Out: tables, and FILE with all steps. Per side: its versions, seconds of a step and of its phases, the first step's
seconds, the most memory that the GPU had in use, and how busy it was, both from the end of the warm-up on, answers a
second, and the share of the matmul rate. Here also the parts of a sync and of the rollouts. Each step is printed and
written when it ends, so FILE keeps what was measured if a call is cut off. A side that fails is named with its last
words. The same call again runs only the sides that have not ended. Logs are beside FILE, in `STEM-logs`. Without a
GPU: `--size tiny`.

The share of the matmul rate is that of learning's FLOPs in a step: of each answer with its whole prompt, forward and
for gradients, nothing twice. It is the same number for all sides, whatever they do.

The floor of a phase is the time that the GPU needs at least, at the copy bandwidth and the matmul rate that are
measured here: rollouts read the weights and all keys and values once per token, learning multiplies matrices three
times per token (forward, again for the backward pass, gradients of activations; with the whole model also gradients of
weights), a sync copies the weights once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar, cast, get_args
from xml.etree import ElementTree

import typer
from PIL import Image

from bench.demo_model import build as build_small_model
from bench.figures import check_options, circumstances, markdown_table
from bench.models import build_photograph_model
from bench.photographs import LORA, PROMPT, Size
from bench.photographs import photographs as section_of
from bench.runs import Events, last_words, learner_config, read_events, say, start_learner, steps_of, visible
from bench.watch import GpuUse, gpu_use
from deploy.launch import Process, Processes, supervised
from learner.run.files import write_atomically
from shared.addresses import free_port
from shared.errors import DeadlineError, ProjectError, ServerError

Rival = Literal["trl", "trl-best", "swift", "unsloth"]
Side = Literal["ours", Rival]
Photographs = Literal["published", "large"]
T = TypeVar("T")
WARM_UP_STEPS = 2
GROUP = 8
LARGE = (1500, 1100)  # pixels: 1,024 image tokens for the 4B shape; as published: 640 x 480, 300
_GPU_EVERY_MS = 100
_LAST_LINES = 30  # shown of a log, if a side fails
_MOST_ERROR = 800  # characters of a failed side's last words in FILE
# Rivals ask hubs even for what is there.
_OFFLINE = ("HF_HUB_OFFLINE=1", "USE_HF=1", "UNSLOTH_DISABLE_STATISTICS=1")
PHASES = ("rollout_s", "learn_s", "sync_s", "data_s", "target_s", "pack_s", "other_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The work of one step, the same for all sides."""

    model: Path
    data: Path  # photographs with VOC annotations
    steps: int
    photographs: int
    tokens: int  # an answer's
    row_tokens: int  # the learner's rows'
    context: int  # the engines': most tokens of a prompt and its answer
    whole_model: bool
    on_gpu: bool
    share: float  # vLLM's share of the GPU's memory
    compile_engine: bool  # this project's
    limit_s: float  # a side's time limit

    @property
    def rollouts(self) -> int:
        return self.photographs * GROUP


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """`steps`: each one's seconds by name, the warm-up included; `sync/NAME` and `rollout/NAME` are parts of phases.
    `start`: seconds from the process's start until it said so. `gpu`: its use after the warm-up. `failed`: its last
    words."""

    side: str
    ended: bool
    run_s: float
    steps: Sequence[Mapping[str, float]]
    start: Mapping[str, float]
    gpu: Mapping[str, float]
    versions: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""

    def median_s(self, name: str) -> float:
        """Return the median of the steps after the warm-up, or the last one if there are not that many."""
        return median(step.get(name, 0.0) for step in self.steps[WARM_UP_STEPS:] or self.steps[-1:])


class RaceResults:
    """FILE: what each side has measured so far."""

    def __init__(self, path: Path, work: Mapping[str, Any]) -> None:
        """Raises DataError if FILE is of another race."""
        self._path, self._work = path, json.loads(json.dumps(work, default=str))
        before: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        if before:
            check_options(path, before["race"], self._work)
        self.sides = {side["side"]: SideResult(**side) for side in before.get("sides", [])}
        self.floors: Mapping[str, float] = before.get("floors", {})

    def lacks(self, side: str) -> bool:
        return side not in self.sides or not self.sides[side].ended

    def fail(self, side: str, run_s: float, words: str) -> None:
        """Keep a failed side's last words beside the steps that it has reached."""
        none = SideResult(side=side, ended=False, run_s=run_s, steps=(), start={}, gpu={})
        self.put(replace(self.sides.get(side, none), failed=words[-_MOST_ERROR:]))

    def put(self, result: SideResult) -> None:
        self.sides[result.side] = result
        self.write()

    def write(self) -> None:
        found = {"sides": [asdict(one) for one in self.sides.values()], "floors": dict(self.floors)}
        write_atomically(self._path, json.dumps({**circumstances(), "race": self._work, **found}, indent=1) + "\n")


@dataclass(kw_only=True, slots=True)
class RunningSide:
    """A side that runs: what it said is printed and kept when it says so."""

    side: str
    read: Callable[[], tuple[Mapping[str, float], Sequence[Mapping[str, float]]]]  # its start and its steps so far
    results: RaceResults
    versions: Callable[[], Mapping[str, str]] = dict
    began_s: float = field(default_factory=time.monotonic)
    _num_said: int = 0

    def look(self) -> int:
        """The number of its steps so far."""
        start, steps = self.read()
        said = [f"{name} after {seconds:.0f} s" for name, seconds in start.items()]
        said += [f"step {i}: {_phases(step)}" for i, step in enumerate(steps, 1)]
        for line in said[self._num_said :]:
            say(f"{self.side}: {line}")
        if len(said) > self._num_said and steps:
            self.results.put(self._result(ended=False, gpu={}))
        self._num_said = len(said)
        return len(steps)

    def run(self, wait: Callable[..., None], limit_s: float) -> None:
        """Wait for its end. Raises ServerError or DeadlineError; what it said until then is kept."""
        deadline = self.began_s + limit_s
        wait(limit_s, until=lambda: self.look() >= WARM_UP_STEPS)
        with gpu_use(_GPU_EVERY_MS, visible(0)) as used:
            wait(max(1.0, deadline - time.monotonic()), until=lambda: self.look() < 0)
        self.look()
        first: GpuUse | None = next(iter(used.values()), None)
        self.results.put(self._result(ended=True, gpu={} if first is None else asdict(first)))

    def _result(self, *, ended: bool, gpu: Mapping[str, float]) -> SideResult:
        start, steps = self.read()
        run_s = time.monotonic() - self.began_s
        versions = self.versions()
        return SideResult(
            side=self.side, ended=ended, run_s=run_s, steps=steps, start=start, gpu=gpu, versions=versions
        )


def _phases(step: Mapping[str, float]) -> str:
    """Return a step's seconds in a line, without what takes no time."""
    parts = [f"{name.removesuffix('_s')} {step[name]:.2f}" for name in PHASES if step.get(name, 0.0) >= 0.01]
    return ", ".join([f"{step['step_s']:.2f} s", *parts])


def learner_settings(race: Race, run_dir: Path) -> dict[str, Any]:
    """Return this project's side."""
    vllm: dict[str, Any] = {
        "mode": "colocate",
        "gpu_memory_utilization": race.share,
        "max_model_len": race.context,
        "compile": race.compile_engine,
    }
    if not race.on_gpu:
        vllm |= {"enforce_eager": True, "cpu_kv_cache_gib": 1}
    return learner_config(
        race.model,
        race.data,
        run_dir,
        steps=race.steps,
        batch_size=race.rollouts,
        variant="grpo",
        matching={
            "decode_batch_size": race.rollouts,
            "decoding": {"temperature": 1.0, "max_new_tokens": race.tokens},
            "vllm": vllm,
        },
        model={
            "dtype": "bfloat16" if race.on_gpu else "float32",
            "gradient_checkpointing": True,
            **({} if race.whole_model else LORA),
        },
        training={"learning_rate": 1e-5, "bf16": race.on_gpu, "save_on_end": False},
        grpo={"num_generations": GROUP},
        task={"container": "array", "coordinates": "digits"},
        logging={"trackers": []},
        data={**section_of(race.data), "num_workers": 8 if race.on_gpu else 0},
        # A step in two rows takes 0.13 s longer, and 8 GB less.
        global_max_length=race.row_tokens,
    )


def run_ours(processes: Processes, folder: Path, race: Race, results: RaceResults) -> None:
    config = learner_settings(race, folder / "ours")
    began_at = time.time()
    learner = start_learner(processes, folder, "ours", config, ranks=None, devices=[0] if race.on_gpu else ())

    def read() -> tuple[Mapping[str, float], Sequence[Mapping[str, float]]]:
        events = read_events(learner.run_dir)
        said = {event["event"]: event["time"] - began_at for event in events if event["event"] in ("plan", "data")}
        return said, steps_with_parts(events)

    RunningSide(side="ours", read=read, results=results).run(learner.wait, race.limit_s)


def steps_with_parts(events: Events) -> list[dict[str, float]]:
    """A run's steps, with the parts of the sync and of the generation call that came before each ended."""
    names = ("step_s", *PHASES, "num_tokens", "rollout_tokens")
    found: list[dict[str, float]] = []
    parts: dict[str, float] = {}
    for event in events:
        kind = {"sync": "sync", "rollout_call": "rollout"}.get(event["event"])
        if kind:
            parts |= {f"{kind}/{name}": seconds for name, seconds in event.get("parts", {}).items()}
        elif event["event"] == "step":
            (step,) = steps_of([event])
            found.append({name: step[name] for name in names if name in step} | parts)
            parts = {}
    return found


def run_rival(side: Rival, processes: Processes, folder: Path, race: Race, results: RaceResults, sites: Path) -> None:
    """Run a rival in a process of its own, which writes what it has reached, and the seconds of each step."""
    said, log = folder / f"{side}.jsonl", folder / f"{side}.log"
    paths = {"model": str(race.model), "data": str(race.data), "out": str(said), "prompt": PROMPT}
    lora = None if race.whole_model else LORA["lora"]
    settings = json.dumps({**asdict(race), **paths, "side": side, "group": GROUP, "lora": lora, "port": free_port()})
    path = os.pathsep.join([str((sites / f"site-{side}").resolve()), os.environ.get("PYTHONPATH", "")])
    module = f"bench.race_{side.partition('-')[0]}"
    compiled = f"UNSLOTH_COMPILE_LOCATION={folder / 'unsloth'}"
    argv = ["env", *_OFFLINE, compiled, f"PYTHONPATH={path}", sys.executable, "-m", module, settings]
    process: Process = processes.start(side, argv, devices=visible(0) if race.on_gpu else (), log=log)

    def rows(key: str) -> list[dict[str, Any]]:
        lines = said.read_text().splitlines(keepends=True) if said.is_file() else []
        return [row for line in lines if line.endswith("\n") and key in (row := json.loads(line))]

    def read() -> tuple[Mapping[str, float], Sequence[Mapping[str, float]]]:
        return {row["reached"]: row["seconds"] for row in rows("reached")}, rows("step_s")

    def wait(timeout_s: float, *, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while (code := process.popen.poll()) is None and not until():
            if time.monotonic() > deadline:
                process.stop(1.0)
                raise DeadlineError(f"{side} did not end in time", found=last_words(log), wanted=f"{timeout_s:g} s")
            time.sleep(0.1)
        if code:
            raise ServerError(f"{side} failed", found=f"exit code {code}; {last_words(log)}", wanted="0")

    def versions() -> Mapping[str, str]:
        return next((row["versions"] for row in rows("versions")), {})

    RunningSide(side=side, read=read, results=results, versions=versions).run(wait, race.limit_s)


def enlarged(data: Path, folder: Path, number: int) -> Path:
    """Return the first `number` training photographs and their annotations, scaled to LARGE, in `folder`."""
    if (folder / "splits" / "train.txt").is_file():
        return folder
    for name in ("images", "voc", "splits"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    names = (data / "splits" / "train.txt").read_text().split()[:number]
    for name in names:
        with Image.open(next((data / "images").glob(f"{name}.*"))) as photograph:
            scale = dict(zip("xy", (LARGE[0] / photograph.width, LARGE[1] / photograph.height), strict=True))
            photograph.convert("RGB").resize(LARGE, Image.Resampling.BICUBIC).save(folder / "images" / f"{name}.jpg")
        tree = ElementTree.parse(data / "voc" / f"{name}.xml")
        for side, axis, pixels in (("width", "x", LARGE[0]), ("height", "y", LARGE[1])):
            tree.find(f"size/{side}").text = str(pixels)  # type: ignore[union-attr]
            for end in ("min", "max"):
                for corner in tree.iterfind(f"object/bndbox/{axis}{end}"):
                    corner.text = str(min(pixels, round(float(corner.text or 0) * scale[axis])))
        tree.find("filename").text = f"{name}.jpg"  # type: ignore[union-attr]
        tree.write(folder / "voc" / f"{name}.xml")
    (folder / "splits" / "train.txt").write_text("\n".join(names) + "\n")
    return folder


def floors(race: Race, num_tokens: float) -> dict[str, float]:
    """Return the seconds of each phase of this side's step, in which `num_tokens` are learned."""
    import torch

    def seconds(work: Callable[[], object], times: int = 10) -> float:
        work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    source = torch.randint(255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / seconds(lambda: square @ square)
    text = json.loads((race.model / "config.json").read_text())["text_config"]
    weight_bytes = sum(file.stat().st_size for file in race.model.glob("*.safetensors"))
    head = text["vocab_size"] * text["hidden_size"]  # parameters, which only learned tokens meet
    kv_bytes = 2 * 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]  # a token's
    answers = race.rollouts * race.tokens
    prompts = (num_tokens - answers) / race.photographs  # tokens of one
    read = weight_bytes + race.rollouts * (prompts + race.tokens / 2) * kv_bytes
    passes = 4 if race.whole_model else 3
    multiplied = 2 * passes * ((weight_bytes / 2 - head) * num_tokens + head * answers)
    found = {"rollout_s": race.tokens * read / bandwidth, "learn_s": multiplied / rate}
    found["sync_s"] = 2 * weight_bytes / bandwidth
    whole = (weight_bytes / 2 - head) * race.rollouts * (prompts + race.tokens) + head * answers
    tflop = 2 * (3 if race.whole_model else 2) * whole / 1e12
    return {"step_s": sum(found.values()), **found, "bandwidth_gb_s": bandwidth / 1e9, "rate_tflop_s": rate / 1e12} | {
        "learn_tflop": tflop
    }


def table(results: Sequence[SideResult], rollouts: int, floors: Mapping[str, float]) -> str:
    """Return medians after the warm-up; the factor is over the first side."""
    measured = [one for one in results if one.steps]
    phases = [name for name in PHASES if any(one.median_s(name) >= 0.005 for one in measured)]
    names = [name.removesuffix("_s") for name in phases]
    head = ["side", "step s", *names, "first step s", "busy", "memory GB", "answers/s", "share", "x"]
    share = floors.get("learn_tflop", 0.0) / floors.get("rate_tflop_s", 1.0)
    rows = [
        [
            one.side if one.ended else f"{one.side}, cut off",
            f"{one.median_s('step_s'):.2f}",
            *(f"{one.median_s(name):.2f}" if name in one.steps[-1] else "" for name in phases),
            f"{one.steps[0]['step_s']:.1f}",
            f"{one.gpu['busy_mean']:.2f}" if one.gpu else "",
            f"{one.gpu['memory_mib'] * 2**20 / 1e9:.1f}" if one.gpu else "",
            f"{rollouts / one.median_s('step_s'):.1f}",
            f"{share / one.median_s('step_s'):.3f}" if share else "",
            f"{one.median_s('step_s') / measured[0].median_s('step_s'):.2f}",
        ]
        for one in measured
    ]
    lines = markdown_table(head, rows) if rows else []
    for one in results:
        lines += [f"{one.side}: {', '.join(map(' '.join, one.versions.items()))}"] if one.versions else []
        lines += [f"{one.side} cannot run: {one.failed}"] if one.failed else []
    return "\n".join(lines)


def parts_lines(result: SideResult) -> list[str]:
    """Return where a sync's and a generation call's time goes, one line each: medians in seconds."""
    lines = []
    for phase in ("sync", "rollout"):
        names = [name for name in result.steps[-1] if name.startswith(f"{phase}/")]
        parts = {name.split("/")[1]: result.median_s(name) for name in names}
        parts["rest"] = result.median_s(f"{phase}_s") - sum(parts.values())
        lines.append(f"{phase}: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items()))
    return lines


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Do `work` in a process of its own, so that this one holds no memory of the GPU while the sides run."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def race_of(
    data: Path,
    scratch: Path,
    *,
    size: Size,
    photographs: Photographs,
    steps: int,
    whole_model: bool,
    share: float,
    row_tokens: int | None = None,
    compile_engine: bool = True,
    limit_s: float = 0.0,
) -> Race:
    """Return the race with these options; makes the model and the large photographs in `scratch`, if they are not
    there. `row_tokens` None: a step's rollouts fit one row."""
    on_gpu, is_large = size == "4B", photographs == "large"
    model = scratch / f"photographs-{size}"
    if not (model / "config.json").is_file():
        say("making the model")
        apart(build_photograph_model if on_gpu else build_small_model, model, *([] if on_gpu else ["tiny"]))
    folder = enlarged(data, scratch / "photographs-large", 64) if is_large else data
    return Race(
        model=model,
        data=folder.resolve(),
        steps=steps,
        photographs=8 if on_gpu else 2,
        tokens=256 if on_gpu else 24,
        row_tokens=row_tokens or (4096 if not on_gpu else 26_624 if is_large else 20_480),
        # TRL 1.16 gives vLLM prompts with all tokens of an image, and vLLM expands one of them again: 2,069 in all.
        context=4096 if is_large else 2048,
        whole_model=whole_model,
        on_gpu=on_gpu,
        share=share,
        compile_engine=compile_engine,
        limit_s=limit_s,
    )


def run_side(side: Side, race: Race, results: RaceResults, logs: Path, sites: Path) -> bool:
    """Return True if it ended well."""
    folder, began_s = Path(tempfile.mkdtemp(prefix="race-")), time.monotonic()
    try:
        with supervised() as processes:
            if side == "ours":
                run_ours(processes, folder, race, results)
            else:
                run_rival(side, processes, folder, race, results, sites)
        return True
    except ProjectError as error:
        words = last_words(folder / f"{side}.log", _LAST_LINES)
        say(f"{side}: {error}\n{words}\nits logs are in {logs}")
        results.fail(side, time.monotonic() - began_s, words or str(error))
        return False
    finally:
        logs.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob("*.log"), *folder.glob("*/*.log"), *folder.glob("*/metrics.jsonl")):
            shutil.copy(file, logs / file.name)
        shutil.rmtree(folder, ignore_errors=True)


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    against: Annotated[
        list[str] | None, typer.Option(help=f"Other sides: {', '.join(get_args(Rival))}; none: only this project.")
    ] = None,
    sites: Annotated[Path, typer.Option(help="Folder with the rivals' own packages.")] = Path("rivals"),
    only: Annotated[Side | None, typer.Option(help="Run only this side now.")] = None,
    whole_model: Annotated[bool, typer.Option(help="Train the whole model instead of a LoRA.")] = False,
    photographs: Annotated[Photographs, typer.Option(help="large: scaled to 1,024 image tokens.")] = "published",
    size: Annotated[Size, typer.Option(help="Of the model.")] = "4B",
    steps: Annotated[int, typer.Option(min=WARM_UP_STEPS + 1, help="Two of them are warm-up.")] = 6,
    row_tokens: Annotated[
        int | None, typer.Option(help="Of the learner's rows; default: a step in one. Less takes less memory.")
    ] = None,
    share: Annotated[float, typer.Option(help="Of the GPU's memory, for vLLM.")] = 0.3,
    compile_engine: Annotated[bool, typer.Option(help="vLLM compiles its model (`vllm.compile`).")] = True,
    limit: Annotated[float, typer.Option(help="Seconds after which a side is stopped.")] = 420.0,
    scratch: Annotated[Path, typer.Option(help="For the model and large photographs, kept there.")] = Path("/dev/shm"),
) -> None:
    """Run the sides that FILE lacks."""
    if unknown := set(against or []) - set(get_args(Rival)):
        wanted = ", ".join(get_args(Rival))
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; wanted: {wanted}", param_hint="--against")
    race = race_of(
        data,
        scratch,
        size=size,
        photographs=photographs,
        steps=steps,
        whole_model=whole_model,
        share=share,
        row_tokens=row_tokens,
        compile_engine=compile_engine,
        limit_s=limit,
    )
    same = {name: value for name, value in asdict(race).items() if name not in ("limit_s", "data", "model")}
    failed = False
    try:
        results = RaceResults(out, {"model": size, "data": data.name, "images": photographs, **same})
    except ProjectError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    sides: list[Side] = [only] if only else ["ours", *cast(list[Rival], against or [])]
    for side in sides:
        if results.lacks(side):
            failed = not run_side(side, race, results, out.with_name(f"{out.stem}-logs"), sites) or failed
    ours = results.sides.get("ours")
    if race.on_gpu and ours and ours.steps and not results.floors:
        results.floors = apart(floors, race, ours.median_s("num_tokens"))
        results.write()
    if results.floors:
        print("floors: " + ", ".join(f"{name} {value:.3g}" for name, value in results.floors.items()), flush=True)
    if ours and ours.steps:
        print("\n".join(parts_lines(ours)), flush=True)
    if results.sides:
        print(table(list(results.sides.values()), race.rollouts, results.floors), flush=True)
    sys.exit(failed or not results.sides)


if __name__ == "__main__":
    typer.run(main)
