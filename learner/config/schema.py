"""The learner's configuration: one frozen pydantic model per YAML section, which refuses unknown keys.

Types and ranges of single keys are here and nowhere else. `rules.py` holds what must be true between keys, `load.py`
reads YAML into `RunConfig`, `plan.py` derives every number that follows. `make docs` writes CONFIG.md and
config.schema.json from this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shared.config.model import Section, key

if TYPE_CHECKING:
    from shared.images import ImageRules

Port = Annotated[int, Field(ge=1, le=65535)]
AtLeastOne = Annotated[int, Field(ge=1)]

# ---- model, data, task, loss ---------------------------------------------------------------------------------------


class LoraConfig(Section):
    """Train a low-rank adapter instead of the whole model."""

    type: Literal["lora", "dora"] = key("`lora`: plain LoRA; `dora`: weight-decomposed LoRA", "lora", req="R09")
    r: int = key("rank of the adapter", 16, ge=1)
    alpha: int = key("scaling: the adapter's output is multiplied by `alpha / r`", 32, ge=1)
    dropout: float = key("dropout on the adapter's input", 0.0, unit="probability", ge=0.0, lt=1.0)
    target_modules: str | list[str] = key(
        "modules that get an adapter: peft's `target_modules`, names or a pattern", "all-linear"
    )


class ModelConfig(Section):
    """The trained model."""

    path: str = key("Hugging Face checkpoint with its processor: a folder, or a name on the hub", min_length=1)
    allow_untested_family: bool = key("try a family of models that docs/models.md does not list", False)
    dtype: Literal["float32", "bfloat16"] = key("dtype of the trained weights", "float32")
    lora: LoraConfig | None = key("train an adapter; null: train the weights themselves", None, req="R09")
    freeze: list[str] = key("parameters that are not trained: those whose name starts with one of these", [])
    min_pixels: int | None = key(
        "smaller images are enlarged to it; null: the checkpoint's limit. The servers' `min_pixels` must be the same",
        None,
        unit="pixels (width x height)",
        ge=1,
    )
    max_pixels: int | None = key(
        "larger images are shrunk to it: fewer tokens per image; null: the checkpoint's own limit. The servers' "
        "`max_pixels` must be the same",
        None,
        unit="pixels (width x height)",
        ge=1,
    )
    gradient_checkpointing: bool = key("save memory: recompute activations in the backward pass", False)
    compile: Literal["auto"] | bool = key(
        "compile the model's layers and the loss for learning, with torch.compile. The first row triggers compilation, "
        "later rows of any length reuse it. `auto`: compile on CUDA from 5e8 parameters on, if a compiler is installed "
        "and the model is not sharded",
        "auto",
    )
    sharding: Literal["none", "fsdp"] = key(
        "`none`: each rank holds the whole model. `fsdp`: each rank holds its part of weights, gradients and optimizer "
        "moments (FSDP2), for models that do not fit one GPU. A single rank always holds the whole model",
        "none",
    )


class BadRecordConfig(Section):
    """What happens to each kind of bad record. `error`: all of them are listed, and nothing starts. `drop`: the object
    (or, for images and lengths, the whole sample) is left out. Whatever is dropped or clipped is counted and logged."""

    no_area: Literal["error", "drop"] = key("an object without area", "error", req="R41")
    outside_image: Literal["error", "drop", "clip"] = key(
        "an object that extends more than a pixel beyond its image; `clip`: it is cut at the border", "error", req="R41"
    )
    unknown_class: Literal["error", "drop"] = key(
        "an object whose class the annotations do not name", "error", req="R41"
    )
    image_missing: Literal["error", "drop"] = key("a missing or unreadable image", "error", req="R41")
    image_size: Literal["error", "drop"] = key(
        "an image whose size differs from the annotation (upright, by its EXIF orientation)", "error", req="R41"
    )
    too_long: Literal["error", "drop"] = key(
        "a training sample that may become longer than `global_max_length`: prompt, labels and, where rollouts are "
        "learned, `max_new_tokens`",
        "error",
        req="R41",
    )


class DataConfig(Section):
    """Annotations and images. Paths are relative to the working directory."""

    train: str = key(
        "training annotations: a JSONL or COCO file, a folder of Pascal VOC XML (or a text file with the "
        "names of some of them), a YOLO `data.yaml:SPLIT`, or a Hugging Face data set `FOLDER:SPLIT`",
        min_length=1,
        req="R12 R41",
    )
    val: str | None = key("annotations to evaluate on if `test` is not given", None)
    test: str | None = key("annotations to evaluate on", None)
    format: Literal["auto", "jsonl", "coco", "voc", "yolo", "datasets"] = key(
        "`auto`: detected from the files. A data set by its name on the Hugging Face hub needs `datasets`",
        "auto",
        req="R41",
    )
    reader: str | None = key(
        "import path of a reader of your own, `my_package.my_module:my_reader`, for other formats than these; null: "
        "`format`, or the task's own reader",
        None,
        min_length=1,
        req="R38",
    )
    image_root: str | None = key(
        "relative image paths start here; null: the annotation file's folder (`voc`: `JPEGImages` or `images` near it)",
        None,
    )
    annotation_root: str | None = key(
        "`voc` with a list of names: the folder of the XML files; null: `Annotations` or `voc` near the list", None
    )
    prompt: str | None = key(
        "the user's turn if the annotations have none (all formats but `jsonl`), with `<image>` at the image's place; "
        "null: `<image>Detect every object.`",
        None,
    )
    box_format: Literal["xywh", "xyxy"] = key(
        "`datasets`: boxes as left, top, width, height, or as two corners; in pixels", "xywh"
    )
    on_bad_record: Literal["error", "drop", "clip"] | BadRecordConfig = key(
        "what happens to bad records: one rule for all, or one per kind. `clip`: boxes that extend beyond the image "
        "are cut at its border; other kinds are dropped",
        "error",
        req="R41",
    )
    shuffle: bool = key("a new order every epoch, derived from `training.seed`", True)
    max_samples: int | None = key("use only the first N samples of `train`", None, unit="samples", ge=1)
    num_workers: int = key("processes per rank that read and encode images; 0: the learner itself", 0, ge=0)
    allowed_image_hosts: list[str] = key(
        "image URLs may be fetched from these hosts; empty: no URLs. Servers have a list of their own", [], req="D13"
    )
    image_timeout_s: float = key("time limit for fetching one image", 10.0, unit="s", gt=0.0)
    image_cache_bytes: int = key(
        "fetched images that each process keeps in memory; 0: none", 256 << 20, unit="bytes", ge=0
    )
    max_image_bytes: int = key("largest encoded image", 32 << 20, unit="bytes", ge=1)
    max_image_pixels: int = key("largest image, width x height", 64_000_000, unit="pixels", ge=1)

    @property
    def image_rules(self) -> ImageRules:
        """Local images may be anywhere: the data set is the user's own."""
        from shared.images import ImageRules

        return ImageRules(
            hosts=tuple(self.allowed_image_hosts),
            timeout_s=self.image_timeout_s,
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            cache_bytes=self.image_cache_bytes,
        )

    @property
    def bad_records(self) -> BadRecordConfig:
        """`on_bad_record`, kind by kind."""
        if isinstance(self.on_bad_record, BadRecordConfig):
            return self.on_bad_record
        one_for_all = dict.fromkeys(BadRecordConfig.model_fields, "error" if self.on_bad_record == "error" else "drop")
        return BadRecordConfig.model_validate({**one_for_all, "outside_image": self.on_bad_record})


