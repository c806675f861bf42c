"""The model card of an export: what the model is, how well it did in evaluations, and how to prompt it.

In: a checkpoint's folder, the settings for prompting the model, and the run that trained it, if there is one. Out: the
text of `README.md`, whose first lines the Hugging Face hub reads. The text has no path of this machine, except the last
two parts of the training data's path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from huggingface_hub import EvalResult, ModelCardData

from learner.config.inference import CALIBRATION_NAME, IMAGE, INFERENCE_NAME, InferenceSettings
from learner.detector.model import LICENSES, ModelFiles, can_be_asked, find_model, model_files, trained_by
from learner.report.read import read_run
from learner.report.records import EvalPoint, RunRecord
from learner.report.results import SHOWN, interval
from learner.report.scores import f1_of, gain_between
from learner.tasks.detection.scores import read_calibrations
from shared.reading import bytes_beside

CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_METRICS = 8  # max metrics that are shown for a task without F1
_MAX_CLASSES = 100
METHODS = {
    "sft": "supervised fine-tuning on the labels (`sft`)",
    "rollout_matching_sft": "rollout matching: the model's own answers, matched to the labels and corrected "
    "(`rollout_matching_sft`)",
    "stage2_ab_training": "supervised steps and steps on the model's own answers, mixed (`stage2_ab_training`)",
    "grpo": "policy gradients (`grpo`)",
}


def notes_of(
    checkpoint: Path, name: str, *, config: str | None = None, tell: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Return the files, by name, that an export adds to the model's weights: settings for inference, card, licenses,
    calibration. `tell` gets warnings. Raises ConfigError."""
    notes = {}
    if config or can_be_asked(checkpoint):
        model = find_model(checkpoint, config=config)
        notes = {INFERENCE_NAME: model.settings.to_json(), CARD: card_of(model, name)}
        for warning in model.warnings:
            tell(warning)
    for file in model_files(checkpoint)[0]:
        if any(fnmatchcase(file, pattern) for pattern in LICENSES):
            notes[file] = bytes_beside(checkpoint / file).decode(errors="replace")
    if (calibrations := read_calibrations(checkpoint)) is not None:
        notes[CALIBRATION_NAME] = calibrations.to_json()
    return notes


def card_of(model: ModelFiles, name: str) -> str:
    """Return the text of README.md. `name` is the model's name for people. The text has OWNER where the user puts the
    repository's owner."""
    # None: there is no run, or its files must not be read (D24)
    origin = trained_by(model.folder) if model.run is not None else None
    run, step = (read_run(origin[0]), origin[1]) if origin else (None, None)
    measured = _measured(run, step) if run else ()
    settings, repo = model.settings, f"OWNER/{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.') or 'model'}"
    parts = [
        f"---\n{_metadata(name, settings, run, measured)}\n---\n",
        f"# {_text(name)}\n\n{_summary(settings, run)}",
        *([_figures(run, measured)] if run and measured else []),
        *([_training(run)] if run else []),
        _asking(repo, settings),
    ]
    return "\n".join(parts)


def _base_of(run: RunRecord | None) -> str | None:
    """Return the base model's name on the hub; None if it is a folder, or unknown."""
    path = run.setting("model", "path") if run else None
    # A local folder may have the name of a model on the hub.
    return path if isinstance(path, str) and _HUB_ID.fullmatch(path) and not Path(path).exists() else None


def _measured(run: RunRecord, step: int | None) -> tuple[EvalPoint, ...]:
    """Return the evaluations that have metrics, at step 0 and at `step`, the step of the exported weights."""
    points = [point for point in run.evals if point.metrics]
    return tuple(point for point in points if point.global_step in (0, step))


def _metadata(name: str, settings: InferenceSettings, run: RunRecord | None, measured: Sequence[EvalPoint]) -> str:
    detects = settings.task.type == "detection"
    results = [
        EvalResult(
            task_type="object-detection" if detects else "image-text-to-text",
            dataset_type="custom",
            dataset_name=_short(_split(run)),
            metric_type=metric,
            metric_name=metric,
            metric_value=round(measured[-1].metrics[metric], 4),
        )
        for metric in (_names(measured)[:1] if run and measured and measured[-1].global_step > 0 else ())
    ]
    data = ModelCardData(
        base_model=_base_of(run),
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        tags=["rollout-matching", *(["object-detection"] if detects else [])],
        model_name=name,
        eval_results=results or None,
    )
    return data.to_yaml()


def _summary(settings: InferenceSettings, run: RunRecord | None) -> str:
    base = _base_of(run)
    begins = f"[{base}](https://huggingface.co/{base})" if base else "A vision-language model"
    text = f"{begins}, trained to {_what(settings)}.\n"
    if base:
        text += "\nThe base model's licence holds for this model too: see its page.\n"
    return text


def _what(settings: InferenceSettings) -> str:
    if settings.task.type != "detection":
        return f"do the task {_code(settings.task.type)}"
    few = ", ".join(map(_text, settings.classes[:_MAX_CLASSES]))
    more = len(settings.classes) - _MAX_CLASSES
    names = f": {few}{f' and {more} more' if more > 0 else ''}" if few else ""
    shape = "polygons" if settings.task.geometry == "poly" else "boxes"
    return f"find objects in photographs, as {shape} with names{names}"


