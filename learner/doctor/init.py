"""`rollout-learner init FOLDER`: looks at a folder of photographs and annotations, says what it found, and writes a
commented run.yaml and server.yaml for this machine. The command asks nothing, and replaces no file.

In: a folder in one of the layouts of `learner.data.formats.folders`. Out: lines on the terminal and two files. Without
a split for validation, some of the photographs to train on are held out: a tenth, but at least 20; if there are fewer
than 80, a quarter.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from learner.config.inference import InferenceSettings, prompt_messages, read_settings
from learner.config.sections.data import DataConfig
from learner.data.check import WithoutTokenizer
from learner.data.formats.detect import is_saved, locate
from learner.data.formats.folders import split_called, splits_in
from learner.data.formats.hf_datasets import split_names
from learner.data.formats.parts import Part
from learner.data.formats.source import photographs_below
from learner.data.splits import Split, annotations_of, read_split
from learner.data.survey import LEAST_HELD_OUT, Survey, photographs, shared_images, survey
from learner.data.units import PixelLimits
from learner.doctor.data_report import of_split, split_in_words
from learner.records import Sample
from learner.run.files import write_atomically
from learner.tasks.detection.write import validate_sample
from shared.errors import ConfigError, DataError, OutputError
from shared.families import check_folder, text_only
from shared.reading import is_file

PROMPT = '<image>List every object as JSON: [{\\"bbox_2d\\": [x1, y1, x2, y2], \\"label\\": \\"...\\"}, ...]'
LARGEST_PART = 4  # if there are few photographs, one in four is held out
_PERCENTS = (*range(10, 100), *range(9, 0, -1))  # percents to hold out; the first that is enough is taken
_MAX_PIXELS = 2 << 20  # as many pixels as 2,048 visual tokens
_LEAST_PIXELS = 1 << 18
_TOKENS_PER_BOX = 40
_LARGE_GIB = 30  # min memory of a GPU for a 4B model with LoRA and vLLM on the same GPU (bench.cards)
_MIDDLE_GIB = 20  # min memory for a 4B model if it and its optimizer are in host memory while vLLM generates
_EVALUATIONS = 10  # number of evaluations in a run; a short run has fewer

# A recipe ends `sft` after two evaluations without a gain, and measured runs on 32 to 256 samples were best after 8 to
# 72 steps.
_LEAST_STEPS = 8  # min optimizer steps between two evaluations
_MOST_EVALUATED = 500  # max photographs in an evaluation
_MAX_ERRORS = 5
_LEFT_OUT = {"image_missing", "image_size", "too_long"}  # kinds of bad records whose photograph is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The GPUs of this machine. `named`: the model that the user wants; None: a model that fits."""

    num_gpus: int
    memory_gib: float  # memory of each GPU, in GiB
    named: str | None = None

    @property
    def model(self) -> str:
        if self.named is not None:
            return self.named
        large = self.num_gpus and self.memory_gib >= _MIDDLE_GIB
        return "Qwen/Qwen3-VL-4B-Instruct" if large else "Qwen/Qwen3-VL-2B-Instruct"

    def rollouts(self, max_model_len: int) -> str:
        """Return the lines of run.yaml about the rollout backend, with settings for the memory of this GPU."""
        if not self.num_gpus:
            return "      rollout_backend: hf     # without a GPU; slow, enough to try\n"
        small = self.memory_gib < _LARGE_GIB
        share, sleep = ("0.5", "sleep: always, ") if small else ("0.4", "")
        vllm = f"mode: colocate, tensor_parallel_size: 1, gpu_memory_utilization: {share}, {sleep}"
        lines = f"      vllm: {{{vllm}max_model_len: {max_model_len}}}\n"
        if small and self.memory_gib >= _MIDDLE_GIB:
            lines += "      # while vLLM generates, the trained model is in host memory, so that it fits this GPU\n"
            lines += "      offload: {enabled: true, offload_model: true, offload_optimizer: true}\n"
        return lines

    def __str__(self) -> str:
        return f"{self.num_gpus} GPU(s) of {self.memory_gib:.0f} GiB" if self.num_gpus else "no GPU"


