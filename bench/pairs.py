"""Does a run under random kills end as one without: `python -m bench.pairs --seeds 5 --out FILE`.

Two real servers on CPU, and the demo's model, which learns its own rollouts of digit scenes. Each seed is run three
times: without a kill, again without, and with kills. `first - again` is the noise of an unkilled pair, `first - killed`
what kills change. Kills come at random steps: SIGKILL of a server, which is started again, or of the learner, which
goes on from its newest checkpoint.

Out: FILE, a row per run: F1@0.5 and the loss of the last steps, a digest of the final weights, and the kills. The same
command goes on with what is left; no run starts later than `seconds` after the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import chaos, forked
from bench.figures import check_options, circumstances
from bench.models import demo_model
from bench.runs import read_events, say, steps_of
from bench.training import demo_run
from deploy.demo.build_data import Build, build
from learner.run.files import write_atomically
from shared.addresses import free_ports
from shared.config.parse import write_yaml
from shared.wire import TOKEN_VARIABLE

RUNS = ("first", "again", "killed")
SCENES, HELD_OUT, BATCH, STEPS, SAVE_STEPS = 32, 12, 4, 5, 1
LAST_STEPS = 3  # whose loss counts
_RUN_S, _START_S = 600.0, 300.0
Row = dict[str, Any]


class Server(chaos.VllmServer):
    """Without a proxy: nothing but kills happens."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._port, self.group_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Killed:
    """A run with these seeds, ended. `kills`: step -> what is killed in it, "server" or "learner"."""

    def __init__(
        self, folder: Path, servers: Sequence[Server], config: Row, kills: dict[int, str], rng: random.Random
    ) -> None:
        self._folder, self._servers, self._config, self._left, self._rng = folder, servers, config, dict(kills), rng
        self.done: list[str] = []  # kills
        self._run = self._start()
        deadline = time.monotonic() + _RUN_S
        try:
            while (code := self._run.poll()) is None:
                assert time.monotonic() < deadline, f"no end after {_RUN_S:g} s; see {folder}"
                self._kill(self.events())
                time.sleep(0.05)
        finally:
            self._run.kill()
        assert code == 0, f"exit code {code}: {(folder / 'log').read_text()[-3000:]}"

    def events(self) -> list[Row]:
        return read_events(self._folder / "run")

    def _start(self) -> forked.Forked:
        wait_for(self._servers)
        path = self._folder / "run.yaml"
        write_yaml(path, self._config)
        with (self._folder / "log").open("ab") as log:
            environment = os.environ | {TOKEN_VARIABLE: chaos.TOKEN, "OMP_NUM_THREADS": "1"}
            argv = ["train", "--config", str(path)]
            return forked.start(forked.LEARNER, "learner", argv, env=environment, stdout=log, stderr=log)

    def _kill(self, events: list[Row]) -> None:
        step = max((one["global_step"] for one in events if one["event"] == "step"), default=0)
        if not self._left or step < min(self._left):
            return
        if self._left[min(self._left)] == "server":
            if any(server.busy_until > time.monotonic() for server in self._servers) or not answer(self._servers):
                return  # one must serve, so a second kill waits for the first one's server
            time.sleep(self._rng.uniform(0.0, 1.0))
            self._rng.choice(self._servers).hit("kill", self._rng)
        else:
            if not list((self._folder / "run").glob("checkpoint-*")):
                return
            time.sleep(self._rng.uniform(0.0, 1.0))
            if self._run.poll() is not None:
                return
            os.kill(self._run.pid, signal.SIGKILL)
            self._run.wait(10.0)
            self._config["training"]["resume_from_checkpoint"] = "latest"
            self._run = self._start()
        self.done.append(f"{self._left.pop(min(self._left))} after step {step}")


def answer(servers: Sequence[Server]) -> bool:
    return all(chaos._answers(server.url) for server in servers)


def wait_for(servers: Sequence[Server]) -> None:
    chaos._wait(lambda: answer(servers), _START_S, "server")


def kills_of(rng: random.Random) -> dict[int, str]:
    """Draw a kill of a server and one of the learner."""
    kinds = ["server", "learner"]
    rng.shuffle(kinds)
    return dict(zip(sorted(rng.sample(range(1, STEPS - 1), len(kinds))), kinds, strict=True))


