"""Rollouts and syncs in FP8 against bfloat16, and what the answers lose: `python -m bench.fp8 --data BCCD --out FILE`.

Kinds of engines: "none" of FP8, "fp8" weights, and "fp8-cache", with the KV cache in FP8 too. Two parts, each once per
kind, in a process of its own:

- "speed": the race's run (`bench.race`: 4B, LoRA, 8 photographs x 8 rollouts, so 64 at once) is built without its
  training steps. In turn: a sync, and the rollouts of a step. Rates are those of the engine.
- "f1": the demo's checkpoint answers held-out scenes greedily. The scenes and the weights are the same for all kinds.

Out: FILE with what each part gave. Rounds are written one by one, as soon as they have ended. The same call again
measures only the parts that have not ended. Options must be those of FILE; only `--rounds` may be larger. The table
says medians after the warm-up, their ratios to "none", and what is wanted of them. Exit code 1 if something of it does
not hold, 2 if a part did not score all of its scenes. Without a GPU engines refuse FP8: `--size tiny --kind none` tries
the rest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console

from bench.colocated import World
from bench.figures import Figure, check_options, circumstances, median, show
from bench.models import CHECKPOINT
from bench.photographs import Size
from bench.race import Race, apart, race_of
from bench.runs import learner_config, say
from deploy.demo.build_data import Build
from deploy.demo.build_data import build as build_data
from learner.run.environment import prepare_for_vllm
from learner.run.files import write_atomically
from shared.errors import DataError, ProjectError

WARM_UP = 4  # rounds: a load is reloaded, watched, repeated and captured before it is as fast as it stays
WANTED_RATE, WANTED_SYNC, WANTED_F1 = 1.3, 1.3, 0.005
Kind = Literal["none", "fp8", "fp8-cache"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KEYS: Mapping[Kind, Mapping[str, str]] = {  # of the learner's section `vllm`
    "none": {},
    "fp8": {"quantization": "fp8"},
    "fp8-cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
_MOST_TOKENS = 256  # an answer to a demo's scene has no more


def speed(race: Race, kind: Kind, rounds: int, results: Fp8Results) -> None:
    """Put the seconds and parts of each sync and of each step's rollouts into `results`, in this process. They are
    written after each round: a call that is cut off, or an engine that does not end, costs none of them."""
    prepare_for_vllm(os.environ)
    found: dict[str, Any] = {"sync": [], "rollouts": []}
    with tempfile.TemporaryDirectory(prefix="fp8-") as folder, ExitStack() as stack:
        began = time.monotonic()
        world = World(race, Path(folder) / "run", stack, KEYS[kind])
        found["start_s"] = time.monotonic() - began
        say(f"{kind}: built in {found['start_s']:.0f} s")
        for _ in range(rounds):
            row = {"seconds": world.timed(world.sync), **world.parts, **world.gaps}
            found["sync"].append(row)
            say(f"{kind}: sync: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
            row = {"seconds": world.timed(world.rollouts), **world.parts, "tokens": world.num_tokens}
            found["rollouts"].append(row)
            say(f"{kind}: rollouts: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
            results.put(f"speed {kind}", found)


def accuracy(data: Path, kind: Kind, scenes: int, results: Fp8Results) -> None:
    """Put the metrics of greedy answers to the held-out scenes of `data` into `results`, in this process. Raises
    DataError if `data` has not `scenes` of them."""
    prepare_for_vllm(os.environ)
    from learner.config.load import config_of
    from learner.config.plan import resolve
    from learner.policy.parallel import init_ranks
    from learner.steps.evaluation import evaluate
    from learner.wiring.build import build

    with tempfile.TemporaryDirectory(prefix="fp8-") as folder, ExitStack() as stack:
        vllm = {"mode": "colocate", "gpu_memory_utilization": 0.3, "max_model_len": 1024, **KEYS[kind]}
        settings = learner_config(
            CHECKPOINT.resolve(),
            data / "train.jsonl",
            Path(folder) / "run",
            steps=1,
            batch_size=1,
            training={"eval_on_end": True},  # otherwise no scene is read
            matching={
                "decode_batch_size": 64,
                "decoding": {"temperature": 0.0, "max_new_tokens": _MOST_TOKENS},
                "vllm": vllm | {"enforce_eager": True},
            },
            data={"val": str(data / "val.jsonl")},
            task={"container": "index_map", "coordinates": "tokens"},
            logging={"trackers": [], "progress_bar": False},
            global_max_length=4608,
        )
        config = config_of(settings, world_size=1)
        ranks = init_ranks({}, timeout_s=60.0)
        stack.callback(ranks.close)
        trainer = build(config, resolve(config, 1), ranks, token=None, stack=stack)
        assert trainer.sync is not None, "a colocated engine has a sync"
        assert trainer.backend is not None, "a run that evaluates has a backend"
        samples = trainer.eval_samples
        check_scenes(f"f1 {kind}", len(samples), wanted=scenes)
        receipt = trainer.sync.sync()
        began = time.monotonic()
        found = evaluate(trainer.backend, samples, trainer.task, ranks, global_step=0)
        gaps = {"canary_gap": receipt.canary_gap, "merge_gap": receipt.merge_gap}
        say(f"{kind}: f1 {found.metrics['f1@0.5']:.4f} on {len(samples)} scenes")
        part = {"seconds": time.monotonic() - began, "scenes": len(samples), **gaps, "metrics": dict(found.metrics)}
        results.put(f"f1 {kind}", part)


def check_scenes(name: str, found: int, *, wanted: int) -> None:
    """Raises DataError if a part scored another number of scenes than `wanted`, or none."""
    if found == 0 or found != wanted:
        raise DataError(
            f"{name}: the part did not score the scenes that it should",
            found=f"{found} scenes",
            wanted=f"{wanted or 'at least one'}, the same for all kinds",
            remedy="give --part f1 and the same --scenes for all kinds, or another --out",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Results:
    """FILE: what the parts gave, by name and kind. It is read anew each time: a part writes it from its own process."""

    path: Path
    what: Mapping[str, Any]  # the call's options

    def check(self) -> None:
        """Raises DataError if FILE is of other options: what it has would be compared with what they give. There may be
        more rounds than before."""
        if self.path.is_file():
            check_options(self.path, self._stored["what"], self.what, may_grow={"rounds"})

    @property
    def parts(self) -> dict[str, Any]:
        return dict(self._stored["parts"]) if self.path.is_file() else {}

    @property
    def _stored(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text()))

    def lacks_speed(self, kind: Kind, rounds: int) -> bool:
        """True if this kind has fewer rounds."""
        return len(self.parts.get(f"speed {kind}", {}).get("rollouts", ())) < rounds

    def lacks_f1(self, kind: Kind, scenes: int) -> bool:
        """True if this kind has not been scored, or on another number of scenes."""
        return self.parts.get(f"f1 {kind}", {}).get("scenes") != scenes

    def put(self, name: str, part: Mapping[str, Any]) -> None:
        """Keep what a part gave, with the machine on which it ran."""
        self._write([], {**self.parts, name: {**circumstances(), **part}})

    def conclude(self, figures: Sequence[Figure]) -> None:
        """Write the figures beside the parts."""
        self._write(figures, self.parts)

    def _write(self, figures: Sequence[Figure], parts: Mapping[str, Any]) -> None:
        found = {"what": dict(self.what), "figures": [asdict(figure) for figure in figures], "parts": parts}
        write_atomically(self.path, json.dumps({**circumstances(), **found}, indent=1, default=str) + "\n")


def figures(parts: Mapping[str, Any]) -> list[Figure]:
    """Return the medians of all parts, and how those in FP8 compare with "none". A part of the speed that has not ended
    counts if it has rounds after the warm-up. Raises DataError if a part scored no scene, or not as many as others."""
    found: list[Figure] = []
    rates, syncs, scores, scenes = {}, {}, {}, 0
    for kind in KINDS:
        if (run := parts.get(f"speed {kind}")) is not None and len(run["rollouts"]) > WARM_UP:
            rates[kind] = [row["tokens"] / row["engine"] for row in run["rollouts"][WARM_UP:]]
            syncs[kind] = [row["seconds"] for row in run["sync"][WARM_UP:]]
            found.append(Figure(name=f"tokens/s, {kind}", value=median(rates[kind]), unit="1/s", samples=rates[kind]))
            found.append(Figure(name=f"sync, {kind}", value=median(syncs[kind]), unit="s", samples=syncs[kind]))
            gaps = [row["canary_gap"] for row in run["sync"]]
            found.append(Figure(name=f"canary's gap, {kind}", value=max(gaps), unit="nats", samples=gaps))
        if (run := parts.get(f"f1 {kind}")) is not None:
            check_scenes(f"f1 {kind}", run["scenes"], wanted=scenes or run["scenes"])
            scenes = run["scenes"]
            scores[kind] = run["metrics"]["f1@0.5"]
            found.append(Figure(name=f"F1@0.5, {kind}, {run['scenes']} scenes", value=scores[kind], unit=""))
    for kind in KINDS[1:]:
        if "none" in rates and kind in rates:
            ratio = median(rates[kind]) / median(rates["none"])
            found.append(Figure(name=f"tokens/s, {kind} / none", value=ratio, unit="", wanted=WANTED_RATE))
            ratio = median(syncs[kind]) / median(syncs["none"])
            found.append(Figure(name=f"sync, {kind} / none", value=ratio, unit="", wanted=WANTED_SYNC, at_least=False))
        if "none" in scores and kind in scores:
            lost, name = abs(scores["none"] - scores[kind]), f"F1@0.5, {kind} against none"
            found.append(Figure(name=name, value=lost, unit="", wanted=WANTED_F1, at_least=False))
    return found


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file; what it has is kept.")],
    size: Annotated[Size, typer.Option(help="Of the model of the speed.")] = "4B",
    kind: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(KINDS)}; each by itself. All if not given.")
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help="speed, f1; again for each. Both if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=WARM_UP + 1, help="The first four are warm-up.")] = 8,
    whole_model: Annotated[bool, typer.Option(help="Train the whole model instead of a LoRA.")] = False,
    share: Annotated[float, typer.Option(help="Of the GPU's memory, for vLLM.")] = 0.3,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes of the demo.")] = 1000,
    scratch: Annotated[Path, typer.Option(help="For the model and the scenes, kept there.")] = Path("/dev/shm"),
) -> None:
    """Measure the kinds of engines, and compare them."""
    kinds = [one for one in KINDS if kind is None or one in kind]
    what = {"size": size, "whole_model": whole_model, "share": share, "rounds": rounds, "scenes": scenes}
    results = Fp8Results(path=out, what={**what, "data": data.name})
    try:
        results.check()
        if part is None or "speed" in part:
            options: dict[str, Any] = {"size": size, "photographs": "published", "whole_model": whole_model}
            race = race_of(data, scratch, steps=rounds, share=share, **options)
            for one in kinds:
                if results.lacks_speed(one, rounds):
                    apart(speed, race, one, rounds, results)
        if part is None or "f1" in part:
            folder = scratch / "fp8-scenes"
            folder.mkdir(parents=True, exist_ok=True)
            build_data(Build(train=8, val=scenes, test=0, seed=37), folder, workers=os.cpu_count() or 1)
            for one in kinds:
                if results.lacks_f1(one, scenes):
                    apart(accuracy, folder, one, scenes, results)
        found = figures(results.parts)
    except ProjectError as error:
        say(str(error))
        sys.exit(error.exit_code)
    results.conclude(found)
    show(found, Console())
    sys.exit(any(figure.good is False for figure in found))


if __name__ == "__main__":
    typer.run(main)
