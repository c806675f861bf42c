"""The learner's command line: `rollout-learner`, and `python -m learner`, which is the same.

    rollout-learner train --config run.yaml [KEY=VALUE ...]      train, one rank
    torchrun --no-python rollout-learner train --config run.yaml train, torchrun's ranks
    rollout-learner check --config run.yaml [--probe]            validate; print the resolved plan as JSON
    rollout-learner doctor --config run.yaml [--launch F]        check what usually goes wrong before a run
    rollout-learner predict-gain --config run.yaml [--samples N] measure what training could gain, and by which method
    rollout-learner export --checkpoint DIR --out DIR            write a checkpoint's merged weights, ready to serve
    rollout-learner report RUN_DIR [--live]                      write a run's report as one HTML page, or follow it
    rollout-learner servers list|add|remove [URL] --run RUN_DIR  which servers a running run has; change that
    rollout-learner bench [--part NAME]                          measure speed and memory, in a clone

`train` can be left out: `python -m learner --config run.yaml`, and with `--check` that is `check`.

Exit codes: 0 done, 1 failed while running, 2 the user's input is wrong, 130 interrupted, 141 nobody reads what is
printed (`... | head`). A user error is one message without a traceback; a bug keeps its traceback. `--help` and `check`
import neither torch nor transformers.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from learner.run.environment import GLOO_VARIABLE, gloo_interface, prepare_for_vllm
from shared.errors import CollectiveError, ConfigError, ProjectError
from shared.packages import missing_package
from shared.processes import end_with_parent

# A rank that lost another one waits this long, so that torchrun sees the rank that failed first, and ends this one.
CAUSE_GRACE_S = 5.0
PROGRAM = "rollout-learner"
COMMANDS = ("train", "check", "doctor", "predict-gain", "export", "report", "servers", "bench")
OTHERS = f"Commands of {PROGRAM}: {', '.join(COMMANDS)}. Other programs: rollout-server, rollout-launch."
_STDOUT = 1
GROUP_OPTIONS = ("--help", "--install-completion", "--show-completion")

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)
servers = typer.Typer(rich_markup_mode=None, no_args_is_help=True, epilog=OTHERS)
app.add_typer(servers, name="servers", help="Show and change the rollout servers of a run that goes on.")

ConfigOption = Annotated[str, typer.Option("--config", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file, such as training.learning_rate=1e-5."),
]
Probe = Annotated[bool, typer.Option("--probe", help="Ask the rollout servers too.")]
WorldSize = Annotated[int | None, typer.Option("--world-size", help="Number of learner ranks.")]


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0].startswith("-") and arguments[0].split("=")[0] not in GROUP_OPTIONS:
        arguments.insert(0, "train")
    try:
        app(arguments, prog_name=PROGRAM)
    except SystemExit as ended:  # how typer ends, also after a wrong option
        return int(ended.code or 0)
    return 0


@app.callback()
def _group() -> None:
    """Post-train vision-language models on their own rollouts. Other programs: rollout-server, rollout-launch."""


@app.command(epilog=OTHERS)
def train(
    config: ConfigOption,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="The same as the command `check`.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="With --check: ask the rollout servers too.")] = False,
    world_size: Annotated[int | None, typer.Option("--world-size", help="With --check: number of ranks.")] = None,
) -> None:
    """Train. This process is one rank; torchrun starts several."""
    if not check and (probe or world_size is not None):
        raise typer.BadParameter("--probe and --world-size go with --check")
    if check:
        _end(lambda: _check(config, overrides or (), probe, world_size))
    _end(lambda: _train(config, overrides or ()))


@app.command(epilog=OTHERS)
def check(
    config: ConfigOption, overrides: Overrides = None, probe: Probe = False, world_size: WorldSize = None
) -> None:
    """Check a configuration and its data.

    Prints every mistake, or the resolved plan as JSON. Starts nothing.
    """
    _end(lambda: _check(config, overrides or (), probe, world_size))


@app.command(epilog=OTHERS)
def doctor(
    config: ConfigOption,
    overrides: Overrides = None,
    launch: Annotated[str | None, typer.Option(help="launch.yaml: check the devices of servers and learner.")] = None,
    world_size: Annotated[int, typer.Option(help="Number of learner ranks.")] = 1,
) -> None:
    """Check what usually goes wrong before a run.

    Libraries, devices, ports, disk, annotations, servers: one line per check. Exit code 1 if one failed.
    """

    def work() -> int:
        from learner.doctor.command import doctor

        return doctor(config, overrides or (), launch=launch, world_size=world_size, environment=os.environ)

    _end(work)


@app.command("predict-gain", epilog=OTHERS)
def predict_gain(
    config: ConfigOption,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="Scenes of each split, drawn with a fixed seed.", min=2)] = 100,
    generations: Annotated[int, typer.Option(help="Answers drawn to each scene at temperature 1: K.", min=2)] = 8,
    agreement: Annotated[
        float, typer.Option(help="Share of the K answers that must have an object to believe it.", min=0.0, max=1.0)
    ] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Write the features to this file too.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="A file of bench.calibrate, to predict F1 points.")] = None,
) -> None:
    """Measure what training could gain on the run's data, and by which method.

    The run's model answers some scenes. No server, nothing is trained. Features, a recommendation, and its reasons.
    """

    def work() -> int:
        from learner.predict.command import predict_gain
        from learner.predict.measure import Asked

        asked = Asked(num_samples=samples, num_generations=generations, agreement=agreement)
        return predict_gain(config, overrides or (), asked=asked, json_path=json, calibration=calibration)

    _end(work)


@app.command(epilog=OTHERS)
def export(
    checkpoint: Annotated[str, typer.Option(help="A checkpoint-STEP folder.")],
    out: Annotated[str, typer.Option(help="The folder to write.")],
    dtype: Annotated[Dtype, typer.Option(help="The type of the weights.")] = Dtype.bfloat16,
) -> None:
    """Make a checkpoint a model to serve, its adapters merged."""

    def work() -> int:
        from learner.build import export

        return export(checkpoint, out, dtype.value)

    _end(work)


@app.command(epilog=OTHERS)
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: RUN_DIR/report.html.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another run, shown beside it.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve a page that follows the run instead.")] = False,
    host: Annotated[str, typer.Option(help="With --live: the address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --live: the port; 0: any.", min=0, max=65535)] = 8790,
) -> None:
    """Write a run's report as one HTML page, or follow a run in the browser."""
    if live and (out or compare):
        raise typer.BadParameter("--out and --compare do not go with --live")

    def work() -> int:
        if live:
            from learner.report.live import serve

            return serve(run_dir, host=host, port=port)
        from learner.report.page import write_report

        print(write_report(run_dir, out=out, compare=compare))
        return 0

    _end(work)