class TaskConfig(Section):
    """What answers are, how they are written, and how they are matched with ground truth. All keys but `type` and
    `options` are those of `detection`."""

    type: str = key(
        "`detection`: objects with boxes or polygons; `key_value`: the fields of a document, as a flat JSON object of "
        "texts; or the import path of a task of your own, `my_package.my_module:MyTask`",
        "detection",
        min_length=1,
        req="R38",
    )
    options: dict[str, Any] = key("keys for a task of your own, passed to it as they are", {}, req="R38")
    container: Literal["index_map", "array"] = key(
        'form of an answer. `index_map`: `{"object_1": {"desc": ..., "bbox_2d": [...]}}`; `array`: '
        '`[{"bbox_2d": [...], "label": ...}]`',
        "index_map",
    )
    coordinates: Literal["tokens", "digits"] = key(
        "how coordinates are written, 0 to 999: as `<|coord_k|>` tokens, or as integers in digits", "tokens"
    )
    iou_threshold: float = key(
        "a predicted and a true object match only if their IoU is at least this", 0.5, unit="IoU", ge=0.0, le=1.0
    )
    geometry: Literal["bbox_2d", "poly"] = key(
        "`poly`: objects are polygons if the annotations have an outline (COCO's segmentations, YOLO's segments); "
        "`bbox_2d`: boxes. JSONL says it per object",
        "bbox_2d",
        req="R41",
    )


