"""Finds the model for `predict`. In: a folder. Out: the model's files, and the settings for prompting it.

`MODEL` is a checkpoint, an export, any other model's folder, or a run's folder, whose newest checkpoint is taken. A
checkpoint with an adapter is merged into a folder of its own first: engines serve whole models.

Anyone who can write into a model's folder may have put a `config.yaml` there. So only the prompt, the task and limits
are taken from a `config.yaml` in a model's folder (D24). Readers, imports and variables need a configuration that the
user named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from learner.config.inference import (
    CALIBRATION_NAME,
    INFERENCE_NAME,
    InferenceSettings,
    prompt_messages,
    read_settings,
    settings_of,
)
from learner.config.load import RESOLVED_NAME, load_config, load_found
from learner.config.schema import RunConfig
from learner.config.sections.data import DataConfig
from learner.data.splits import read_split
from learner.detector.first_boxes import first_settings
from learner.detector.inputs import Anything
from learner.records import Sample, Unit
from learner.run.best import kept, only_worse
from shared.errors import ConfigError, DataError, RequestError
from shared.generation import render_messages
from shared.reading import is_inside

_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
ADAPTER = "adapter_config.json"
BESIDE = "config.yaml beside the model"
_FIRST_RECORDS = 200  # number of records read to find the prompt, if only a configuration has it


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model's folder, and how the model is asked."""

    folder: Path
    settings: InferenceSettings
    run: RunConfig | None = None  # the configuration of the run that wrote the model; None: not known
    prompted: bool = False  # True: the user gave a prompt, which may differ from that of training
    writes: Unit | None = None  # unit of the boxes of a model that this project did not train; else None
    warnings: tuple[str, ...] = ()  # why a run's configuration is not used, and why the weights may be poor

    @property
    def has_adapter(self) -> bool:
        return (self.folder / ADAPTER).is_file()


def find_model(
    path: str | Path, *, config: str | None = None, prompt: str | None = None, classes: Sequence[str] = ()
) -> ModelFiles:
    """Find the files of a model. If no file says how to ask the model, it is asked for `classes`, with a prompt for its
    family of models. With `classes`, `path` may also be a name on the Hugging Face hub.

    Raises ConfigError if `path` is no model, or no file says how to ask it."""
    folder = model_folder(_downloaded(path) if classes else Path(path))
    worse = only_worse(Path(path))
    warnings = [f"{path}: {worse}; its newest weights are asked, {folder.name}"] if worse is not None else []
    settings = None if config else read_settings(folder)
    run, warning = (load_config(config), "") if config else _found_run(folder, needed=settings is None)
    warnings += [warning] if warning else []
    writes: Unit | None = None
    if settings is None and config is None and classes and (run is None or run.data.prompt is None):
        settings, writes = first_settings(folder, classes)
    if settings is None:
        if run is None or (config is None and run.data.prompt is None):
            found = "inference.json in it nor a run's config.yaml beside it"
            raise ConfigError(
                f"{folder}: nothing says how to ask this model",
                found=f"neither {found}" if run is None else f"no inference.json in it, and no data.prompt in {BESIDE}",
                wanted="the prompt, the task and the limits of images that it was trained with",
                remedy="name the run's configuration: --config run.yaml; or what to look for, if it was not "
                "trained here: predict --classes raccoon,dog",
            )
        settings = settings_of(run, _first_samples(run.data, run) if config else ())
    if prompt is not None:
        settings = settings.model_copy(update={"messages": prompt_messages(prompt)})
    return ModelFiles(
        folder=folder,
        settings=settings,
        run=run,
        prompted=prompt is not None,
        writes=writes,
        warnings=tuple(warnings),
    )


def _downloaded(path: str | Path) -> Path:
    """Return the folder of a model with a name on the Hugging Face hub, which is downloaded if necessary. Any other
    path is returned unchanged. Raises ConfigError."""
    name = str(path)
    if Path(path).exists() or not _ON_HUB.fullmatch(name):
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the hub's client and its libraries raise errors of all kinds
        raise ConfigError(
            "there is no model",
            found=f"{name}: no such folder, and from the hub: {type(error).__name__}: {str(error)[:200]}",
            wanted="a folder, or a name on the Hugging Face hub",
            remedy="correct --model",
        ) from error