def init(folder: Path, out: Path, *, image_root: Path | None = None, model: str | None = None) -> int:
    """Print a survey of the folder, and write run.yaml and server.yaml. Returns the exit code: 2 if records cannot be
    used.

    `model`: a folder or a name on the hub; None: a model that fits the machine. Raises DataError if the folder has no
    annotations that are known, ConfigError if the model cannot be trained on photographs, OutputError if one of the
    files exists.
    """
    run_file, server_file = out / "run.yaml", out / "server.yaml"
    for file in (run_file, server_file):
        if file.exists():
            remedy = "give another folder with --out, or move the file away"
            raise OutputError("a file would be replaced", found=str(file), wanted="no such file", remedy=remedy)
    trained = _trained(model) if model is not None else None
    data = _data_in(folder, image_root)
    found = _read_all(data)
    # Samples are held out even if there is a split for tests, because tests must not choose the best step.
    divided = data.val is None and not found["train"].bad.num_errors
    if divided:
        data = _with_part_held_out(data, found["train"].samples)
        found = _read_all(data)
    _print_found(folder, data, found, divided=divided)
    if any(split.bad.num_errors for split in found.values()):
        _print_errors(found)
        return 2
    machine = replace(machine_at_hand(), named=model)
    about = _survey_of_all(found)
    write_atomically(run_file, run_yaml(data, about, machine, num_val=len(found["val"].samples), trained=trained))
    write_atomically(server_file, server_yaml(_images_folder(found), about, machine, trained))
    print(f"\nWrote {run_file} and {server_file} for this machine ({machine}). Next:")
    named = shlex.quote(str(run_file))
    print(f"  rollout-learner check --config {named}\n  rollout-learner train --config {named}")
    return 0


def _trained(model: str) -> InferenceSettings | None:
    """Return the prompt and the limits that a model was trained with; None if this project did not train it. Raises
    ConfigError for a model that no run could train on photographs."""
    check_folder(model, key="--model", allow_untested=False)
    if kind := text_only(model):
        raise ConfigError(
            "--model: this model takes no images",
            found=f"a model of text ({kind})",
            wanted="a vision-language model",
            remedy="name another one (docs/models.md)",
        )
    return read_settings(Path(model))


def _data_in(folder: Path, image_root: Path | None) -> DataConfig:
    """Return the annotations in a folder, by split. Raises DataError."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise DataError(f"{folder}: no folder", found=found, wanted="a folder", remedy="correct the path")
    if is_saved(folder):
        paths = _splits_of_data_set(folder)
    else:
        layout = splits_in(folder)
        if "train" not in layout and "" not in layout:
            # `locate` raises a DataError that says what is missing.
            locate(DataConfig(train=str(folder)), str(folder), "train")
        paths = {split: f"{folder}:{split}" for split in layout if split}
    if "train" not in paths:
        paths = {"train": str(folder)}
    return DataConfig(
        train=paths["train"],
        val=paths.get("val"),
        test=paths.get("test"),
        image_root=str(image_root) if image_root else None,
        on_bad_record="clip",
    )


def _with_part_held_out(data: DataConfig, samples: Sequence[Sample]) -> DataConfig:
    """Return `data` with its `train`, which has these samples, divided into `train` and `val`. Raises DataError if one
    of the two would be empty."""
    ids = [sample.sample_id for sample in samples]
    # A tenth of a small folder would be one photograph, or none.
    wanted = min(LEAST_HELD_OUT, -(-len(ids) // LARGEST_PART))
    numbers = {percent: sum(map(Part(first=100 - percent).has, ids)) for percent in _PERCENTS}
    usable = [percent for percent, number in numbers.items() if 0 < number <= len(ids) // 2]
    if usable:
        enough = next((percent for percent in usable if numbers[percent] >= wanted), None)
        first = 100 - (enough or max(usable, key=lambda percent: numbers[percent]))
        parts = {"train": f"{data.train}[:{first}%]", "val": f"{data.train}[{first}%:]"}
        return data.model_copy(update=parts)
    raise DataError(
        f"{data.train}: none can be held out for validation",
        found=photographs(len(ids)),
        wanted="two photographs or more to divide",
        remedy="add photographs, or a split `val` of your own",
    )


def _splits_of_data_set(folder: Path) -> dict[str, str]:
    """Return the paths of a Hugging Face data set's splits, {} if it has none. Raises DataError."""
    names = split_names(str(folder))
    paths = {split: f"{folder}:{name}" for name in names if (split := split_called(name))}
    if names and "train" not in paths:
        raise DataError(
            f"{folder}: no split to train on",
            found=f"the splits {', '.join(names)}",
            wanted="a split `train`, and perhaps `validation` and `test`",
            remedy="save the data set with such names, or write run.yaml by hand (data.train: FOLDER:SPLIT)",
        )
    if unused := [name for name in names if not split_called(name)]:
        print(f"! splits of {folder} that are not used: {', '.join(unused)}")
    return paths


def _read_all(data: DataConfig) -> dict[str, Split]:
    paths = {"train": data.train, "val": data.val, "test": data.test}
    task = WithoutTokenizer(partial(validate_sample, pieces=None))
    return {split: read_split(data, path, task) for split, path in paths.items() if isinstance(path, str)}