class RewardConfig(Section):
    """Scores of rollouts. They are reported as metrics. Only `grpo` learns from them."""

    functions: list[str] = key(
        "import paths of functions, `my_package.my_module:my_reward`. Each scores every rollout. Its mean is the "
        "metric `reward/my_reward` of the step and of the evaluation. `reward` is the mean of their weighted sum",
        [],
        req="R38",
    )
    weights: dict[str, float] = key(
        "weight of each reward in the sum, by name: functions of `functions` (1 if unnamed here) and rewards of the "
        "task. Detection has `f1` (at IoU 0.5), `f1_miou` (mean over IoU 0.50 to 0.95), `soft_iou`, `format`, `count` "
        "and `class_only`, each from 0 to 1; every match is one-to-one, so a duplicate costs. Empty under `grpo`, "
        "without functions: `f1: 1`",
        {},
        req="R37",
    )


class LossConfig(Section):
    """The loss on Y_train, which is the rollout's prefix with every missed object appended. All keys but `function`
    are those of `task.type: detection`."""

    function: str | None = key(
        "import path of a loss function of your own, `my_package.my_module:my_loss`; null: weighted cross-entropy",
        None,
        min_length=1,
        req="R38",
    )
    desc_weight: float = key(
        "weight of description text in the appended part; structure and boxes have weight 1", 1.0, ge=0.0
    )
    matched_coordinate_weight: float = key(
        "weight of the coordinates of a matched prediction. The target is the ground truth, in the rollout's own "
        "context",
        1.0,
        ge=0.0,
    )
    matched_desc_weight: float = key(
        "weight of the description of a matched prediction, with the same target; 0: no loss. Matching compares boxes "
        "only, so with 0 a wrong name on a right box is not corrected",
        0.0,
        ge=0.0,
    )
    prefix_end: Literal["last_object", "last_match", "first_miss"] = key(
        "where the rollout's prefix ends: after its last object, after its last matched prediction, or before the "
        "place where it first skipped an object. Every object that the prefix lacks is appended. The last two "
        "suit complete labels: a prediction without a label matches nothing",
        "last_object",
    )
    keep_unmatched: bool = key(
        "with `prefix_end: first_miss`: unmatched predictions after the cut are kept, in canonical order among the "
        "appended objects, and get no loss. For incomplete labels: a prediction without a label is not unlearned",
        False,
    )
    missed_order: Literal["canonical", "random"] = key(
        "order of the appended objects; `random`: a random order, fixed for each sample", "canonical"
    )
    overrun_close_weight: float = key(
        "loss weight that teaches an answer to stop once it has found every object: the closing token, where the "
        "answer went on instead; 0: no loss. Keeps long runs from drifting to answers that do not end",
        0.0,
        ge=0.0,
    )


# ---- training ------------------------------------------------------------------------------------------------------