def _found_run(folder: Path, *, needed: bool) -> tuple[RunConfig | None, str]:
    """Return the configuration in the model's folder, and a warning. Parts that may run code are removed, and the
    warning names them. Raises ConfigError if the configuration is needed and wrong."""
    if (file := _config_beside(folder)) is None:
        return None, ""
    try:
        run, left_out = load_found(file)
    except ConfigError as error:
        # A run of another version may have keys that are gone. `inference.json` says how its model is asked.
        if needed:
            raise
        return None, f"{BESIDE} is not used, and annotations are read by the defaults: {error}"
    said = f"{BESIDE} was found, not named, so only data were taken from it, without {', '.join(left_out)}"
    return run, f"{said}. To use these: --config {file}" if left_out else ""


def name_of(path: Path, folder: Path) -> str:
    """Return the model's name for people, such as `cells, step 40`: the name of `path`, which the user gave, and, if
    `folder` is a checkpoint, its step."""
    step, whose = _CHECKPOINT.fullmatch(folder.resolve().name), path.resolve()
    if _CHECKPOINT.fullmatch(whose.name):
        whose = whose.parent
    if whose.name == "checkpoint":
        return str(path)
    return f"{whose.name}, step {step[1]}" if step else whose.name


def require_boxes(model: ModelFiles) -> None:
    """Raises ConfigError if the model's answers have no boxes."""
    if model.settings.task.type != "detection":
        raise ConfigError(
            "predict finds boxes, and this model's task has none",
            found=f"task.type: {model.settings.task.type}",
            wanted="task.type: detection",
            remedy="ask the model by rollout-server, or by its checkpoint with transformers",
        )


def require_one_image_prompt(model: ModelFiles) -> None:
    """Raises ConfigError if the prompt is for several images, as prompts for pages or views are."""
    try:
        render_messages(model.settings.messages, 1)
    except RequestError as error:
        raise ConfigError(
            "the model's prompt is not for one photograph",
            found=error.found,
            wanted="one <image>, because each photograph is looked at alone",
            remedy="give a --prompt with one <image>; a run itself evaluates records of several images",
        ) from error


def require_classes(model: ModelFiles, classes: Sequence[str]) -> None:
    """Raises ConfigError for classes that the model was not trained on, unless the user gave a prompt."""
    known = model.settings.classes
    unknown = [name for name in classes if name not in known]
    if known and unknown and not model.prompted:
        raise ConfigError(
            "the model has no such class",
            found=", ".join(unknown),
            wanted=f"some of {', '.join(known)}",
            remedy="correct --classes, or name these objects in a --prompt",
        )


def trained_by(checkpoint: Path) -> tuple[Path, int] | None:
    """Return the run that wrote a checkpoint, and its optimizer step; None if the folder is no checkpoint of a run."""
    folder = checkpoint.resolve()
    named = _CHECKPOINT.fullmatch(folder.name)
    return (folder.parent, int(named[1])) if named and _config_beside(folder) else None


# Patterns of the names of all files that transformers, vLLM and `predict` read.
BELONGS = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "chat_template.*"),
    *("adapter_config.json", "*processor_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken"),
    *("spiece.model", "sentencepiece.bpe.model", INFERENCE_NAME, CALIBRATION_NAME),
)
LICENSES = ("LICENSE*", "NOTICE*")  # license files, which an export has too

# Names of the learner's own files and folders, which are not copied into an export.
LEARNERS = ("training_state", "trainer_state.json", "manifest.json", "origin.json", "README.md")
TEMPLATES = "additional_chat_templates"  # the only sub-folder that belongs to a model