def _print_found(folder: Path, data: DataConfig, found: dict[str, Split], *, divided: bool) -> None:
    formats = {annotations_of(data, path).format for path in (data.train, data.val, data.test) if isinstance(path, str)}
    print(f"{folder}: {', '.join(sorted(formats))}")
    if divided:
        num_val, num_all = len(found["val"].samples), len(found["train"].samples) + len(found["val"].samples)
        print(
            f"no split for validation, so {num_val} of {photographs(num_all)} are held out for it, by their ids: "
            "they are not learned (data.val)"
        )
    limits = PixelLimits(most=pixels_for(_survey_of_all(found)))  # the pixel limits that run.yaml will have
    learned = survey(found["train"]).classes
    for split, read in found.items():
        report = {"about": ["no photograph can be used"], "warnings": []}
        if (about := survey(read)).num_samples:
            report = of_split(about, split, learned, limits)
        if read.bad.num_errors:
            report["warnings"] = []
        print("\n".join(["", *split_in_words(f"{split} ({getattr(data, split)})", report)]))
    for (first, second), images in shared_images({split: read.samples for split, read in found.items()}).items():
        print(f"  ! {photographs(len(images))} in {first} and in {second}, for example {images[0]}")
    if unused := _without_annotations(folder, found):
        print(f"  ! {photographs(len(unused))} without annotations, which are not used, for example {unused[0]}")


def _print_errors(found: dict[str, Split]) -> None:
    """Print each error of reading once: splits that are parts of one file have the same errors."""
    errors = list(dict.fromkeys(str(error) for split in found.values() for error in split.bad.errors))
    print("\nThis cannot be read:")
    print("".join(f"  {error}\n" for error in errors[:_MAX_ERRORS]), end="")
    more = len(errors) - _MAX_ERRORS
    print(f"Correct this and {more} more, then run init again." if more > 0 else "Correct it, then run init again.")


def _survey_of_all(found: dict[str, Split]) -> Survey:
    """Return the survey of `train`, with the largest photograph and the most boxes of all splits."""
    # The limits in run.yaml hold for evaluations too.
    parts = [survey(split) for split in found.values()]
    large = max((part.sizes[2] for part in parts), key=lambda size: size[0] * size[1])
    most = max(part.boxes_per_image[2] for part in parts)
    train = survey(found["train"])
    few, middle, _ = train.boxes_per_image
    return replace(train, sizes=(*train.sizes[:2], large), boxes_per_image=(few, middle, most))


def _without_annotations(folder: Path, found: dict[str, Split]) -> list[Path]:
    """Return the images below the folder that no record names. Return [] if records were left out."""
    # Images of records that were left out would be listed too.
    if any(split.bad.num_errors or not _LEFT_OUT.isdisjoint(split.bad.summary()) for split in found.values()):
        return []
    named = {Path(image).resolve() for split in found.values() for one in split.samples for image in one.images}
    return [file for file in photographs_below(folder) if file.resolve() not in named]


def pixels_for(found: Survey) -> int:
    """Return `model.max_pixels`: the pixels of the largest photograph, within limits."""
    width, height = found.sizes[2]
    return min(_MAX_PIXELS, max(_LEAST_PIXELS, width * height))