def _figures(run: RunRecord, measured: Sequence[EvalPoint]) -> str:
    heads = ["base model" if point.global_step == 0 else f"this model, step {point.global_step}" for point in measured]
    lines = [f"| metric | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for name in _names(measured):
        cells = [_cell(point, name) for point in measured]
        lines.append(f"| {_text(name)} | {' | '.join(cells)} |")
    text = f"## Measured on {_evaluated_on(run)}\n\n" + "\n".join(lines) + "\n"
    gain = gain_between(measured[0], measured[-1]) if len(measured) > 1 else None
    if gain is not None and gain.low is not None:
        text += f"\nF1@0.5 changed by {gain.value:+.3f}, 95% interval over {gain.num_scenes} images {interval(gain)}.\n"
    if run.test is not None and run.test.metrics and run.test.global_step == measured[-1].global_step:
        scores = [f"{_text(name)} {_cell(run.test, name)}" for name in _names([run.test])]
        text += f"\nOn held-out test data ({_short(run.setting('data', 'test'))}), scored once: {', '.join(scores)}.\n"
    return text


def _names(points: Sequence[EvalPoint]) -> list[str]:
    """Return the metrics that a card shows: detection's, or another task's first metrics."""
    known = dict.fromkeys(name for point in points for name in point.metrics)
    shown = [name for name in (*SHOWN, "coco/ap", "coco/ap50") if name in known]
    return shown or [name for name in known if "/" not in name][:_MAX_METRICS]


def _cell(point: EvalPoint, name: str) -> str:
    if name not in point.metrics:
        return "–"
    f1 = f1_of(point) if name == "f1@0.5" and point.scenes else None
    return f"{point.metrics[name]:.3f} {interval(f1) if f1 else ''}".strip()


def _evaluated_on(run: RunRecord | None) -> str:
    """Return in words which data the evaluations used, and how many samples it has."""
    count = f"{run.data.num_evaluation:,} samples of " if run and run.data else ""
    return f"{count}{_short(_split(run))}"


def _split(run: RunRecord | None) -> object:
    return run.setting("data", "val") or run.setting("data", "test") if run else None


def _short(split: object) -> str:
    """Return the name of annotations: the last two parts of their path."""
    path = split.get("path") if isinstance(split, Mapping) else split
    return _text("/".join(PurePath(path).parts[-2:]).lstrip("/")) if isinstance(path, str) else "data of its owner"


def _training(run: RunRecord) -> str:
    variant = str(run.setting("custom", "trainer_variant"))
    rows = [
        ("data", _short(run.setting("data", "train")) + (f", {run.data.num_train:,} samples" if run.data else "")),
        ("method", METHODS.get(variant, _code(variant))),
        ("labels", "completed by objects that the model's own answers agree on")
        if run.setting("labels", "complete")
        else ("", ""),
        ("steps in all", str(run.steps[-1].global_step if run.steps else 0)),
        ("samples a step", _text(str(run.setting("training", "effective_batch_size")))),
        ("learning rate", _text(str(run.setting("training", "learning_rate")))),
        ("adapter", f"LoRA, rank {_text(str(run.setting('model', 'lora', 'r')))}, merged")
        if run.setting("model", "lora")
        else ("", ""),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows if name and value != "None")
    return f"## Training\n\n| | |\n| --- | --- |\n{table}"


def _asking(repo: str, settings: InferenceSettings) -> str:
    return f"""\
## Ask it

The prompt that it was trained with; `{IMAGE}` is where the image is:

{_block(_prompt(settings))}

With transformers:

```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{repo}", dtype="auto")
processor = AutoProcessor.from_pretrained("{repo}"{_pixels(settings)})
messages = {_messages(settings)}
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)
answer = model.generate(**inputs, max_new_tokens={settings.max_new_tokens}, do_sample=False)
print(processor.decode(answer[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

With vLLM, as a server:

```bash
vllm serve {repo}
```

With `rollout-learner predict`, which knows the prompt, reads the answers, and draws the boxes (the coordinates in an
answer are {"tokens, " if settings.task.coordinates == "tokens" else ""}0 to 999 over the image's width and height):

```bash
hf download {repo} --local-dir model
rollout-learner predict --model model --out found photographs/
```
"""


def _pixels(settings: InferenceSettings) -> str:
    given = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    return "".join(f", {name}={value}" for name, value in given.items() if value is not None)


def _prompt(settings: InferenceSettings) -> str:
    turns = [(str(turn["role"]), str(turn["content"])) for turn in settings.messages]
    return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {content}" for role, content in turns)


def _messages(settings: InferenceSettings) -> str:
    """Return the turns as Python source, in which the image is a file to open."""
    turns = []
    for turn in settings.messages:
        before, image, after = str(turn["content"]).partition(IMAGE)
        parts = [f'{{"type": "text", "text": {_literal(before)}}}'] if before else []
        parts += ['{"type": "image", "image": Image.open("photograph.jpg")}'] if image else []
        parts += [f'{{"type": "text", "text": {_literal(after)}}}'] if after else []
        content = "".join(f"        {part},\n" for part in parts)
        turns.append(f'    {{"role": {_literal(str(turn["role"]))}, "content": [\n{content}    ]}},\n')
    return "[\n" + "".join(turns) + "]"


# ---- escaping ------------------------------------------------------------------------------------------------------


def _text(value: str) -> str:
    """Return a name as one line of Markdown, which may also be in a table."""
    return re.sub(r"([\\`*\[\]<>|&~$#])", r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """Return a name as a span of code."""
    return f"`{' '.join(value.split()).replace('`', chr(39))}`"


def _block(text: str) -> str:
    """Return a text as a block of code with a fence longer than any fence in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _literal(text: str) -> str:
    """Return a text as a literal of Python, which may be part of a Markdown block."""
    return json.dumps(text, ensure_ascii=False)