class TrainingConfig(Section):
    """The loop, the optimizer, packing, evaluation and checkpoints."""

    output_dir: str = key(
        "run directory; a run does not start where another one is, unless it resumes it", min_length=1
    )
    overwrite: bool = key(
        "start in an `output_dir` that has a run: that run's own files (configuration, metrics, logs, evaluations, "
        "checkpoints) are removed, others stay. No effect on a run that resumes",
        False,
    )
    seed: int = key("seed of all random choices", 42, req="R11", ge=0)
    max_steps: int | None = key(
        "length of the run; give this or `num_train_epochs`", None, unit="optimizer steps", ge=1
    )
    num_train_epochs: int | None = key(
        "length of the run; give this or `max_steps`. If an epoch's last step has only n samples of a batch of N, its "
        "gradient and its learning rate are multiplied by n / N (metric `batch_share`)",
        None,
        unit="epochs",
        req="D11",
        ge=1,
    )
    per_device_train_batch_size: int = key("dataloader batch of a rank", 1, unit="samples per micro-step", ge=1)
    effective_batch_size: int | None = key(
        "batch of an optimizer step over all ranks, a multiple of per_device_train_batch_size x ranks. "
        "`stage2_ab_training` requires it: it is the number of samples that a Channel-B step rolls out",
        None,
        unit="samples",
        req="D8 R31 R33",
        ge=1,
    )
    gradient_accumulation_steps: int | None = key(
        "micro-steps per optimizer step; null: derived from `effective_batch_size`, or 1 without it",
        None,
        req="D8 R33",
        ge=1,
    )
    learning_rate: float = key("peak learning rate", 1e-5, gt=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "decay of the learning rate after the warm-up", "cosine"
    )
    warmup_steps: int = key("linear warm-up of the learning rate", 0, unit="optimizer steps", ge=0)
    weight_decay: float = key("decoupled weight decay of AdamW", 0.0, ge=0.0)
    adam_beta1: float = key("decay of AdamW's first moment", 0.9, ge=0.0, lt=1.0)
    adam_beta2: float = key("decay of AdamW's second moment", 0.95, ge=0.0, lt=1.0)
    adam_epsilon: float = key("epsilon of AdamW", 1e-8, gt=0.0)
    max_grad_norm: float = key("gradients are clipped to this global norm", 1.0, gt=0.0)
    bf16: bool = key("run the forward pass in bfloat16 autocast", False)
    packing: bool = key(
        "put several segments into one row of up to `global_max_length` tokens, without padding", True, req="D6 R36"
    )
    packing_buffer: int = key(
        "`rollout_matching_sft`: segments carried to later micro-steps, at most", 64, unit="segments", req="D6", ge=1
    )
    packing_min_fill_ratio: float = key(
        "packed rows filled less than this are counted: metric `underfilled`",
        0.6,
        unit="share of the row",
        req="D6",
        gt=0.0,
        le=1.0,
    )
    deterministic: bool = key(
        "`stage2_ab_training` with rollouts in the step: segments are packed in the order of the samples, so that "
        "equal rollouts are learned in equal rows; false: in the order in which they arrive, which depends on time and "
        "starts learning earlier. The other variants always pack in the order of the samples",
        False,
        req="D9",
    )
    packing_drop_last: bool = key(
        "`rollout_matching_sft`: segments still carried at the end of the run are not learned (their samples are named "
        "in the log); false: the last step learns them too, in rows of its own. Must be true with a `rollout_buffer`",
        True,
        req="D6",
    )
    eval_steps: int | None = key("evaluate every N steps", None, unit="optimizer steps", ge=1)
    eval_on_start: bool = key("evaluate before the first step", False)
    eval_on_end: bool = key("evaluate after the last step", False)
    eval_samples: int | None = key("evaluate on the first samples only", None, unit="samples", ge=1)
    save_steps: int | None = key("write a checkpoint every N steps", None, unit="optimizer steps", ge=1)
    save_minutes: float | None = key(
        "write a checkpoint after the step at which the last one is this old", None, unit="min", gt=0.0
    )
    save_total_limit: int | None = key(
        "number of checkpoints to keep, the newest ones; null: all", None, unit="checkpoints", ge=1
    )
    save_on_end: bool = key("write a checkpoint after the last step", True)
    resume_from_checkpoint: str | None = key(
        "resume from this checkpoint folder, or from the `latest` one in `output_dir`", None, req="R18 R26"
    )
    stop_timeout_s: float = key(
        "time to write a checkpoint and end after Ctrl-C or SIGTERM; torchrun kills ranks after 30 s",
        25.0,
        unit="s",
        gt=0.0,
    )
    collective_timeout_s: float = key("longest wait of a rank for the others", 600.0, unit="s", req="R24", gt=0.0)