RunDir = Annotated[Path, typer.Option("--run", help="The run directory (training.output_dir).")]
ServerUrl = Annotated[str, typer.Argument(metavar="URL", help="The server's base_url.")]


@servers.command("list")
def list_servers(run: RunDir) -> None:
    """Print the run's servers: which serve, which are left out, since when and why."""

    def work() -> int:
        from learner.rollout.control import read_state, state_lines

        print("\n".join(state_lines(read_state(run))))
        return 0

    _end(work)


@servers.command("add")
def add_server(
    url: ServerUrl,
    run: RunDir,
    group_port: Annotated[int, typer.Option(help="TCP port of the weight sync on the server's host.")] = 51216,
) -> None:
    """Let a server join at the end of a step, after a full weight sync. Its token must be the run's."""
    _end(lambda: _ask_servers(run, "add", url, group_port))


@servers.command("remove")
def remove_server(url: ServerUrl, run: RunDir) -> None:
    """Send a server no further requests from the end of the step on. It can be stopped after the next weight sync."""
    _end(lambda: _ask_servers(run, "remove", url, None))


def _ask_servers(run: Path, action: Literal["add", "remove"], url: str, group_port: int | None) -> int:
    from learner.config.rules import entry_mistakes
    from learner.rollout.control import ServerRequest, ask
    from shared.config.model import ConfigErrors

    if mistakes := entry_mistakes(url, group_port):
        raise ConfigErrors(f"servers {action}: the server cannot be named like this", mistakes=mistakes)
    ask(run, ServerRequest(action=action, base_url=url.rstrip("/"), group_port=group_port or 0))
    print(f"asked: {action} {url}. The run takes it at the end of a step; `servers list` shows the result")
    return 0


@app.command(epilog=OTHERS, context_settings={"ignore_unknown_options": True})
def bench(
    arguments: Annotated[list[str] | None, typer.Argument(help="Those of bench.run, such as --part.")] = None,
) -> None:
    """Measure speed and memory on this machine.

    `rollout-learner bench -- --help` lists the parts.
    """
    _end(lambda: _bench(arguments or ()))


def _bench(arguments: Sequence[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench").is_dir():  # the container images go without
        raise ConfigError(
            "the benchmarks are not here",
            found=f"no folder bench in {root}",
            wanted="an installed wheel, or a clone",
            remedy="pip install CLONE, or make bench in a clone",
        )
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    argv = [sys.executable, "-m", "bench.run", *arguments]
    return subprocess.run(argv, env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}).returncode


def _check(config: str, overrides: Sequence[str], probe: bool, world_size: int | None) -> int:
    from learner.config.check import run_check

    return run_check(config, world_size=world_size, probe=probe, read_data=True, overrides=overrides)


def _train(config_path: str, overrides: Sequence[str]) -> int:
    from learner.config.load import load_config
    from learner.config.rules import colocates

    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # torchrun is gone: a checkpoint, and the end
    # A wrong configuration is reported before torch is loaded.
    config = load_config(config_path, world_size=int(os.environ.get("WORLD_SIZE", 1)), overrides=overrides)
    if colocates(config):
        prepare_for_vllm(os.environ)
    if interface := gloo_interface(os.environ):
        os.environ[GLOO_VARIABLE] = interface
    from learner.build import train

    return train(config, environment=os.environ)


def _end(work: Callable[[], int]) -> None:
    """Do the work of a command and end with its exit code. Nothing else is raised: typer would say "Aborted" for some
    errors, and hide where they come from."""
    try:
        code = work()
        sys.stdout.flush()
    except ProjectError as error:
        code = _tell(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            code = 128 + signal.SIGPIPE
        elif isinstance(error, ImportError) and (known := missing_package(error)):
            code = _tell(known)
        else:
            traceback.print_exc()
            code = 1
    raise typer.Exit(code)


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader has gone. From now on it leads nowhere then: Python flushes it at its
    end."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return True


def _tell(error: ProjectError) -> int:
    rank = os.environ.get("RANK")
    print(f"error{f' (rank {rank})' if rank else ''}: {type(error).__name__}: {error}", file=sys.stderr)
    if isinstance(error, CollectiveError):
        time.sleep(CAUSE_GRACE_S)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
