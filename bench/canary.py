"""Check that the canary tells the truth (D14): honest syncs raise no alarm, and planted faults are caught.

    python -m bench.canary run --data DIR --out DIR [--size tiny|demo|4B] [--steps 50] [--whole-model]

In: photographs with Pascal VOC annotations, as `bench.photographs` takes them. A model of that size learns them in
bfloat16 with LoRA (r 64, alpha 128, all linear layers, rate 1e-4), or all of its weights. Every step has a full sync;
those are the honest ones. At the last step each fault is planted once, in a sync of its own, and an honest sync follows
that must succeed. Out: `canary-SIZE.json` and a table with the gap of the honest syncs, and of each fault what caught
it. Without a GPU: `--size demo`.

The faults are what a sender or a server could get wrong while every call returns 200. The learner scores the canary
with the right weights, and then sends wrong ones. `as trained` below is what an honest sync sends.

- a byte in flight: one byte of a sealed bucket changes
- one bucket: one bucket's values are permuted before it is sealed
- one tensor stale, vision tower stale: those weights stay what they were at the first sync
- scale 2% wrong: every linear layer is 1.02 times as trained; or only what LoRA added is
- tied head stale (CPU): the server keeps the output head of the first sync. On CUDA the head is the embedding's own
  memory, so it can't be planted
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from bench.demo_model import build as build_small_model
from bench.figures import circumstances
from bench.models import build_photograph_model
from bench.photographs import LORA, LOSS, PROMPT, photographs, server_config
from bench.runs import Server, last_words, learner_config, read_events, say, served_by
from deploy.launch import server_argv, supervised
from learner.sync import server_delivery
from learner.sync.sync import Sync
from shared.addresses import free_port
from shared.config.parse import write_yaml
from shared.errors import ProjectError, ServerError

Change = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]  # name, as trained, as it was at the first sync
HEAD_FAULT = "tied head stale"
RUN_TIMEOUT_S = 1800.0
_THE_FIRST = "everything stale"
app = typer.Typer(add_completion=False, help=__doc__)


def main() -> None:
    app()


# ---- the learner's process, with faults ------------------------------------------------------------------------------


def changes(names: Sequence[str], bucket: Sequence[str], *, lora: bool) -> dict[str, Change]:
    """Return the faults that are changes of values. `names`: every tensor; `bucket`: those of the bucket to permute."""
    layers = [name for name in names if name.endswith("mlp.down_proj.weight")]
    stale_one = layers[len(layers) // 2]

    def scaled(name: str, now: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return (now.float() * 1.02).to(now.dtype) if now.dim() == 2 else now

    def scaled_adapter(name: str, now: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return (first.float() + 1.02 * (now.float() - first.float())).to(now.dtype)

    found: dict[str, Change] = {
        "one bucket": lambda name, now, first: now.flatten().flip(0).view_as(now) if name in bucket else now,
        "one tensor stale": lambda name, now, first: first if name == stale_one else now,
        "vision tower stale": lambda name, now, first: first if ".visual." in name else now,
        "scale 2% wrong": scaled,
    }
    return found | ({"what LoRA added 2% wrong": scaled_adapter} if lora else {})


class Altered:
    """A weight source with a fault."""

    def __init__(self, source: Any, change: Change, first: dict[str, torch.Tensor]) -> None:
        self.weight_specs, self._source, self._change, self._first = source.weight_specs, source, change, first

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.named_weights(dtype):
            yield name, self._change(name, tensor, self._first[name])


class FaultySync:
    """Takes the place of `Sync.sync` in the learner's process: at the last of `num_syncs` it plants the faults."""

    def __init__(self, num_syncs: int, out: Path, head_flag: Path, *, lora: bool) -> None:
        self._num_syncs, self._out, self._head_flag, self._lora = num_syncs, out, head_flag, lora
        self._honest, self._seal = Sync.sync, server_delivery.sealed_buckets
        self._count = 0
        self._first: dict[str, torch.Tensor] = {}
        self._names: list[str] = []
        self._bucket: list[str] = []
        self._fault = ""

    def install(self) -> None:
        server_delivery.sealed_buckets = self._sealed_buckets
        Sync.sync = lambda sync: self._sync(sync)  # type: ignore[assignment, method-assign]

    def _sync(self, sync: Sync) -> Any:
        self._count += 1
        receipt = self._honest(sync)
        if self._count == self._num_syncs:
            kinds = ["a byte in flight", *changes(self._names, self._bucket, lora=self._lora)]
            if not torch.cuda.is_available() and not self._lora:
                kinds.append(HEAD_FAULT)
            rows = []
            for kind in kinds:
                rows.append(self._planted(sync, kind))
                receipt = self._honest(sync)
                rows[-1]["gap_after"] = round(receipt.canary_gap, 4)
                self._out.write_text(json.dumps(rows, indent=1) + "\n")
        return receipt

    def _planted(self, sync: Sync, kind: str) -> dict[str, Any]:
        self._fault = kind
        if kind == HEAD_FAULT:
            self._send_the_first(sync)
            self._head_flag.write_text(HEAD_FAULT)
        began = time.monotonic()
        try:
            receipt = self._honest(sync)
            return {"fault": kind, "caught_by": None, "gap": round(receipt.canary_gap, 4)}
        except ProjectError as error:
            gap = re.search(r"gap (\d+\.\d+|nan|inf)", str(error))
            row = {"fault": kind, "caught_by": type(error).__name__, "gap": float(gap[1]) if gap else None}
            return row | {"seconds": round(time.monotonic() - began, 2), "error": str(error)}
        finally:
            self._fault = ""
            self._head_flag.unlink(missing_ok=True)

    def _send_the_first(self, sync: Sync) -> None:
        """Let the server hold the weights of the first sync. Its canary may fail, as it should."""
        self._fault = _THE_FIRST
        try:
            self._honest(sync)
        except ProjectError:  # the canary compares old weights with the learner's new ones: it must refuse them
            pass
        finally:
            self._fault = ""

    def _sealed_buckets(self, source: Any, plan: Sequence[Any], **how: Any) -> Iterator[torch.Tensor]:
        if not self._first:
            self._first = {name: tensor.detach().clone() for name, tensor in source.named_weights(how["dtype"])}
            self._names = list(self._first)
            self._bucket = [spec.name for spec in plan[len(plan) // 2]]
        change = changes(self._names, self._bucket, lora=self._lora).get(self._fault)
        if self._fault == _THE_FIRST:
            change = lambda name, now, first: first  # noqa: E731
        if change is not None:
            source = Altered(source, change, self._first)
        for index, buffer in enumerate(self._seal(source, plan, **how)):
            if self._fault == "a byte in flight" and index == len(plan) // 2:
                buffer[buffer.numel() // 2] ^= 64
            yield buffer


@app.command("learner", hidden=True)
def faulty_learner(config: Path, num_syncs: int, out: Path, head_flag: Path, lora: bool) -> None:
    """Run the learner itself, with faults in its last sync."""
    from learner.__main__ import main as learner

    FaultySync(num_syncs, out, head_flag, lora=lora).install()
    sys.exit(learner(["--config", str(config)]))


# Every process of the server needs this, the engine's too: Python imports a module of this name as it starts.
_SITE = """
import importlib, importlib.abc, importlib.util, sys
from pathlib import Path

HOOKS = {hooks!r}

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in HOOKS:
            return None
        module_name, function = HOOKS.pop(name).split(":")
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            getattr(importlib.import_module(module_name), function)(Path({flag!r}))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""


def hooked(folder: Path, flag: Path, hooks: Mapping[str, str]) -> str:
    """A PYTHONPATH with which a server calls `hooks[module]` ("module:function") with `flag`, once it has imported
    `module`, in each of its processes."""
    (folder / "sitecustomize.py").write_text(_SITE.format(hooks=dict(hooks), flag=str(flag)))
    return os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])


def keep_head(flag: Path) -> None:
    """Make loading in this process keep the output head's packed copy while `flag` names this fault."""
    from shared.sync.loading import WeightLoad  # imported here: this is called while a process imports that module

    close = WeightLoad.close

    def close_without_head(load: Any) -> None:
        if not (flag.exists() and flag.read_text() == HEAD_FAULT):
            return close(load)
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        heads = [module for module in load._model.modules() if isinstance(module, ParallelLMHead)]
        kept = [(head, head.quant_method.process_weights_after_loading) for head in heads]
        for head, _ in kept:
            head.quant_method.process_weights_after_loading = lambda module: None
        try:
            close(load)
        finally:
            for head, process in kept:
                head.quant_method.process_weights_after_loading = process

    WeightLoad.close = close_without_head  # type: ignore[assignment, method-assign]


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def run_config(
    folder: Path, server: Server, model: Path, data: Path, *, steps: int, on_gpu: bool, lora: bool
) -> dict[str, Any]:
    batch, per_device, tokens = (16, 8, 128) if on_gpu else (4, 2, 48)
    return learner_config(
        model,
        data,
        folder / "run",
        steps=steps,
        batch_size=batch,
        per_device=per_device,
        variant="rollout_matching_sft",
        matching={
            "decode_batch_size": 64,
            "decoding": {"temperature": 1.0, "max_new_tokens": tokens},
            "vllm": served_by(server, sync={"mode": "full"}),
        },
        loss=LOSS,
        model={"dtype": "bfloat16", "gradient_checkpointing": on_gpu, **(LORA if lora else {})},
        training={"learning_rate": 1e-4, "bf16": True, "save_on_end": False},
        task={"container": "array", "coordinates": "digits"},
        logging={"trackers": []},
        data={**photographs(data), "prompt": PROMPT, "num_workers": 8 if on_gpu else 0},
        global_max_length=8192 if on_gpu else 4096,
    )


def measure(folder: Path, model: Path, data: Path, *, steps: int, on_gpu: bool, lora: bool) -> dict[str, Any]:
    """Measure one run. Raises ServerError if it failed."""
    flag, faults = folder / "head_flag", folder / "faults.json"
    with supervised() as processes:
        config = {**server_config(model, data, on_gpu=on_gpu), "port": free_port(), "enable_lora": False}
        config.pop("max_lora_rank")
        write_yaml(folder / "server.yaml", config, "bench")
        path = hooked(folder, flag, {"shared.sync.loading": "bench.canary:keep_head"})
        argv = ["env", f"PYTHONPATH={path}", *server_argv(str(folder / "server.yaml"))]
        process = processes.start("server", argv, devices=[0] if on_gpu else (), log=folder / "server.log")
        server = Server(process=process, url=f"http://127.0.0.1:{config['port']}")
        server.wait_ready()
        run = run_config(folder, server, model, data, steps=steps, on_gpu=on_gpu, lora=lora)
        write_yaml(folder / "run.yaml", run, "bench")
        log = folder / "run.log"
        arguments = (folder / "run.yaml", steps, faults, flag, lora)
        argv = [sys.executable, "-m", "bench.canary", "learner", *map(str, arguments)]
        process = processes.start("learner", argv, devices=[1] if on_gpu else (), log=log)
        code = process.popen.wait(RUN_TIMEOUT_S)
        if code:
            found = f"exit code {code}; last words: {last_words(log)}"
            raise ServerError("the benchmark's run failed", found=found, wanted="0", remedy=f"see {log}")
    syncs = [event for event in read_events(folder / "run") if event["event"] == "sync"]
    return {
        "weights": "LoRA r 64" if lora else "all",
        "honest_syncs": len(syncs),
        "gaps": [round(sync["canary_gap"], 4) for sync in syncs],
        "merge_gaps": [round(sync["merge_gap"], 4) for sync in syncs],
        "faults": json.loads(faults.read_text()),
    }


@app.command("run")
def run(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    size: Annotated[str, typer.Option(help="Of the model: tiny, demo or 4B.")] = "demo",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps, a sync each.")] = 50,
    whole_model: Annotated[bool, typer.Option(help="Train all weights, not LoRA.")] = False,
    scratch: Annotated[Path, typer.Option(help="For the model.")] = Path("/dev/shm"),
) -> None:
    """Run it, print the table, write the results."""
    on_gpu = size == "4B"
    out.mkdir(parents=True, exist_ok=True)
    model = scratch / f"photographs-{size}"
    if not (model / "config.json").is_file():
        if on_gpu:
            build_photograph_model(model)
        else:
            build_small_model(model, size)  # type: ignore[arg-type]
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    try:
        row = measure(folder, model, data, steps=steps, on_gpu=on_gpu, lora=not whole_model)
    finally:
        for log in folder.glob("*.log"):
            shutil.copy(log, out)
        if (folder / "faults.json").is_file():
            shutil.copy(folder / "faults.json", out)
    shutil.rmtree(folder, ignore_errors=True)
    name = f"canary-{size}-{'whole' if whole_model else 'lora'}.json"
    (out / name).write_text(json.dumps({**circumstances(), "model": size, **row}, indent=1) + "\n")
    say(f"{row['honest_syncs']} honest syncs: gap median {median(row['gaps']):.4f}, largest {max(row['gaps']):.4f}")
    say(f"  merge gap: largest {max(row['merge_gaps']):.4f}")
    for fault in row["faults"]:
        gap = "-" if fault["gap"] is None else f"{fault['gap']:.4f}"
        say(f"  {fault['fault']}: {fault['caught_by'] or 'NOT CAUGHT'}, gap {gap}, after it {fault['gap_after']:.4f}")
    sys.exit(any(fault["caught_by"] is None for fault in row["faults"]))


if __name__ == "__main__":
    main()