class LoggingConfig(Section):
    """Where numbers go, besides metrics.jsonl."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = key(
        "programs that also get the numbers, besides metrics.jsonl; `tensorboard` writes to `output_dir/tensorboard`",
        ["tensorboard"],
    )
    project: str = key("the trackers' project (MLflow: experiment)", "rollout-matching", min_length=1)
    run_name: str | None = key("the run's name in the trackers; null: the name of `output_dir`", None, min_length=1)
    tracker_dir: str | None = key(
        "where wandb, MLflow and trackio keep their files; null: `output_dir/trackers`", None, min_length=1
    )
    offline: bool = key(
        "wandb and MLflow write to `tracker_dir` and use no network. wandb's files can be sent later (`wandb sync`)",
        False,
    )
    tracker_timeout_s: float = key(
        "longest wait for the trackers at the end of the run; what has not arrived then is counted and given up",
        10.0,
        unit="s",
        gt=0.0,
    )
    progress_bar: bool = key("show a progress bar", True)
    answers: int = key("newest answers kept in `answers.json` (detection only), for `report --live`; 0: none", 6, ge=0)
    groups: int = key(
        "`grpo`: rank 0's rewards are kept in `groups.jsonl`, and every so many steps a group with its answers, for "
        "the report; 0: neither",
        10,
        unit="optimizer steps",
        req="R37",
        ge=0,
    )


# ---- custom.extra.rollout_matching ---------------------------------------------------------------------------------


class DecodingConfig(Section):
    """How rollouts are decoded. Evaluations always decode greedily."""

    temperature: float = key("0: greedy decoding; above 0: sampling", 0.0, req="D7 R29", ge=0.0)
    top_p: float = key(
        "sample from the most likely tokens, up to this total probability",
        1.0,
        unit="probability",
        req="R29",
        gt=0.0,
        le=1.0,
    )
    top_k: int = key(
        "sample from this number of most likely tokens; -1 or 0: from all", -1, unit="tokens", req="R29", ge=-1
    )
    max_new_tokens: int = key("longest answer", 512, unit="tokens", req="D7", ge=1)
    repetition_penalty: float = key("above 1: tokens that already occurred become less likely", 1.0, req="D7", gt=0.0)
    decode_mode: Literal["greedy", "sample", "beam"] | None = key(
        "null: `greedy` at temperature 0, `sample` above; `beam` needs `rollout_backend: hf`", None, req="D7"
    )
    num_beams: int = key("`decode_mode: beam` only: number of beams; the best one is the rollout", 1, req="D7", ge=1)

    @property
    def mode(self) -> Literal["greedy", "sample", "beam"]:
        """`decode_mode`, or what follows from the temperature."""
        return self.decode_mode or ("sample" if self.temperature > 0 else "greedy")


class ServerEntry(Section):
    """One rollout server."""

    base_url: str = key(
        "URL prefix of the server's endpoints, such as `http://127.0.0.1:8000`", req="R05 R06", min_length=1
    )
    group_port: int = key(
        "TCP port of the weight sync on that server's host; servers of one machine use the port of the first one",
        req="R05",
        ge=1,
        le=65535,
    )


class DiscoveryConfig(Section):
    """Where the list of servers comes from while the run goes on: either `file` or `command`."""

    file: str | None = key("a file that lists them", None, req="R40", min_length=1)
    command: list[str] | None = key(
        "a program and its arguments; its output lists them. No shell is used", None, req="R40", min_length=1
    )
    group_port: Port = key("TCP port of the weight sync of a server whose line names none", 51216, req="R40")
    every_s: float = key("time between two looks at the list", 15.0, unit="s", req="R40", gt=0.0)
    timeout_s: float = key("deadline of the command; no step waits for it", 10.0, unit="s", req="R40", gt=0.0)


class ServerClientConfig(Section):
    """The rollout servers: either `servers`, or `base_url` with `group_port`. Loading turns the second form into the
    first."""

    servers: list[ServerEntry] | None = key("rollout servers, in order", None, req="R05")
    base_url: str | list[str] | None = key("paired form: one URL prefix, or several", None, req="R05")
    group_port: Port | list[Port] | None = key(
        "paired form: one port (server i gets port + i), or one port per URL", None, req="R05"
    )
    timeout_s: float = key(
        "deadline of reachability checks, of joining the weight sync, and of a weight update",
        240.0,
        unit="s",
        req="R05",
        gt=0.0,
    )
    infer_timeout_s: float | None = key(
        "deadline of one `/infer/` call, which also holds while `/health/` answers; a call that exceeds it counts as "
        "failed. null or <= 0: derived from `max_new_tokens` and the server's measured pace, at most 600 s",
        None,
        unit="s",
        req="R05 R30 D16",
    )
    min_servers: AtLeastOne | Literal["all"] = key(
        "servers that must serve. A server that fails while the run goes on is left out: the others take its requests, "
        "with the same seeds, and it comes back after a full sync once it is ready. With fewer servers than this the "
        "run saves a checkpoint and ends; `all`: it ends with the first server that fails. At the start every server "
        "must answer",
        1,
        unit="servers",
        req="D15 R40",
    )
    discovery: DiscoveryConfig | None = key(
        "a list of servers that is read while the run goes on, one a line: URL and, if it differs, group port. A "
        "server that appears in it joins, one that disappears from it is removed; null: none",
        None,
        req="R40",
    )


class SyncConfig(Section):
    """How trained weights reach the rollout engine, in memory."""

    mode: Literal["full", "adapter", "auto"] = key(
        "`full`: merged weights; `adapter`: the adapter only; `auto`: `adapter` if `enable_lora` is true, else `full`",
        "full",
        req="R08",
    )
    fallback_to_full: bool = key(
        "if an adapter sync fails, warn and use full syncs for the rest of the run (a resumed run tries adapters "
        "again); false: stop the run",
        True,
        req="R08",
    )
    bucket_bytes: int = key(
        "tensors are sent in pieces of this size, up to three at a time", 512 * 2**20, unit="bytes", req="R09", ge=1
    )
    canary_samples: int = key("prompts that learner and server both score after a sync", 2, req="R09", ge=1)
    canary_tolerance: float | None = key(
        "largest mean difference between the learner's and the server's scores; null: 0.01 if both compute in "
        "float32, otherwise 0.1",
        None,
        unit="nats per token",
        req="R09",
        gt=0.0,
    )


class VllmConfig(Section):
    """vLLM: inside the learner's job, or behind rollout servers."""

    mode: Literal["colocate", "server"] = key(
        "`colocate`: on the training devices; `server`: on rollout servers", "colocate", req="R02"
    )
    enable_lora: bool = key(
        "the engine accepts adapters; with `mode: server` also set the servers' `enable_lora`", False, req="R08"
    )
    gpu_memory_utilization: float = key(
        "`colocate`: share of each device that vLLM may use", 0.45, unit="share", req="R04", gt=0.0, le=1.0
    )
    tensor_parallel_size: int = key(
        "`colocate`: devices per engine, a divisor of the number of ranks; if unset, one rank alone uses 1",
        4,
        req="R04",
        ge=1,
    )
    max_model_len: int | None = key(
        "`colocate`: longest prompt + answer; null: the model's own limit", None, unit="tokens", ge=1
    )
    enforce_eager: bool = key(
        "`colocate`: no compilation and no CUDA graphs; starts sooner, decodes slower", False, req="R04"
    )
    cpu_kv_cache_gib: int = key(
        "`colocate` without a GPU: memory of each rank's KV cache", 1, unit="GiB", req="R04", ge=1
    )
    server: ServerClientConfig = key("`mode: server`: where the servers are", ServerClientConfig(), req="R05")
    sync: SyncConfig = key("weight sync", SyncConfig(), req="R08")