def model_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return two lists: the files that belong to a model, as paths inside its folder, and a phrase for each file that
    is left out. Left out are other files, and links that leave the folder. Hidden files and the learner's own files are
    in neither list."""
    files, left_out = [], []
    # A link could lead to a folder of other files.
    templates = () if (folder / TEMPLATES).is_symlink() else folder.glob(f"{TEMPLATES}/*")
    for path in sorted([*folder.glob("*"), *templates]):
        inside, is_link = str(path.relative_to(folder)), path.is_symlink()
        if path.name.startswith(".") or path.name in LEARNERS or (inside == TEMPLATES and not is_link):
            continue
        belongs = inside != path.name or any(fnmatchcase(path.name, pattern) for pattern in (*BELONGS, *LICENSES))
        is_own = path.exists() and is_inside(path.resolve(), folder)
        if belongs and is_own and path.is_file():
            files.append(inside)
        else:
            left_out.append(inside if is_own or not is_link else f"{inside} (a link that leaves the folder)")
    return files, left_out


@contextmanager
def only_its_files(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder with only the model's files from `folder`, and a phrase for each file that is left out. Raises
    ConfigError if neither the model's nor an adapter's configuration belongs to it."""
    files, left_out = model_files(folder)
    if not {"config.json", ADAPTER} & {*files}:
        raise ConfigError(
            f"{folder}: the model cannot be exported",
            found=", ".join(left_out),
            wanted="config.json or adapter_config.json in the folder itself",
            remedy="copy the files to where the links are, or name the folder that has them",
        )
    with TemporaryDirectory(prefix="model-") as name:
        for inside in files:
            shown = Path(name, inside)
            shown.parent.mkdir(exist_ok=True)
            shown.symlink_to((folder / inside).resolve())
        yield Path(name), left_out


@contextmanager
def merged(model: ModelFiles) -> Iterator[Path]:
    """Yield a folder with the whole model. A model with an adapter is merged into a folder that the end of the `with`
    block deletes."""
    if not model.has_adapter:
        yield model.folder
        return
    import torch

    from learner.config.sections.model import ModelConfig
    from learner.policy.files import export_model
    from learner.policy.load import load_policy

    with TemporaryDirectory(prefix="merged-") as folder:
        policy = load_policy(ModelConfig(path=str(model.folder)), device=torch.device("cpu"))
        export_model(policy, Path(folder), dtype=policy.model.dtype)
        del policy
        yield Path(folder)


def model_folder(path: Path) -> Path:
    """Return `path` if it is a model, else the best or newest checkpoint of a run. Raises ConfigError if there is no
    model, or if the checkpoint is a link that leaves the run's folder."""
    if _is_model(path):
        return path
    steps = {
        int(match[1]): entry
        for entry in path.glob("checkpoint-*")
        # A folder may have a checkpoint's name without being one.
        if (match := _CHECKPOINT.fullmatch(entry.name)) and _is_model(entry)
    }
    if (found := kept(path) or steps.get(max(steps, default=0))) is not None:
        # A link out of the run's folder is refused: anyone who can write at its target could replace the model.
        if not found.resolve().is_relative_to(path.resolve()):
            raise ConfigError(
                "the run's model is a link that leaves the run's folder",
                found=f"{path} -> {found.resolve()}",
                wanted="a checkpoint of the run",
                remedy=f"name that model itself if it is the one that you mean: {found.resolve()}",
            )
        return found
    raise ConfigError(
        "there is no model",
        found=f"{path}: {'no config.json in it, and no checkpoint-STEP' if path.is_dir() else 'no such folder'}",
        wanted="a checkpoint, an exported model, or a run's folder with checkpoints",
        remedy="correct --model",
    )


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def can_be_asked(folder: Path) -> bool:
    """Return True if the folder of a checkpoint, or of its run, has the settings for prompting the model."""
    return (folder / INFERENCE_NAME).is_file() or _config_beside(folder) is not None


def _config_beside(folder: Path) -> Path | None:
    file = folder.absolute().parent / RESOLVED_NAME
    return file if file.is_file() else None


def _first_samples(data: DataConfig, run: RunConfig) -> list[Sample]:
    """Return some training samples, for their prompt and classes; [] if they cannot be read now."""
    lenient = data.model_copy(update={"on_bad_record": "drop"})
    try:
        geometry = run.task.geometry
        return read_split(lenient, data.train, Anything(), geometry=geometry, limit=_FIRST_RECORDS).samples
    except (DataError, OSError, json.JSONDecodeError):
        return []