def new_tokens_for(found: Survey) -> int:
    """Return `max_new_tokens`: enough for one and a half times the boxes of the fullest photograph, within limits."""
    return min(4096, max(256, -(-found.boxes_per_image[2] * _TOKENS_PER_BOX * 3 // 2 // 256) * 256))


def machine_at_hand() -> Machine:
    """Return the GPUs that `nvidia-smi` lists."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, env=os.environ)
        mib = [float(line) for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        mib = []
    return Machine(num_gpus=len(mib), memory_gib=min(mib, default=0.0) / 1024)


def _images_folder(found: dict[str, Split]) -> str:
    images = [image for split in found.values() for sample in split.samples for image in sample.images]
    # An image string may also be base64, which may look like a path.
    local = [str(path.parent) for image in images if is_file(path := Path(image))]
    return os.path.commonpath(local) if local else "."


def _quoted(text: str | None) -> str:
    """Return a text quoted for our YAML, in which `$${` is a literal `${`."""
    # JSON escapes an emoji as two halves, which YAML does not join.
    return json.dumps(text, ensure_ascii=False).replace("${", "$${")


def _least_pixels(trained: InferenceSettings | None) -> str:
    return f"min_pixels: {trained.min_pixels}\n" if trained is not None and trained.min_pixels is not None else ""


def _question(trained: InferenceSettings | None) -> tuple[str, str]:
    """Return values for `data.prompt` and `task`: the model's values in training, or else values for Qwen-VL models."""
    if trained is None:
        return f'"{PROMPT}"', "{container: array, coordinates: digits}     # how Qwen-VL models answer"
    task = f"{{container: {trained.task.container}, coordinates: {trained.task.coordinates}}}     # as it was trained"
    asked = str(trained.messages[-1].get("content", "")) if trained.messages else ""
    is_one_turn = [dict(turn) for turn in prompt_messages(asked)] == trained.messages
    return _quoted(asked) if is_one_turn else f'"{PROMPT}"', task


def _data_lines(data: DataConfig, prompt: str) -> str:
    """Return the lines of run.yaml for the keys of `data` after `train`."""
    keys = ("val", "test", "image_root")
    lines = [f"  {key}: {_quoted(path)}\n" for key in keys if (path := getattr(data, key))]
    paths = [path for path in (data.train, data.val, data.test) if isinstance(path, str)]
    # Rows of JSONL have their own prompts, so they need no `prompt`.
    if all(annotations_of(data, path).format != "jsonl" for path in paths):
        lines.append(f"  prompt: {prompt}\n")
    return "".join(lines)


def _evaluations(num_steps: int, num_val: int) -> str:
    each = max(_LEAST_STEPS, num_steps // _EVALUATIONS)
    lines = f"  eval_steps: {each}        # the checkpoint that is best on val is kept, as the link `best`\n"
    lines = lines if num_val >= LEAST_HELD_OUT else ""
    return lines + (f"  eval_samples: {_MOST_EVALUATED}\n" if num_val > _MOST_EVALUATED else "")


def run_yaml(
    data: DataConfig, found: Survey, machine: Machine, *, num_val: int, trained: InferenceSettings | None = None
) -> str:
    """Return a configuration that most runs start with: teacher forcing on the labels, evaluated by rollouts. If the
    `num_val` photographs for validation are enough, they choose the checkpoint. `trained`: how the model is asked if
    this project trained it before."""
    pixels, new_tokens = (trained and trained.max_pixels) or pixels_for(found), new_tokens_for(found)
    prompt, task = _question(trained)
    rest = _data_lines(data, prompt)
    least = f"  {text}" if (text := _least_pixels(trained)) else ""
    prompt_tokens = pixels // 1024 + 256
    row = max(4096, -(-2 * (prompt_tokens + new_tokens) // 1024) * 1024)
    epochs = 10 if found.num_samples < 500 else 3 if found.num_samples < 5000 else 1
    batch = min(16, max(1, found.num_samples))
    num_steps = epochs * -(-found.num_samples // batch)
    dtype, amp = ("bfloat16", "true") if machine.num_gpus else ("float32", "false")
    return f"""\
# Written by `rollout-learner init` for {found.num_samples} photographs and {machine}. Every key is explained in the
# reference of the configuration; `rollout-learner check --config run.yaml` says what this file does.
model:
  path: {_quoted(machine.model)}     # a folder, or a name on the Hugging Face hub
  dtype: {dtype}
  gradient_checkpointing: true
  lora: {{r: 64, alpha: 128}}
{least}  max_pixels: {pixels}        # a larger photograph is shrunk to it; a visual token is 32 x 32 pixels

data:
  train: {_quoted(data.train)}
{rest}  on_bad_record: clip        # cut or left out, counted and logged; `error` lists all of them instead

task: {task}

training:
  output_dir: runs/mine
  num_train_epochs: {epochs}
  effective_batch_size: {batch}
  learning_rate: 1.0e-4
  bf16: {amp}
  eval_on_start: true
  eval_on_end: true
{_evaluations(num_steps, num_val)}
custom:
  trainer_variant: sft       # first teacher forcing; docs/concepts/which-method.md says when rollouts pay
  extra:
    rollout_matching:
      decode_batch_size: 64
      decoding: {{max_new_tokens: {new_tokens}}}   # the fullest photograph has {found.boxes_per_image[2]} boxes
{machine.rollouts(prompt_tokens + new_tokens)}
global_max_length: {row}     # tokens of a packed row: two photographs with their answers
"""


def server_yaml(images: str, found: Survey, machine: Machine, trained: InferenceSettings | None = None) -> str:
    """Return the YAML of a rollout server, for users who later train on rollouts and have a second GPU for the
    server."""
    pixels = (trained and trained.max_pixels) or pixels_for(found)
    length = pixels // 1024 + 256 + new_tokens_for(found)
    dtype = "bfloat16" if machine.num_gpus else "float32"
    return f"""\
# The rollout server, for `trainer_variant: rollout_matching_sft` or `grpo` with vllm.mode: server.
# rollout-server --config server.yaml
model: {_quoted(machine.model)}     # as model.path of run.yaml
dtype: {dtype}
max_model_len: {length}
{_least_pixels(trained)}max_pixels: {pixels}        # as in run.yaml: both must see the same pixels
enable_lora: true
max_lora_rank: 64
allowed_image_roots: [{_quoted(images)}]
"""