def row_of(run: Killed, checkpoint: Path, seconds: float) -> Row:
    events = run.events()
    # A step that was learned again after a kill counts once.
    losses = list({step["global_step"]: step["loss"] for step in steps_of(events)}.values())[-LAST_STEPS:]
    scores = [event["metrics"]["f1@0.5"] for event in events if event["event"] in ("eval", "test")]
    weights = b"".join(file.read_bytes() for file in sorted(checkpoint.glob("*.safetensors")))
    return {
        "f1@0.5": scores[-1],
        "loss": sum(losses) / len(losses),
        "weights": hashlib.sha256(weights).hexdigest()[:16],
        "kills": run.done,
        "seconds": round(seconds, 1),
    }


def differences(rows: dict[str, Row], seeds: Sequence[int]) -> Row:
    """Return, of each metric, what each seed's pairs differ by, and of how many pairs the weights are equal."""
    found: Row = {}
    for other in RUNS[1:]:
        pairs = [(rows[f"{seed} first"], rows[f"{seed} {other}"]) for seed in seeds if f"{seed} {other}" in rows]
        named = {name: [round(b[name] - a[name], 6) for a, b in pairs] for name in ("f1@0.5", "loss")}
        found[other] = named | {
            "pairs": len(pairs),
            "equal_weights": sum(a["weights"] == b["weights"] for a, b in pairs),
        }
    return found


def compare(number: int, out: Path, seconds: float) -> list[str]:
    """Run what is left; what does not hold."""
    options = {"scenes": SCENES, "steps": STEPS, "batch": BATCH}
    stored: Row = json.loads(out.read_text()) if out.is_file() else {"options": options, "rows": {}}
    check_options(out, stored["options"], options)
    rows, end, seeds = stored["rows"], time.monotonic() + seconds, range(1, number + 1)
    left = [(seed, kind) for seed in seeds for kind in RUNS if f"{seed} {kind}" not in rows]
    with tempfile.TemporaryDirectory(prefix="pairs-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        data, model = folder / "data", demo_model(folder)
        build(Build(train=SCENES, val=1, test=HELD_OUT), data)
        servers = [Server(data, folder / name, None, (), chaos.VLLM, model) for name in ("one", "two")]
        # A signal ends the servers and the learner, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        for server in servers:
            stack.callback(server.end)
        wait_for(servers)
        for seed, kind in left:
            if time.monotonic() > end:
                break
            began, place = time.monotonic(), folder / f"{seed}-{kind}"
            place.mkdir()
            rng = random.Random(seed)
            config = run_config(model, data, place / "run", servers, seed)
            run = Killed(place, servers, config, kills_of(rng) if kind == "killed" else {}, rng)
            rows[f"{seed} {kind}"] = row_of(run, place / "run" / f"checkpoint-{STEPS}", time.monotonic() - began)
            say(f"{seed} {kind}: {rows[f'{seed} {kind}']}")
            found = {**circumstances(), "options": options, "differences": differences(rows, seeds), "rows": rows}
            write_atomically(out, json.dumps(found, indent=1) + "\n")
    return broken(differences(rows, seeds))


def broken(found: Row) -> list[str]:
    """Say which metric of a killed run differs by more than any unkilled pair does."""
    most: Callable[[str, str], float] = lambda other, name: max(map(abs, found[other][name]), default=0.0)  # noqa: E731
    return [
        f"{name} differs by {most('killed', name):g} under kills, by {most('again', name):g} without"
        for name in ("f1@0.5", "loss")
        if most("killed", name) > most("again", name)
    ]


def run_config(model: Path, data: Path, run_dir: Path, servers: Sequence[Server], seed: int) -> Row:
    entries = [{"base_url": server.url, "group_port": server.group_port} for server in servers]
    server = {"servers": entries, "min_servers": 1, "timeout_s": 120.0, "infer_timeout_s": 60.0}
    vllm = {"mode": "server", "server": server, "sync": {"mode": "full"}}
    sampled = {"decoding": {"temperature": 1.0, "max_new_tokens": 32}, "decode_batch_size": 4}
    config = demo_run(model, data, run_dir, vllm, steps=STEPS, batch_size=BATCH, **sampled)
    config["data"] |= {"test": str(data / "test.jsonl")}
    config["training"] |= {"seed": seed, "bf16": False, "learning_rate": 1e-4, "save_steps": SAVE_STEPS}
    config["training"] |= {"eval_on_end": True, "save_total_limit": 2}
    config["logging"] = {"trackers": []}
    return config


def main(
    out: Annotated[Path, typer.Option(help="Result file.")],
    seeds: Annotated[int, typer.Option(help="Three runs each.")] = 5,
    seconds: Annotated[float, typer.Option(help="No run starts later than this after the first.")] = 500.0,
) -> None:
    """Compare runs under kills with runs without."""
    wrong = compare(seeds, out, seconds)
    print(out.read_text())
    say("; ".join(wrong) or "killed runs end as others do")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