class RolloutBufferConfig(Section):
    """Learn the rollouts of one accumulation window several times; `rollout_matching_sft` and `grpo` only."""

    enabled: bool = key("reuse rollouts", False, req="R18")
    m_steps: int = key(
        "optimizer steps that learn the same window's rollouts; an epoch has this many times more steps. A short "
        "window at the end of an epoch is learned once",
        1,
        unit="optimizer steps",
        req="R18",
        ge=1,
    )


class OffloadConfig(Section):
    """Move training state to host memory while colocated vLLM generates; no effect elsewhere. The host memory is
    page-locked and kept between moves."""

    enabled: bool = key("offload what the next two keys select", False, req="R20")
    offload_model: bool = key("the trained model", False, req="R20")
    offload_optimizer: bool = key("the optimizer's moments", False, req="R20")


class BestOfConfig(Section):
    """Several rollouts of each sample, from which one target is made; for `rollout_matching_sft` and
    `stage2_ab_training`. The best rollout has the largest weighted sum of rewards (`reward`); of equal ones it is the
    first. Batch sizes count samples: a step makes `rollouts_per_sample` times as many rollouts."""

    rollouts_per_sample: int = key(
        "rollouts of each sample; more than 1 need sampling (`decoding.temperature` above 0)",
        1,
        unit="rollouts",
        req="R37",
        ge=1,
    )
    use: Literal["best", "union", "rejection"] = key(
        "`best`: the best rollout is matched and corrected, as a single one would be. `union`: likewise; boxes without "
        "a label that at least half of the rollouts have are kept among the appended objects, without loss "
        "(detection). `rejection`: the best rollout is learned as it is, its own tokens with weight 1. Nothing is "
        "learned of a sample whose best rollout does not reach `min_reward`, or was cut at `max_new_tokens`. Of `loss` "
        "only `function` applies to it",
        "best",
        req="R37",
    )
    min_reward: float | None = key(
        "`use: rejection`: the smallest weighted sum of rewards that is learned; null: any above the mean of the "
        "sample's rollouts",
        None,
        unit="reward",
        req="R37",
    )


