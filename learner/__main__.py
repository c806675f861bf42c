"""The learner's command line: `rollout-learner`, and `python -m learner`, which is the same.

    rollout-learner init FOLDER [--out DIR]                      look at a folder of photographs, write run.yaml
    rollout-learner train --config run.yaml [KEY=VALUE ...]      train, one rank
    torchrun --no-python rollout-learner train --config run.yaml train, torchrun's ranks
    rollout-learner check --config run.yaml [--draw N]           validate configuration and data; draw labels
    rollout-learner check --config run.yaml --machine            the same, and check this machine and the servers
    rollout-learner export --model DIR --out DIR                 write a checkpoint's merged weights, with a card
    rollout-learner predict --model DIR INPUT... --out DIR       find objects in photographs, with a score for each
    rollout-learner calibrate --model DIR ANNOTATIONS            fit these scores on validation images
    rollout-learner evaluate ANNOTATIONS --predictions NAME=FILE compare detectors: models, or any COCO results
    rollout-learner find-missing suggest|review|audit|write      suggest unlabelled objects, for a person to review
    rollout-learner report RUN_DIR [--live]                      write a run's report as one HTML page, or follow it
    rollout-learner servers list|add|remove [URL] --run RUN_DIR  list, add or remove the servers of a running run
    rollout-learner split --config run.yaml --out DIR            write lists of the photographs in each split
    rollout-learner schema                                       print the JSON Schema of run.yaml, for editors

`train` can be left out: `python -m learner --config run.yaml` trains, and with `--check` it only checks.

Exit codes: 0 done, 1 failed while running, 2 the user's input is wrong, 130 interrupted (128 + n: by signal n), 141
the reader of the output has gone (`... | head`). A user error is one message without a traceback; a bug keeps its
traceback. `--help` and `check` import neither torch nor transformers.
"""

from __future__ import annotations

import io
import logging
import os
import select
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, ParamSpec

import typer

from learner.run.environment import (
    GLOO_VARIABLE,
    collect_rarely,
    gloo_interface,
    keep_compiled,
    prepare_for_vllm,
    shorten_turns,
)
from shared.errors import CollectiveError, ConfigError, ProjectError
from shared.packages import check_compiler, missing_package
from shared.processes import FEW_SHAPES, end_with_parent
from shared.reading import is_utf8
from shared.version import Version

if TYPE_CHECKING:
    from learner.config.schema import RunConfig
    from learner.detector.answers import AnswerSettings
    from shared.config.model import ConfigErrors

P = ParamSpec("P")
# A rank that lost another rank waits this long before it ends, so that torchrun first sees the rank that failed.
CAUSE_GRACE_S = 5.0
PROGRAM = "rollout-learner"
COMMANDS = (
    *("init", "train", "recipe", "check", "export", "predict", "calibrate"),
    *("evaluate", "find-missing", "report", "servers", "split", "schema"),
)
_OTHERS = f"Commands of {PROGRAM}: {', '.join(COMMANDS)}. Other programs: rollout-server, rollout-launch."
# "\b" makes click keep these lines as they are. Without "\b" click would break names at their hyphens.
OTHERS = "\b\n" + textwrap.fill(_OTHERS, 78, break_on_hyphens=False)
_STDOUT = 1
GROUP_OPTIONS = ("--help", "--version", "--install-completion", "--show-completion")

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)
servers = typer.Typer(rich_markup_mode=None, no_args_is_help=True, epilog=OTHERS)
missing = typer.Typer(rich_markup_mode=None, no_args_is_help=True, epilog=OTHERS)
app.add_typer(missing, name="find-missing", help="Find objects that nobody labelled, review them, and write them.")
app.add_typer(servers, name="servers", help="Show and change the rollout servers of a run that goes on.")

