"""Bugs that post-training systems are known to have, planted here: what catches each, and after how many tokens.

    python -m bench.planted run --out DIR

Every bug leaves all calls answering 200. Learner and server are real processes with the demo's model on CPU; scenes and
settings are the demo's. Out: `planted.json` and a table with, for each bug, what caught it, where, the tokens that were
compared until then, and how many wrong tokens a rollout got (0 if nothing was served). Exit code 1 if one was missed.

While the weights are synced (each in a sync of its own after an optimizer step; an honest sync follows and must pass):

- weights silently not synced: the sender sends what it sent the last time, correctly sealed
- tied head stale: the server keeps the output head's packed copy
- stale vision embeddings: the server keeps the vision tower's cached outputs
- stale prefix cache: the server keeps cached keys and values
- stale prefix cache after an adapter swap: the same, and the new adapter has the old one's name

When the learner connects:

- image tokens expanded twice: the server's prompt has an image's placeholders already expanded
- a server of another model: another number of layers
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.canary import HEAD_FAULT, Altered, hooked
from bench.figures import circumstances
from bench.models import demo_model, demo_scenes, vision_model
from bench.runs import Server, last_words, say, served_by
from bench.training import demo_run
from deploy.launch import Processes, server_argv, supervised
from learner.sync import server_delivery
from learner.sync.sync import Sync
from shared.addresses import free_port
from shared.config.parse import write_yaml
from shared.errors import ProjectError, ServerError

NOT_SYNCED = "weights silently not synced"
STALE_VISION = "stale vision embeddings"
STALE_PREFIX = "stale prefix cache"
STALE_SWAP = "stale prefix cache after an adapter swap"
TWICE = "image tokens expanded twice"
OTHER_MODEL = "a server of another model"
FULL = (NOT_SYNCED, HEAD_FAULT, STALE_VISION, STALE_PREFIX)
ADAPTER = (STALE_SWAP,)
HOOKS = {
    "shared.sync.loading": "bench.canary:keep_head",
    "rollout_server.engine": "bench.planted:keep_caches",
    "rollout_server.prompts": "bench.planted:expand_twice",
}
RUN_TIMEOUT_S = 150.0
LEARNING_RATE = 1e-3
LORA = {"r": 8, "alpha": 16, "target_modules": r".*language_model\..*(q_proj|v_proj|down_proj)"}
_OVER = re.compile(r"gap (\d+\.\d+|nan|inf) nats per token over (\d+) tokens")
app = typer.Typer(add_completion=False, help=__doc__)


# ---- bugs of the server, in its processes ----------------------------------------------------------------------------


def fault_of(flag: Path) -> str:
    return flag.read_text() if flag.exists() else ""


def keep_caches(flag: Path) -> None:
    """Make the engine keep a cache through an update while `flag` names this bug."""
    import rollout_server.engine as engine

    reset, serve_adapter = engine.VllmEngine.reset_caches, engine.VllmEngine.serve_adapter

    async def reset_caches(self: Any) -> None:
        fault = fault_of(flag)
        if fault == STALE_VISION:
            await self._llm.reset_prefix_cache()
        elif fault == STALE_PREFIX:
            await self._llm.reset_encoder_cache()
        elif fault != STALE_SWAP:
            await reset(self)

    def serve(self: Any, name: str | None) -> None:
        """Serve the adapter: a bug that keeps the name has had it all along, not only in this update."""
        serve_adapter(self, name and "policy")

    engine.VllmEngine.reset_caches = reset_caches  # type: ignore[method-assign]
    engine.VllmEngine.serve_adapter = serve  # type: ignore[method-assign]


def expand_twice(flag: Path) -> None:
    """Expand each image's placeholder before vLLM does, while `flag` names this bug."""
    import rollout_server.prompts as prompts

    render = prompts.Renderer.render

    def expanded(self: Any, request: Any, share: Any) -> Any:
        prompt = render(self, request, share)
        if fault_of(flag) != TWICE or not prompt.images:
            return prompt
        images = self._processor.image_processor
        grids = images(images=prompt.images, return_tensors="pt")["image_grid_thw"]
        counts = iter((grids.prod(-1) // images.merge_size**2).tolist())
        pad = self._processor.image_token_id
        prompt.token_ids[:] = [
            token for one in prompt.token_ids for token in [one] * (next(counts) if one == pad else 1)
        ]
        return prompt

    prompts.Renderer.render = expanded  # type: ignore[method-assign]


# ---- the learner's process -------------------------------------------------------------------------------------------


class PlantedSync:
    """Takes the place of `Sync.sync`: each sync from the second on has one of `faults`, and then an honest repeat."""

    def __init__(self, faults: Sequence[str], out: Path, flag: Path) -> None:
        self._faults, self._out, self._flag = list(faults), out, flag
        self._honest, self._seal = Sync.sync, server_delivery.sealed_buckets
        self._rows: list[dict[str, Any]] = []
        self._last: dict[str, torch.Tensor] = {}  # the last sync sent these
        self._fault = ""

    def install(self) -> None:
        server_delivery.sealed_buckets = self._sealed_buckets
        Sync.sync = lambda sync: self._sync(sync)  # type: ignore[assignment, method-assign]

    def _sync(self, sync: Sync) -> Any:
        if sync.ver == 0 or not self._faults:
            return self._honest(sync)
        row = self._planted(sync, self._faults.pop(0))
        receipt = self._honest(sync)
        row["gap_after"] = round(receipt.canary_gap, 4)
        self._rows.append(row)
        self._out.write_text(json.dumps(self._rows))
        return receipt

    def _planted(self, sync: Sync, fault: str) -> dict[str, Any]:
        self._fault = fault
        self._flag.write_text(fault)
        began = time.monotonic()
        where = "in the sync, before anything is served"
        try:
            receipt = self._honest(sync)
        except ProjectError as error:
            return {**caught(fault, str(error), type(error).__name__, where), "seconds": time.monotonic() - began}
        finally:
            self._fault = ""
            self._flag.unlink()
        return {"fault": fault, "caught_by": None, "gap": round(receipt.canary_gap, 4)}

    def _sealed_buckets(self, source: Any, plan: Sequence[Any], **how: Any) -> Iterator[torch.Tensor]:
        now = {name: tensor.detach().clone() for name, tensor in source.named_weights(how["dtype"])}
        if self._fault == NOT_SYNCED:
            source = Altered(source, lambda name, _, last: last, self._last)
        else:
            self._last = now
        yield from self._seal(source, plan, **how)


def caught(fault: str, said: str, error: str, where: str) -> dict[str, Any]:
    """Return a row of the table."""
    gap = _OVER.search(said)
    row = {"fault": fault, "caught_by": error, "where": where, "wrong_tokens_served": 0, "error": said}
    return row | {"gap": float(gap[1]) if gap else None, "tokens_compared": int(gap[2]) if gap else 0}


@app.command("learner", hidden=True)
def planted_learner(config: Path, faults: str, out: Path, flag: Path) -> None:
    """Run the learner itself, with a bug in each sync."""
    from learner.__main__ import main as learner

    PlantedSync(json.loads(faults), out, flag).install()
    sys.exit(learner(["--config", str(config)]))


# ---- the benchmark ---------------------------------------------------------------------------------------------------


class FaultTable:
    """The servers and runs of one table, in `folder`."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.processes, self.folder, self.flag = processes, folder, folder / "fault"
        self.model, self.data = demo_model(folder), demo_scenes(folder)

    def serve(self, name: str, model: Path, *, lora: bool = False) -> Server:
        config = {"model": str(model), "allowed_image_roots": [str(self.data)], "port": free_port(), "dtype": "float32"}
        config |= {"max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, "cpu_threads": 1}
        # Prompts have 85 tokens. vLLM's blocks have 16 on a GPU and 128 on CPU, and only whole blocks are cached.
        config |= {"engine_args": {"block_size": 32}}
        config |= {"enable_lora": True, "max_lora_rank": 8} if lora else {}
        path, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
        write_yaml(path, config, "bench")
        python_path = hooked(self.folder, self.flag, HOOKS)
        argv = ["env", f"PYTHONPATH={python_path}", *server_argv(str(path))]
        return Server(process=self.processes.start(name, argv, log=log), url=f"http://127.0.0.1:{config['port']}")

    def learn(self, name: str, server: Server, faults: Sequence[str], *, lora: bool = False) -> tuple[int, Path]:
        """Exit code and log of a run with a bug in each sync after the first."""
        sync = {"mode": "adapter", "fallback_to_full": False} if lora else {"mode": "full"}
        vllm = served_by(server, sync=sync, **({"enable_lora": True} if lora else {}))
        steps = len(faults) + 2
        run = demo_run(self.model, self.data, self.folder / name, vllm, steps=steps, batch_size=2)
        run["training"] |= {"learning_rate": LEARNING_RATE, "save_on_end": False, "bf16": False}
        run["model"] |= {"lora": LORA} if lora else {}
        path, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
        write_yaml(path, run, "bench")
        arguments = (path, json.dumps(list(faults)), self.folder / f"{name}.json", self.flag)
        argv = [sys.executable, "-m", "bench.planted", "learner", *map(str, arguments)]
        return self.processes.start(name, argv, log=log).popen.wait(RUN_TIMEOUT_S), log

    def synced(
        self, name: str, server: Server, faults: Sequence[str], *, lora: bool = False
    ) -> list[Mapping[str, Any]]:
        code, log = self.learn(name, server, faults, lora=lora)
        if code:
            found = f"exit code {code}; last words: {last_words(log)}"
            raise ServerError("the benchmark's run failed", found=found, wanted="0", remedy=f"see {log}")
        rows: list[Mapping[str, Any]] = json.loads((self.folder / f"{name}.json").read_text())
        return rows

    def refused(self, name: str, server: Server, fault: str) -> Mapping[str, Any]:
        """Start a run that must not begin, and return its row."""
        self.flag.write_text(fault)
        began = time.monotonic()
        code, log = self.learn(name, server, ())
        self.flag.unlink()
        said = re.search(r"error: (\w+): (.*)", log.read_text())
        if code == 0 or said is None:
            return {"fault": fault, "caught_by": None, "gap": None, "where": last_words(log)}
        row = caught(fault, said[2], said[1], "when the learner connects, before the first sync")
        return {**row, "seconds": time.monotonic() - began}


def measure(folder: Path) -> list[Mapping[str, Any]]:
    """Measure, and return the rows of the table."""
    with supervised() as processes:
        world = FaultTable(processes, folder)
        server = world.serve("server", world.model)
        server.wait_ready()
        say("the server is ready")
        rows = [*world.synced("full", server, FULL), world.refused("twice", server, TWICE)]
        server.process.stop(5.0)
        lora, other = world.serve("lora", world.model, lora=True), world.serve("other", vision_model(folder, "tiny"))
        lora.wait_ready()
        rows += world.synced("adapter", lora, ADAPTER, lora=True)
        other.wait_ready()
        return [*rows, world.refused("another", other, OTHER_MODEL)]


@app.command("run")
def run(out: Annotated[Path, typer.Option(help="Folder of the results.")]) -> None:
    """Run it, print the table, write the results."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        try:
            rows = measure(Path(folder))
        except ProjectError as error:
            for log in Path(folder).glob("*.log"):
                (out / log.name).write_text(log.read_text(errors="replace"))
            say(f"{error}; logs are in {out}")
            raise typer.Exit(1) from error
    (out / "planted.json").write_text(json.dumps({**circumstances(), "faults": rows}, indent=1) + "\n")
    for row in rows:
        gap = "-" if row["gap"] is None else f"{row['gap']:.4f}"
        tokens = row.get("tokens_compared", "-")
        say(
            f"{row['fault']}: {row['caught_by'] or 'NOT CAUGHT'} {row.get('where', '')}; gap {gap} over {tokens} tokens"
        )
    raise typer.Exit(any(row["caught_by"] is None for row in rows))


if __name__ == "__main__":
    app()