class RolloutMatchingConfig(Section):
    """How rollouts are made."""

    rollout_backend: Literal["vllm", "hf"] = key(
        "`vllm`: vLLM; `hf`: `generate` of the training model itself", "vllm", req="R02"
    )
    decode_batch_size: int = key(
        "largest number of sequences that are decoded at once, over all learner ranks; a beam search has `num_beams` "
        "of them per sample. All rollouts of an optimizer step are requested together, however small its micro-batches "
        "are",
        1,
        unit="sequences per rollout GPU and generation call",
        req="R21 R34",
        ge=1,
    )
    decoding: DecodingConfig = key("decoding", DecodingConfig(), req="D7")
    best_of: BestOfConfig = key("several rollouts of each sample", BestOfConfig(), req="R37")
    vllm: VllmConfig = key("`rollout_backend: vllm`", VllmConfig(), req="R02")
    rollout_buffer: RolloutBufferConfig | None = key("reuse of rollouts; null: none", None, req="D2 R18")
    offload: OffloadConfig = key("offloading while colocated vLLM generates", OffloadConfig(), req="R20")


class ExtraConfig(Section):
    """Extensions."""

    rollout_matching: RolloutMatchingConfig = key("rollouts", RolloutMatchingConfig(), req="R02")


class CustomConfig(Section):
    """What this project adds to plain supervised training."""

    trainer_variant: Literal["sft", "rollout_matching_sft", "stage2_ab_training", "grpo"] = key(
        "`sft`: teacher forcing on ground truth; `rollout_matching_sft`: learning from matched rollouts; "
        "`stage2_ab_training`: a schedule of both, channel A and channel B; `grpo`: policy gradients on rewards of "
        "rollouts",
        req="R01",
    )
    extra: ExtraConfig = key("extensions", ExtraConfig())


# ---- grpo ----------------------------------------------------------------------------------------------------------


class GrpoConfig(Section):
    """Policy gradients. Rollouts of one sample are a group, and a rollout is reinforced as far as its reward is above
    the group's. All batch sizes count rollouts: `per_device_train_batch_size` is a multiple of `num_generations`."""

    num_generations: int = key("rollouts of each sample: the group", 8, unit="rollouts", req="R37", ge=2)
    advantage: Literal["group", "rloo", "batch"] = key(
        "what a rollout's reward is compared with: the mean of its group, of the group's other rollouts, or of all "
        "rollouts that are scored together",
        "group",
        req="R37",
    )
    normalize_std: bool = key(
        "divide advantages by the standard deviation of the rewards that they were compared with", False, req="R37"
    )
    credit: Literal["sequence", "object"] = key(
        "`sequence`: all tokens of a rollout have its advantage; `object`: the tokens of an object have what the "
        "answer gained from that object on, compared with the group's answers at the same object, and the closing "
        "tokens what they gave up. Needs a task that can tell (detection)",
        "sequence",
        req="R37",
    )
    loss: Literal["token", "sequence", "dr_grpo"] = key(
        "`token`: mean over all tokens (DAPO); `sequence`: mean over rollouts of each one's mean (GRPO); `dr_grpo`: "
        "mean over rollouts of each one's sum, divided by `max_new_tokens`",
        "token",
        req="R37",
    )
    tis_cap: float = key(
        "largest importance weight of a token: the learner's probability before the update over the rollout's",
        2.0,
        req="R37",
        ge=1.0,
    )
    clip_low: float = key(
        "with a `rollout_buffer`, whose later updates learn older rollouts: a token's probability gains nothing from "
        "falling below 1 - this of what it was before the first update",
        0.2,
        req="R37",
        gt=0.0,
        lt=1.0,
    )
    clip_high: float = key("likewise, from rising above 1 + this", 0.28, req="R37", gt=0.0)
    kl_weight: float = key(
        "weight of the divergence from the model without its adapter, per token; above 0 needs `model.lora`",
        0.0,
        unit="1/nats",
        req="R37",
        ge=0.0,
    )
    overlong_tokens: int = key(
        "answers longer than `max_new_tokens` minus this lose up to `overlong_penalty` of their reward, linearly; "
        "0: none",
        0,
        unit="tokens",
        req="R37",
        ge=0,
    )
    overlong_penalty: float = key("what an answer of `max_new_tokens` loses", 1.0, unit="reward", req="R37", ge=0.0)
    skip_no_signal: bool = key(
        "groups whose rollouts all have the same reward do not count in the mean; false: they count, with gradient 0",
        False,
        req="R37",
    )
    max_refills: int = key(
        "dynamic sampling (DAPO): while fewer groups have a signal than a step has groups, the step takes another "
        "micro-batch of the data, at most this many; 0: none. Every sample that was drawn counts as used. Needs "
        "`skip_no_signal` and `training.max_steps`; not with `stage2_ab` or a `rollout_buffer`",
        0,
        unit="micro-batches per step",
        req="R37",
        ge=0,
    )
    sft_weight: float = key(
        "teacher forcing in the same step: the ground truth of every group, whose tokens together weigh this many "
        "times the group's; 0: none",
        0.0,
        req="R37",
        ge=0.0,
    )
    matching_weight: float = key(
        "rollout matching in the same step: the best rollout of every group, matched and corrected as the section "
        "`loss` says, whose tokens together weigh this many times the group's; 0: none",
        0.0,
        req="R37",
        ge=0.0,
    )