ConfigOption = Annotated[str, typer.Option("--config", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file, such as training.learning_rate=1e-5."),
]
Probe = Annotated[bool, typer.Option("--probe", help="Ask the rollout servers too.")]
WorldSize = Annotated[int | None, typer.Option("--world-size", help="Number of learner ranks.")]
ModelOption = Annotated[Path, typer.Option("--model", help="A checkpoint, an export, or a run's folder.")]
ModelConfigOption = Annotated[
    str | None, typer.Option("--config", help="The run's YAML, for a model without inference.json.")
]
AnswersBy = Literal["vllm", "hf"]
BackendOption = Annotated[AnswersBy, typer.Option(help="vLLM in this process, or transformers' generate.")]
ComputesIn = Literal["auto", "bfloat16", "float32"]
DtypeOption = Annotated[ComputesIn, typer.Option(help="auto: bfloat16 on a GPU, float32 without.")]
ServerOption = Annotated[str | None, typer.Option(help="URL of a rollout server that serves this model.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer; default: as in training.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0].startswith("-") and arguments[0].split("=")[0] not in GROUP_OPTIONS:
        arguments.insert(0, "train")
    # An argument that is not UTF-8 would end in a traceback where it is printed or hashed.
    if strange := [argument for argument in arguments if not is_utf8(argument)]:
        remedy = "rename the file or folder"
        return _tell(ConfigError("an argument is not UTF-8", found=strange[0], wanted="names in UTF-8", remedy=remedy))
    try:
        _command()(arguments, prog_name=PROGRAM)
    except SystemExit as ended:  # typer ends this way, also after a wrong option
        return int(ended.code or 0)
    return 0


def _ends(command: Callable[P, int | None]) -> Callable[P, None]:
    """Make a command that raises typer.Exit with the exit code of `command` (None: 0), after errors too. Only errors in
    options are raised as they are: for some others typer prints "Aborted", without a traceback."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Names of classes and files may be in any language, also in a terminal that cannot show them.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            code = command(*arguments, **options) or 0
            # A closed pipe (the program that reads the output has ended) is noticed only here.
            sys.stdout.flush()
        except typer.BadParameter:
            raise
        except ProjectError as error:
            code = _tell(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                code = 128 + signal.SIGPIPE
            elif isinstance(error, ImportError | OSError) and (known := missing_package(error)):
                code = _tell(known)
            else:
                traceback.print_exc()
                code = 1
        raise typer.Exit(code)

    return run


@cache
def _command() -> Callable[..., object]:
    """Return the command line of all commands, made once."""
    return typer.main.get_command(app)


@app.callback()
def _group(version: Version = False) -> None:
    """Post-train vision-language models on their own rollouts. Other programs: rollout-server, rollout-launch."""


@app.command(epilog=OTHERS)
@_ends
def init(
    folder: Annotated[Path, typer.Argument(help="Photographs and annotations: YOLO, COCO, VOC, JSONL or Roboflow's.")],
    out: Annotated[Path, typer.Option(help="The folder for run.yaml and server.yaml.")] = Path(),
    image_root: Annotated[Path | None, typer.Option(help="Where the images are, if not near the annotations.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="The model to train, a folder or a name on the hub.")
    ] = None,
    label_with: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Photographs have no labels: suggest some by this model.")
    ] = None,
    classes: Annotated[str, typer.Option(help="With --label-with: names to look for, separated by commas.")] = "",
    backend: BackendOption = "vllm",
) -> int:
    """Look at a folder of photographs, and write run.yaml and server.yaml for it.

    The command reports what it found: format, classes, counts, sizes, and what looks like a mistake. It asks nothing,
    and replaces no file.
    """
    if label_with is not None:
        from learner.missing.first_labels import label

        return label(folder, out, label_with, _listed(classes), _answers(backend, None))
    from learner.doctor.init import init

    _tell_progress()
    return init(folder, out, image_root=image_root, model=model)


@app.command(epilog=OTHERS)
@_ends
def train(
    config: ConfigOption,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="The same as the command `check`.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="With --check: ask the rollout servers too.")] = False,
    world_size: Annotated[int | None, typer.Option("--world-size", help="With --check: number of ranks.")] = None,
    stage: Annotated[bool, typer.Option("--stage", hidden=True)] = False,  # set by a recipe for its stages
) -> int:
    """Train. This process is one rank; torchrun starts several."""
    if not check and (probe or world_size is not None):
        raise typer.BadParameter("--probe and --world-size go with --check")
    if check:
        return _check(config, overrides or (), probe, world_size)
    return _train(config, overrides or (), stage)


@app.command(epilog=OTHERS)
@_ends
def recipe(
    config: ConfigOption,
    minutes: Annotated[
        float | None, typer.Option(help="The time for all stages together.", min=0.05, max=1e5, show_default=False)
    ] = None,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Ranks on this machine, one per device.", min=1)] = 1,
    only_measure: Annotated[
        bool, typer.Option("--only-measure", help="Train nothing: measure what training could gain, and how.")
    ] = False,
    samples: Annotated[
        int, typer.Option(help="With --only-measure: scenes of each split, drawn with a fixed seed.", min=2)
    ] = 100,
    generations: Annotated[
        int, typer.Option(help="With --only-measure: answers drawn to each scene at temperature 1: K.", min=2)
    ] = 8,
    json: Annotated[Path | None, typer.Option(help="With --only-measure: write the features to this file too.")] = None,
) -> int:
    """Choose the methods and train: sft on completed labels, then grpo if it helps.

    The command measures, decides and says why, all in one run directory. Validation decides, so the result is never
    worse than the start. Each stage is a process, of --nproc ranks. After an interruption the same command continues.

    With --only-measure the run's model answers some scenes, without a server, and nothing is trained: features, a
    recommendation, and its reasons are printed.
    """
    if only_measure == (minutes is not None):
        raise typer.BadParameter("give either --minutes, or --only-measure")
    if not only_measure and json is not None:
        raise typer.BadParameter("--json goes with --only-measure")

    if minutes is not None:
        return _recipe(config, overrides or (), minutes, nproc)
    from learner.predict.measure import MeasureSettings, predict_gain

    asked = MeasureSettings(num_samples=samples, num_generations=generations)
    return predict_gain(config, overrides or (), asked=asked, json_path=json)


@app.command(epilog=OTHERS)
@_ends
def check(
    config: ConfigOption,
    overrides: Overrides = None,
    probe: Probe = False,
    world_size: WorldSize = None,
    json: Annotated[bool, typer.Option("--json", help="Print the resolved plan as JSON.")] = False,
    draw: Annotated[int, typer.Option(min=0, help="Draw so many training photographs, with labels, augmented.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder for what is drawn.")] = Path("check-pictures"),
    machine: Annotated[bool, typer.Option("--machine", help="Check this machine and the rollout servers too.")] = False,
) -> int:
    """Check a configuration and its data; with --machine also this machine and the servers.

    Prints every mistake, or what the data is and that the run is ready. Starts nothing, but imports the parts that the
    configuration names (rewards, tasks, readers), so their code runs.

    With --machine it then looks at libraries, memory, disk, ports and the rollout servers. Exit code 2: the
    configuration or its data is wrong. Exit code 1: something else is wrong. `rollout-launch --check` checks a launch
    and its devices.
    """
    if not machine:
        return _check(config, overrides or (), probe, world_size, people=not json, draw=draw, out=out)
    if draw or probe:
        raise typer.BadParameter("--draw and --probe do not go with --machine, which asks the servers too")
    from learner.doctor.check import check_machine

    return check_machine(config, overrides or (), world_size=world_size, environment=os.environ, people=not json)


@app.command(epilog=OTHERS)
@_ends
def export(
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="The type of the weights.")] = "bfloat16",
    config: ModelConfigOption = None,
) -> None:
    """Write a checkpoint as a model to serve, with its adapters merged and a model card.

    The card, README.md, has the run's figures. `hf upload OWNER/NAME DIR` publishes the folder.
    """
    from learner.detector.card import notes_of
    from learner.detector.model import model_folder, only_its_files
    from learner.run.best import only_worse
    from learner.wiring.build import export

    folder = model_folder(model)
    if (worse := only_worse(model)) is not None:
        _warn(f"{model}: {worse}; its newest weights are written, {folder.name}")
    notes = notes_of(folder, out.resolve().name, config=config, tell=_warn)
    with only_its_files(folder) as (shown, left_out):
        export(shown, out, dtype, notes)
    print(f"wrote {out}, from {folder}")
    if left_out:
        _warn(f"not exported, because they are not the model's own files: {', '.join(left_out)}")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


@app.command(epilog=OTHERS)
@_ends
def predict(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Photographs, folders, patterns, or annotation files.")
    ],
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="The folder for results; a second command goes on there.")],
    backend: BackendOption = "vllm",
    server: ServerOption = None,
    samples: Annotated[int, typer.Option(min=0, max=64, help="Drawn answers of each image: better scores.")] = 0,
    conf: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Least score; default: the best on validation.")
    ] = None,
    classes: Annotated[str | None, typer.Option(help="Only these, by commas; a base model is asked for them.")] = None,
    tile: Annotated[
        int | None, typer.Option(min=32, help="Cut larger photographs into tiles: the longer side, in pixels.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    prompt: Annotated[str | None, typer.Option(help="Instead of the prompt of training.")] = None,
    config: ModelConfigOption = None,
    dtype: DtypeOption = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what is in the folder.")] = False,
) -> int:
    """Find objects in photographs.

    The command writes pictures with boxes, COCO results, a CSV and a page. The exit code is 1 if a photograph could not
    be read.
    """
    from learner.detector.command import Options, predict

    asked = _answers(backend, server, samples=samples, max_new_tokens=max_new_tokens, dtype=dtype)
    options = Options(
        model=model,
        inputs=tuple(inputs),
        out=out,
        asked=asked,
        config=config,
        prompt=prompt,
        conf=conf,
        classes=_listed(classes or ""),
        tile=tile,
        overwrite=overwrite,
    )
    return predict(options)


@app.command(epilog=OTHERS)
@_ends
def calibrate(
    annotations: Annotated[str, typer.Argument(help="Annotated images that the model was not trained on.")],
    model: ModelOption,
    samples: Annotated[str, typer.Option(help="Numbers of drawn answers to calibrate for.")] = "0,4",
    backend: BackendOption = "vllm",
    server: ServerOption = None,
    max_new_tokens: MaxNewTokens = None,
    config: ModelConfigOption = None,
    dtype: DtypeOption = "auto",
    out: Annotated[Path | None, typer.Option(help="Default: calibration.json beside the model.")] = None,
) -> int:
    """Fit the scores of a model's boxes.

    The model answers validation images. The answers give calibration.json, with which predict says how probably a box
    is right.
    """
    numbers = _numbers(samples, "--samples")
    from learner.detector.calibration import calibrate

    asked = _answers(backend, server, max_new_tokens=max_new_tokens, dtype=dtype)
    return calibrate(model, annotations, numbers, asked=asked, config=config, out=out)


@app.command(epilog=OTHERS)
@_ends
def evaluate(
    annotations: Annotated[str, typer.Argument(help="An annotation file of any format.")],
    out: Annotated[Path, typer.Option(help="The folder for evaluation.json and the page.")],
    predictions: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="COCO results of any detector; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="A model that answers the images; may be repeated.")
    ] = None,
    retain: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Other annotations that models answer; repeatable.")
    ] = None,
    val: Annotated[str | None, typer.Option(help="Annotations on which thresholds are chosen.")] = None,
    val_predictions: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Results on --val, by the same names.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=64, help="Drawn answers of each image, of models.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer, of models.")] = None,
    backend: BackendOption = "vllm",
    server: ServerOption = None,
    image_root: Annotated[str | None, typer.Option(help="Where relative image paths start.")] = None,
    names: Annotated[
        str, typer.Option(help="Classes of results: of numbers 'helmet,vest', or each 'Helmet=helmet,2=vest,3='.")
    ] = "",
    coordinates: Annotated[
        Literal["pixels", "thousandths", "shares", "percent"], typer.Option(help="The unit of the results' boxes.")
    ] = "pixels",
    box_format: Annotated[
        Literal["xywh", "xyxy"], typer.Option(help="The results' boxes: with width and height, or as two corners.")
    ] = "xywh",
    audit: Annotated[
        Path | None, typer.Option(help="Where labels have gaps: the audit.json of find-missing audit.")
    ] = None,
    ignore_border: Annotated[
        bool, typer.Option("--ignore-border", help="Leave out boxes that touch the border of their image.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that evaluate did not write.")] = False,
) -> int:
    """Compare detectors on an annotation file.

    The command shows F1 at the best threshold, AP, calibration and classes, with intervals, and the difference of every
    two detectors.
    """
    given, answering = _named(predictions, "--predictions"), _named(model, "--model")
    held_out, retained = _named(val_predictions, "--val-predictions"), _named(retain, "--retain")
    from learner.detector.evaluate import EvaluateOptions, evaluate
    from learner.detector.results_in import ReadAs

    asked = _answers(backend, server, samples=samples, max_new_tokens=max_new_tokens)
    options = EvaluateOptions(
        annotations=annotations,
        predictions=given,
        models=answering,
        val=val,
        val_predictions=held_out,
        retain=retained,
        asked=asked,
        image_root=image_root,
        read_as=ReadAs.of(names, coordinates, box_format),
        audit=audit,
        ignore_border=ignore_border,
        out=out,
        overwrite=overwrite,
    )
    return evaluate(options)


def _tell_progress() -> None:
    """Show in a terminal how many annotations are read: 100,000 photographs take minutes."""
    if sys.stderr.isatty():
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: record.levelno == logging.INFO)
        reading = logging.getLogger("learner.data.splits")
        reading.addHandler(handler)
        reading.setLevel(logging.INFO)


def _listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _answers(
    backend: AnswersBy,
    server: str | None,
    *,
    samples: int = 0,
    max_new_tokens: int | None = None,
    dtype: ComputesIn = "auto",
) -> AnswerSettings:
    """Return the settings for a model's answers, with the server's token from the environment."""
    from learner.detector.answers import AnswerSettings
    from shared.tokens import read_token

    return AnswerSettings(
        backend=backend,
        server=server,
        samples=samples,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        token=read_token(os.environ),
    )


def _named(texts: Sequence[str] | None, option: str) -> dict[str, Path]:
    """Read texts `NAME=PATH`; a path without NAME gets its file's name. Raises BadParameter if two names are equal."""
    found: dict[str, Path] = {}
    for text in texts or ():
        given, sign, path = text.partition("=")
        name = given if sign else Path(text).stem
        if name in found:
            raise typer.BadParameter(f"{name!r} is the name of two: give each its own, NAME=PATH", param_hint=option)
        found[name] = Path(path if sign else text)
    return found


def _numbers(text: str, option: str) -> list[int]:
    """Read numbers separated by commas. Raises BadParameter."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise typer.BadParameter(f"{text!r}: numbers separated by commas, such as 0,4", param_hint=option)
    return found


@app.command(epilog=OTHERS)
@_ends
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: RUN_DIR/report.html.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another run, shown beside it.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve a page that follows the run instead.")] = False,
    host: Annotated[str, typer.Option(help="With --live: the address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --live: the port; 0: any.", min=0, max=65535)] = 8790,
    send_token: Annotated[
        bool,
        typer.Option("--send-token", help="With --live: send ROLLOUT_SERVER_TOKEN to the servers that the run names."),
    ] = False,
) -> int:
    """Write a run's report as one HTML page, or follow a run in the browser."""
    if live and (out or compare):
        raise typer.BadParameter("--out and --compare do not go with --live")
    if live:
        from learner.report.live import serve

        return serve(run_dir, host=host, port=port, send_token=send_token)
    from learner.report.page import write_report

    print(write_report(run_dir, out=out, compare=compare))
    return 0


SuggestionsDir = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of find-missing suggest.")]


@missing.command("suggest")
@_ends
def suggest_missing(
    annotations: Annotated[
        str,
        typer.Argument(
            help="COCO or JSONL file, VOC folder or list, YOLO data.yaml:SPLIT, or Hugging Face FOLDER:SPLIT."
        ),
    ],
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    samples: Annotated[int, typer.Option(min=2, max=64, help="Answers drawn to each image.")] = 4,
    tile: Annotated[
        list[int] | None,
        typer.Option(
            min=32, help="Ask about overlapping tiles, too: the longer side, in pixels; again for another size."
        ),
    ] = None,
    image_root: Annotated[str | None, typer.Option(help="Where relative image paths start.")] = None,
    backend: BackendOption = "vllm",
    server: ServerOption = None,
    config: ModelConfigOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Ask the model several times about each image. The command lists the boxes that answers agree on and nobody
    labelled, best first."""
    from learner.detector.command import quiet
    from learner.detector.model import find_model
    from learner.missing.suggest import annotations_of, suggest

    quiet()
    asked = _answers(backend, server, samples=samples, dtype=dtype)
    files = find_model(model, config=config)
    for warning in files.warnings:
        _warn(warning)
    data = annotations_of(files, annotations, image_root=image_root, named=config is not None)
    found = suggest(files, data, out, asked, tiles=tile or (), tell=lambda text: print(text, file=sys.stderr))
    print(f"{len(found)} suggestions; review them: {PROGRAM} find-missing review {shlex.quote(str(out))}")


@missing.command("review")
@_ends
def review_missing(
    folder: SuggestionsDir,
    port: Annotated[int, typer.Option(help="The port to listen at.", min=1, max=65535)] = 8791,
) -> int:
    """Serve a page for one person: accept, reject, fix the name. Decisions are saved in the folder."""
    from learner.missing.review import serve

    return serve(folder, port=port)


@missing.command("audit")
@_ends
def audit_missing(
    folder: SuggestionsDir,
    number: Annotated[int, typer.Option(help="Suggestions that are drawn to be judged.", min=1)] = 60,
    port: Annotated[int, typer.Option(help="The port to listen at.", min=1, max=65535)] = 8791,
) -> int:
    """Serve a page on which one person judges a random sample of the suggestions: right, wrong name, nothing there,
    cannot tell. From `audit.json` in the folder, a run knows how often suggestions are right
    (`labels.complete.audit`)."""
    from learner.missing.review import serve

    return serve(folder, port=port, audit=number)


@missing.command("write")
@_ends
def write_missing(
    folder: SuggestionsDir,
    out: Annotated[Path, typer.Option(help="The new annotations; nothing is overwritten.")],
) -> None:
    """Write the annotations with the accepted objects, in the format that they came in."""
    from learner.missing.review import added_in_words, to_train_on, write_reviewed
    from learner.missing.suggest import key_of

    print(f"wrote {out}: {added_in_words(write_reviewed(folder, out), folder)}")
    print(f'for the next run: data.{key_of(folder)}="{to_train_on(folder, out)}"')


RunDir = Annotated[Path, typer.Option("--run", help="The run directory (training.output_dir).")]
ServerUrl = Annotated[str, typer.Argument(metavar="URL", help="The server's base_url.")]


@servers.command("list")
@_ends
def list_servers(run: RunDir) -> None:
    """Print the run's servers: which serve, which are left out, since when and why."""
    from learner.rollout.control import read_state, state_lines

    print("\n".join(state_lines(read_state(run))))


@servers.command("add")
@_ends
def add_server(
    url: ServerUrl,
    run: RunDir,
    group_port: Annotated[int, typer.Option(help="TCP port of the weight sync on the server's host.")] = 51216,
) -> None:
    """Let a server join at the end of a step, after a full weight sync. The server's token must be the run's token."""
    _ask_servers(run, "add", url, group_port)


@servers.command("remove")
@_ends
def remove_server(url: ServerUrl, run: RunDir) -> None:
    """Send a server no more requests after the end of the step. The server can be stopped after the next weight
    sync."""
    _ask_servers(run, "remove", url, None)


def _ask_servers(run: Path, action: Literal["add", "remove"], url: str, group_port: int | None) -> None:
    from learner.config.sections.servers import entry_mistakes
    from learner.rollout.control import ServerRequest, ask
    from shared.config.model import ConfigErrors

    if mistakes := entry_mistakes(url, group_port):
        raise ConfigErrors(f"servers {action}: the server cannot be named like this", mistakes=mistakes)
    ask(run, ServerRequest(action=action, base_url=url.rstrip("/"), group_port=group_port or 0))
    print(f"asked: {action} {url}. The run takes it at the end of a step; `servers list` shows the result")


@app.command(epilog=OTHERS)
@_ends
def split(
    config: ConfigOption,
    out: Annotated[Path, typer.Option(help="The folder for train.txt, val.txt and test.txt.")],
    overrides: Overrides = None,
) -> int:
    """Write lists of the photographs that a run trains on and is evaluated on, also for YOLO trainers."""
    from learner.doctor.lists import write_lists

    return write_lists(config, out, overrides or ())


@app.command(epilog=OTHERS)
@_ends
def schema() -> None:
    """Print the JSON Schema of run.yaml, with which editors complete and check its keys."""
    from shared.config.json_schema import json_schema

    print(json_schema("learner"), end="")


def _check(
    config: str,
    overrides: Sequence[str],
    probe: bool,
    world_size: int | None,
    *,
    people: bool = False,
    draw: int = 0,
    out: Path = Path(),
) -> int:
    _tell_progress()
    from learner.doctor.check import DrawRequest, run_check

    return run_check(
        config,
        world_size=world_size,
        probe=probe,
        read_data=True,
        overrides=overrides,
        people=people,
        drawing=DrawRequest(draw, out) if draw else None,
    )


def _train(config_path: str, overrides: Sequence[str], is_stage: bool) -> int:
    config = _rank_config(config_path, overrides)
    if is_stage:
        from learner.recipe.stage import train_stage

        return train_stage(config, environment=os.environ)
    from learner.wiring.build import train

    return train(config, environment=os.environ)


def _recipe(config_path: str, overrides: Sequence[str], minutes: float, nproc: int) -> int:
    from learner.config.load import load_config
    from shared.config.model import ConfigErrors

    # The override turns evaluations on, because every stage needs them.
    try:
        config = load_config(config_path, world_size=nproc, overrides=(*overrides, f"{_EVALUATED}=true"))
    except ConfigErrors as error:
        raise _without_our_key(error) from error
    from learner.recipe.command import recipe

    return recipe(config, minutes, nproc=nproc, environment=os.environ)


_EVALUATED = "training.eval_on_start"


def _without_our_key(error: ConfigErrors) -> ConfigErrors:
    """Return the errors in the user's words: a mistake about the evaluations that `recipe` turns on becomes
    `NO_VALIDATION`, the mistake about `data.val`."""
    from learner.config.sections.training import NO_DATA
    from learner.recipe.stages import NO_VALIDATION
    from shared.config.model import ConfigErrors

    return ConfigErrors(error.what, mistakes=[NO_VALIDATION if one.found == NO_DATA else one for one in error.mistakes])


def _rank_config(config_path: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of this rank. A wrong configuration raises before torch is loaded. Sets the environment
    variables that torch and vLLM need."""
    # Nearly all objects that are made at the start stay alive. So garbage collections freed nothing, but took 4.1 of
    # the 17 s of processor time.
    collect_rarely()
    from learner.config.load import load_config
    from learner.config.modes import colocates

    if "TORCHELASTIC_RUN_ID" in os.environ:
        # If torchrun dies, SIGTERM makes the run write a checkpoint and end.
        end_with_parent(signal.SIGTERM)
    config = load_config(config_path, world_size=int(os.environ.get("WORLD_SIZE", 1)), overrides=overrides)
    if colocates(config):
        # Without a compiler vLLM on CPU fails only at the first check of weights (canary), minutes later.
        check_compiler(os.environ)
        prepare_for_vllm(os.environ)
    # Compiled code is kept outside of /tmp, torch's default, which many machines clear. With kept code the first step
    # took 8 s, without it 41 s.
    if config.model.compile:
        keep_compiled(os.environ)
    # On CPU a learner took 2.2 GiB after 2,000 photographs of many sizes. With these bounds a learner takes 1.3 GiB.
    for name, value in FEW_SHAPES.items():
        os.environ.setdefault(name, value)
    # On several nodes gloo must not use the loopback interface, through which ranks on other nodes cannot be reached.
    if interface := gloo_interface(os.environ):
        os.environ[GLOO_VARIABLE] = interface
    # By default a thread that reads rollouts may hold Python's lock for 5 ms, while the GPU waits for its next launch.
    shorten_turns()
    return config


def _nobody_reads() -> bool:
    """Return True if stdout is a pipe that nobody reads any more. In this case stdout becomes /dev/null, so that Python
    can flush it at exit without an error."""
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