# ---- stage2_ab -----------------------------------------------------------------------------------------------------


class ScheduleConfig(Section):
    """Which steps run Channel-B, on rollouts. The others run Channel-A, on ground truth."""

    b_ratio: float = key("share of Channel-B steps", unit="share", req="R26", ge=0.0, le=1.0)


class AsyncActorLearnerConfig(Section):
    """Rollouts made ahead of learning, with bounded staleness. Needs servers and full sync."""

    enabled: bool = key("make packs before the step that learns them", False, req="D3 R25")
    version_window: int = key(
        "a pack may be learned up to this many syncs after it was made; older ones are dropped. A sync for an "
        "evaluation only does not count",
        1,
        unit="weight versions",
        req="D3 R25",
        ge=0,
    )
    max_update_lag: int = key(
        "largest number of optimizer updates between the weights of a rollout and the step that learns it; older packs "
        "are dropped. Where Channel-B steps are further apart, weights are synced shortly before each of them",
        4,
        unit="optimizer steps",
        req="D12",
        ge=1,
    )
    max_starved_steps: int = key(
        "Channel-B steps in a row that find no packs, and run Channel-A instead; the last of them ends the run",
        20,
        unit="optimizer steps",
        req="D16",
        ge=1,
    )
    queue_limit: int = key(
        "packs that may wait on each rank; if there are more, the oldest is dropped",
        8,
        unit="packs",
        req="D3 R25",
        ge=1,
    )
    prefetch_target_packs: int = key(
        "packs of `per_device_train_batch_size` samples that each rank keeps ready; at least as many as a step takes "
        "(`gradient_accumulation_steps`). A step lays its packs in as few rows as they need",
        4,
        unit="packs",
        req="D3 R25 R27",
        ge=1,
    )


class Stage2Config(Section):
    """Settings of `stage2_ab_training`. With `grpo` the section is optional: Channel-B learns rewards."""

    schedule: ScheduleConfig = key("which steps run Channel-B", req="R26")
    async_actor_learner: AsyncActorLearnerConfig = key(
        "rollouts made ahead of learning", AsyncActorLearnerConfig(), req="D3"
    )


# ---- the whole -----------------------------------------------------------------------------------------------------


class RunConfig(Section):
    """A run of the learner."""

    model: ModelConfig = key("trained model")
    data: DataConfig = key("annotations")
    task: TaskConfig = key("form of answers, and matching", TaskConfig())
    reward: RewardConfig = key("scores of rollouts", RewardConfig(), req="R38")
    loss: LossConfig = key("loss", LossConfig())
    training: TrainingConfig = key("training loop")
    logging: LoggingConfig = key("logging", LoggingConfig())
    custom: CustomConfig = key("trainer variant and rollouts", req="R01")
    grpo: GrpoConfig = key("policy gradients; only with `trainer_variant: grpo`", GrpoConfig(), req="R37")
    stage2_ab: Stage2Config | None = key(
        "settings of `stage2_ab_training`, which requires them, and of `grpo`; refused elsewhere", None, req="R26"
    )
    global_max_length: int = key("longest packed row and longest segment", 4096, unit="tokens", req="R36", ge=8)

    @property
    def rollout_matching(self) -> RolloutMatchingConfig:
        return self.custom.extra.rollout_matching
