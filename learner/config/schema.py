"""The learner's configuration: one frozen pydantic model per YAML section, unknown keys refused at every level.

`load.py` reads YAML into `RunConfig`; `legacy.py` turns retired keys into advice; `rules.py` holds what must be true
between keys; `plan.py` derives every number that follows. CONFIG.md and config.schema.json are made from this file
(`make docs`). Types and ranges of single keys are here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shared.config.model import Section, key

if TYPE_CHECKING:
    from shared.images import ImageRules

Port = Annotated[int, Field(ge=1, le=65535)]

# ---- model, data, task, loss ---------------------------------------------------------------------------------------


class LoraConfig(Section):
    """Train a low-rank adapter instead of the whole model."""

    type: Literal["lora", "dora"] = key("plain LoRA, or DoRA (weight-decomposed)", "lora", req="R09")
    r: int = key("rank", 16, ge=1)
    alpha: int = key("scaling: the update is multiplied by alpha / r", 32, ge=1)
    dropout: float = key("dropout before the adapter", 0.0, unit="probability", ge=0.0, lt=1.0)
    target_modules: str | list[str] = key("peft's `target_modules`: module names, or a pattern", "all-linear")


class ModelConfig(Section):
    """The trained model."""

    path: str = key("folder or hub name of a Hugging Face checkpoint with its processor", min_length=1)
    dtype: Literal["float32", "bfloat16"] = key("dtype of the trained weights", "float32")
    lora: LoraConfig | None = key("train an adapter; null: train the weights themselves", None, req="R09")
    freeze: list[str] = key("parameters whose names start with one of these are not trained", [])
    min_pixels: int | None = key(
        "smaller images are enlarged to it; null: the checkpoint's own limit. Set the servers' `min_pixels` alike",
        None,
        unit="pixels (width x height)",
        ge=1,
    )
    max_pixels: int | None = key(
        "larger images are shrunk to it: fewer tokens per image; null: the checkpoint's own limit. Set the servers' "
        "`max_pixels` alike",
        None,
        unit="pixels (width x height)",
        ge=1,
    )
    gradient_checkpointing: bool = key("recompute activations in the backward pass to save memory", False)
    compile: Literal["auto"] | bool = key(
        "compile the model's layers and the loss for learning (torch.compile, once for rows of all lengths). "
        "`auto`: on CUDA from 5e8 parameters on, where a compiler is there and the model is not sharded",
        "auto",
    )
    sharding: Literal["none", "fsdp"] = key(
        "`fsdp`: each rank holds its part of weights, gradients and moments (FSDP2), for models that do not fit one "
        "GPU; `none`: each rank holds all. One rank alone always holds all",
        "none",
    )


class BadRecordConfig(Section):
    """What happens to each kind of bad record. `error`: all of them are listed, and nothing starts. `drop`: the object
    (or, for images and lengths, the whole sample) is left out. Whatever is dropped or clipped is counted and logged."""

    no_area: Literal["error", "drop"] = key("an object without area", "error", req="R41")
    outside_image: Literal["error", "drop", "clip"] = key(
        "an object that reaches more than a pixel out of its image; `clip`: it is cut at the border", "error", req="R41"
    )
    unknown_class: Literal["error", "drop"] = key(
        "an object whose class the annotations do not name", "error", req="R41"
    )
    image_missing: Literal["error", "drop"] = key("an image that is missing or can't be read", "error", req="R41")
    image_size: Literal["error", "drop"] = key(
        "an image of another size than the annotation says (upright, by its EXIF orientation)", "error", req="R41"
    )
    too_long: Literal["error", "drop"] = key(
        "a training sample whose prompt and labels are longer than `global_max_length`", "error", req="R41"
    )


class DataConfig(Section):
    """Annotations and images. Paths are relative to the working directory."""

    train: str = key(
        "annotations that are trained on: a JSONL or COCO file, a folder of Pascal VOC XML (or a text file with the "
        "names of some of them), a YOLO `data.yaml:SPLIT`, or a Hugging Face data set `FOLDER:SPLIT`",
        min_length=1,
        req="R12 R41",
    )
    val: str | None = key("annotations to evaluate on, where `test` is not given", None)
    test: str | None = key("annotations to evaluate on", None)
    format: Literal["auto", "jsonl", "coco", "voc", "yolo", "datasets"] = key(
        "`auto`: found out from the files. A data set by its name on the Hugging Face hub needs `datasets`",
        "auto",
        req="R41",
    )
    image_root: str | None = key(
        "relative image paths start here; null: the annotation file's folder (`voc`: `JPEGImages` or `images` near it)",
        None,
    )
    annotation_root: str | None = key(
        "`voc` with a list of names: the folder of the XML files; null: `Annotations` or `voc` near the list", None
    )
    prompt: str | None = key(
        "the user's turn where the annotations hold none (all formats but `jsonl`), with `<image>` where the image "
        "goes; null: `<image>Detect every object.`",
        None,
    )
    box_format: Literal["xywh", "xyxy"] = key(
        "`datasets`: boxes as left, top, width, height, or as two corners; in pixels", "xywh"
    )
    on_bad_record: Literal["error", "drop", "clip"] | BadRecordConfig = key(
        "what happens to bad records: one rule for all, or one per kind. `clip`: what reaches out of its image is cut "
        "at the border, every other kind is dropped",
        "error",
        req="R41",
    )
    shuffle: bool = key("a new order every epoch, derived from `training.seed`", True)
    max_samples: int | None = key("use only the first so many of `train`", None, unit="samples", ge=1)
    num_workers: int = key("processes per rank that read and encode images; 0: the learner itself", 0, ge=0)
    allowed_image_hosts: list[str] = key(
        "image URLs may be fetched from these hosts; empty: no URLs. Servers have a list of their own", [], req="D13"
    )
    image_timeout_s: float = key("for fetching one image", 10.0, unit="s", gt=0.0)
    image_cache_bytes: int = key(
        "fetched images that each process keeps in memory; 0: none", 256 << 20, unit="bytes", ge=0
    )
    max_image_bytes: int = key("size of one encoded image, at most", 32 << 20, unit="bytes", ge=1)
    max_image_pixels: int = key("width x height of one image, at most", 64_000_000, unit="pixels", ge=1)

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
    """How answers are read and compared with ground truth."""

    name: Literal["detection"] = key("the task", "detection")
    container: Literal["index_map", "array"] = key(
        '`{"object_1": {"desc": ..., "bbox_2d": [...]}}`, or `[{"bbox_2d": [...], "label": ...}]`', "index_map"
    )
    coordinates: Literal["tokens", "digits"] = key(
        "coordinates as `<|coord_k|>` tokens or as integers, both 0 to 999", "tokens"
    )
    geometry: Literal["bbox_2d", "poly"] = key(
        "`poly`: objects are polygons where the annotations have an outline (COCO's segmentations, YOLO's segments); "
        "`bbox_2d`: boxes. The project's JSONL says it itself, object by object",
        "bbox_2d",
        req="R41",
    )
    iou_threshold: float = key("pairs below it can't be matched", 0.5, unit="IoU", ge=0.0, le=1.0)


class LossConfig(Section):
    """Weights of the loss on Y_train: the rollout's prefix and every missed object appended."""

    desc_weight: float = key("weight of description text in the appended tail; structure and boxes have 1", 1.0, ge=0.0)
    matched_coordinate_weight: float = key(
        "weight of a matched prediction's coordinates, towards the ground truth's, in the rollout's own context",
        1.0,
        ge=0.0,
    )
    matched_desc_weight: float = key(
        "weight of a matched prediction's description, likewise; 0: not taught. Matching looks at places only, so "
        "without it a wrong name in the right place stays",
        0.0,
        ge=0.0,
    )
    prefix_end: Literal["last_object", "last_match", "first_miss"] = key(
        "where the rollout's prefix ends: after its last object; after its last matched prediction; or where it first "
        "skipped an object. What it then lacks is appended. The latter two are for complete labels: an object "
        "without a label matches nothing",
        "last_object",
    )
    keep_unmatched: bool = key(
        "with `prefix_end: first_miss`: what the answer predicted behind the cut and matches nothing stays, in "
        "canonical order among what is appended, and nothing is learned from it. For incomplete labels: what the "
        "policy finds and nobody labelled is not untaught",
        False,
    )
    missed_order: Literal["canonical", "random"] = key(
        "order of the missed objects that are appended; `random`: one that belongs to the sample", "canonical"
    )
    overrun_close_weight: float = key(
        "weight of the closer at the token where an answer that had found every object went on; 0: not taught. "
        "Keeps long runs from drifting to answers that do not end",
        0.0,
        ge=0.0,
    )


# ---- training ------------------------------------------------------------------------------------------------------


class TrainingConfig(Section):
    """The loop, the optimizer, packing, evaluation and checkpoints."""

    output_dir: str = key("the run directory", min_length=1)
    seed: int = key("every random choice of the run follows from it", 42, req="R11", ge=0)
    max_steps: int | None = key("length of the run (this or `num_train_epochs`)", None, unit="optimizer steps", ge=1)
    num_train_epochs: int | None = key("length of the run (this or `max_steps`)", None, unit="epochs", ge=1)
    per_device_train_batch_size: int = key("dataloader batch of one rank", 1, unit="samples per micro-step", ge=1)
    effective_batch_size: int | None = key(
        "batch of an optimizer step over all ranks; a multiple of per_device_train_batch_size x ranks. Required by "
        "`stage2_ab_training`, whose rollouts per step it is",
        None,
        unit="samples",
        req="D8 R31 R33",
        ge=1,
    )
    gradient_accumulation_steps: int | None = key(
        "micro-steps per optimizer step; null: from `effective_batch_size`, else 1", None, req="D8 R33", ge=1
    )
    learning_rate: float = key("peak learning rate", 1e-5, gt=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("decay after the warm-up", "cosine")
    warmup_steps: int = key("linear warm-up", 0, unit="optimizer steps", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", 0.0, ge=0.0)
    adam_beta1: float = key("AdamW's first moment", 0.9, ge=0.0, lt=1.0)
    adam_beta2: float = key("AdamW's second moment", 0.95, ge=0.0, lt=1.0)
    adam_epsilon: float = key("AdamW's epsilon", 1e-8, gt=0.0)
    max_grad_norm: float = key("gradients are clipped to this global norm", 1.0, gt=0.0)
    bf16: bool = key("autocast of the forward pass to bfloat16", False)
    packing: bool = key("several segments in one padding-free row of `global_max_length`", True, req="D6 R36")
    packing_buffer: int = key(
        "`rollout_matching_sft`: segments carried to later micro-steps, at most", 64, unit="segments", req="D6", ge=1
    )
    packing_min_fill_ratio: float = key(
        "rows filled less than this are counted as underfilled", 0.6, unit="share of the row", req="D6", gt=0.0, le=1.0
    )
    packing_drop_last: bool = key(
        "`rollout_matching_sft`: segments still carried at the end of the run are dropped (and counted); must be true "
        "there, as every micro-step has exactly one row",
        True,
        req="D6",
    )
    eval_steps: int | None = key("evaluate every so many optimizer steps", None, unit="optimizer steps", ge=1)
    eval_on_start: bool = key("evaluate before the first step", False)
    eval_on_end: bool = key("evaluate after the last step", False)
    eval_samples: int | None = key("evaluate on the first so many only", None, unit="samples", ge=1)
    save_steps: int | None = key("write a checkpoint every so many steps", None, unit="optimizer steps", ge=1)
    save_total_limit: int | None = key("keep only the newest checkpoints", None, unit="checkpoints", ge=1)
    save_on_end: bool = key("write a checkpoint after the last step", True)
    resume_from_checkpoint: str | None = key("a checkpoint folder, or `latest` of `output_dir`", None, req="R18 R26")
    stop_timeout_s: float = key(
        "after Ctrl-C or SIGTERM: a checkpoint is written and the process has ended (torchrun kills after 30 s)",
        25.0,
        unit="s",
        gt=0.0,
    )
    collective_timeout_s: float = key("no rank waits longer for another", 600.0, unit="s", req="R24", gt=0.0)


class LoggingConfig(Section):
    """Where numbers go besides metrics.jsonl."""

    tensorboard: bool = key("write TensorBoard events", True)
    progress_bar: bool = key("show a progress bar", True)
    wandb_project: str | None = key("also log to this W&B project", None)


# ---- custom.extra.rollout_matching ---------------------------------------------------------------------------------


class DecodingConfig(Section):
    """How rollouts are decoded."""

    temperature: float = key("0: greedy; above: sampling", 0.0, req="D7 R29", ge=0.0)
    top_p: float = key(
        "sample from the likeliest tokens of this total", 1.0, unit="probability", req="R29", gt=0.0, le=1.0
    )
    top_k: int = key("sample from the so many likeliest tokens; -1 or 0: all", -1, unit="tokens", req="R29", ge=-1)
    max_new_tokens: int = key("longest rollout", 512, unit="tokens", req="D7", ge=1)
    repetition_penalty: float = key("above 1: tokens that occurred become less likely", 1.0, req="D7", gt=0.0)
    decode_mode: Literal["greedy", "sample", "beam"] | None = key(
        "null: `greedy` at temperature 0, else `sample`; `beam` needs `rollout_backend: hf`", None, req="D7"
    )
    num_beams: int = key("`decode_mode: beam` only: beams, of which the best is the rollout", 1, req="D7", ge=1)

    @property
    def mode(self) -> Literal["greedy", "sample", "beam"]:
        """`decode_mode`, or what follows from the temperature."""
        return self.decode_mode or ("sample" if self.temperature > 0 else "greedy")


class ServerEntry(Section):
    """One rollout server."""

    base_url: str = key("URL prefix of the server's endpoints", req="R05 R06", min_length=1)
    group_port: int = key(
        "TCP port of the weight-sync group on that server's host; servers of one machine meet at the first one's",
        req="R05",
        ge=1,
        le=65535,
    )


class ServerClientConfig(Section):
    """Either `servers`, or `base_url` with `group_port`; loading turns the second form into the first."""

    servers: list[ServerEntry] | None = key("the rollout servers, in order", None, req="R05")
    base_url: str | list[str] | None = key("paired form: one URL prefix, or several", None, req="R05")
    group_port: Port | list[Port] | None = key(
        "paired form: one port (server i gets port + i), or one per URL", None, req="R05"
    )
    timeout_s: float = key(
        "reachability checks, communicator set-up, weight updates", 240.0, unit="s", req="R05", gt=0.0
    )
    infer_timeout_s: float | None = key("one `/infer/` call; null or <= 0: no limit", None, unit="s", req="R05 R30")


class SyncConfig(Section):
    """How trained weights reach the generator, in memory."""

    mode: Literal["full", "adapter", "auto"] = key(
        "merged weights, adapters only, or `auto`: adapters where `enable_lora` is true", "full", req="R08"
    )
    fallback_to_full: bool = key(
        "a failed adapter sync: warn, full syncs from then on (a resumed run tries again); false: stop the run",
        True,
        req="R08",
    )
    bucket_bytes: int = key(
        "tensors travel in pieces of this size, up to three at a time", 512 * 2**20, unit="bytes", req="R09", ge=1
    )
    canary_samples: int = key("prompts scored on both sides after a sync", 2, req="R09", ge=1)
    canary_tolerance: float = key(
        "largest mean difference between learner and server", 0.1, unit="nats per token", req="R09", gt=0.0
    )


class VllmConfig(Section):
    """vLLM: inside the learner's job, or behind rollout servers."""

    mode: Literal["colocate", "server"] = key(
        "on the training devices, or on servers of their own", "colocate", req="R02"
    )
    enable_lora: bool = key("the generator takes adapters; `server`: its own `enable_lora` too", False, req="R08")
    gpu_memory_utilization: float = key(
        "`colocate`: share of each device that vLLM may use", 0.45, unit="share", req="R04", gt=0.0, le=1.0
    )
    tensor_parallel_size: int = key(
        "`colocate`: devices per engine; divides the number of ranks (1 where there is one rank)", 4, req="R04", ge=1
    )
    max_model_len: int | None = key("`colocate`: longest prompt + answer; null: the model's", None, unit="tokens", ge=1)
    enforce_eager: bool = key(
        "`colocate`: no compilation, no CUDA graphs: starts sooner, decodes slower", False, req="R04"
    )
    cpu_kv_cache_gib: int = key(
        "`colocate`: memory of each rank's KV cache where there is no GPU", 1, unit="GiB", req="R04", ge=1
    )
    server: ServerClientConfig = key("`server`: where the servers are", ServerClientConfig(), req="R05")
    sync: SyncConfig = key("weight sync", SyncConfig(), req="R08")


class RolloutBufferConfig(Section):
    """Reuse the rollouts of one accumulation window; `rollout_matching_sft` only."""

    enabled: bool = key("reuse rollouts", False, req="R18")
    m_steps: int = key(
        "optimizer steps that learn one window's rollouts; an epoch has so many times the steps (the short window that "
        "it may end with is learned once)",
        1,
        unit="optimizer steps",
        req="R18",
        ge=1,
    )


class OffloadConfig(Section):
    """Move training state off the device while colocated vLLM generates, into page-locked host memory that is kept; no
    effect elsewhere."""

    enabled: bool = key("offload what the two keys below name", False, req="R20")
    offload_model: bool = key("the trained model", False, req="R20")
    offload_optimizer: bool = key("the optimizer's state", False, req="R20")


class RolloutMatchingConfig(Section):
    """How rollouts are made."""

    rollout_backend: Literal["vllm", "hf"] = key("vLLM, or `generate` of the training model itself", "vllm", req="R02")
    decode_batch_size: int = key(
        "sequences decoded at once. An optimizer step's rollouts are asked for together, however small its "
        "micro-batches are",
        1,
        unit="sequences per rollout GPU and generation call",
        req="R21 R34",
        ge=1,
    )
    decoding: DecodingConfig = key("decoding", DecodingConfig(), req="D7")
    vllm: VllmConfig = key("`rollout_backend: vllm`", VllmConfig(), req="R02")
    rollout_buffer: RolloutBufferConfig | None = key("rollout reuse; null: none", None, req="D2 R18")
    offload: OffloadConfig = key("offloading during colocated rollouts", OffloadConfig(), req="R20")


class ExtraConfig(Section):
    """Extensions."""

    rollout_matching: RolloutMatchingConfig = key("rollouts", RolloutMatchingConfig(), req="R02")


class CustomConfig(Section):
    """What this project adds to plain supervised training."""

    trainer_variant: Literal["sft", "rollout_matching_sft", "stage2_ab_training"] = key(
        "plain teacher forcing, rollout matching, or scheduled A/B channels", req="R01"
    )
    extra: ExtraConfig = key("extensions", ExtraConfig())


# ---- stage2_ab -----------------------------------------------------------------------------------------------------


class ScheduleConfig(Section):
    """Which steps run Channel-B (on rollouts); the others run Channel-A (on ground truth)."""

    b_ratio: float = key("share of Channel-B steps", unit="share", req="R26", ge=0.0, le=1.0)


class AsyncActorLearnerConfig(Section):
    """Rollouts ahead of learning, with bounded staleness; needs servers and full sync."""

    enabled: bool = key("prepare packs ahead of the step that learns them", False, req="D3 R25")
    version_window: int = key("packs older than this are dropped", 1, unit="weight versions", req="D3 R25", ge=0)
    queue_limit: int = key(
        "packs waiting per rank; beyond it the oldest is dropped", 8, unit="packs", req="D3 R25", ge=1
    )
    prefetch_target_packs: int = key(
        "packs that each rank tries to have ready; never fewer than a step takes (`gradient_accumulation_steps`)",
        4,
        unit="packs",
        req="D3 R25 R27",
        ge=1,
    )


class Stage2Config(Section):
    """`stage2_ab_training` only."""

    schedule: ScheduleConfig = key("when Channel-B runs", req="R26")
    async_actor_learner: AsyncActorLearnerConfig = key(
        "rollouts ahead of learning", AsyncActorLearnerConfig(), req="D3"
    )


# ---- the whole -----------------------------------------------------------------------------------------------------


class RunConfig(Section):
    """A learner's run."""

    model: ModelConfig = key("the trained model")
    data: DataConfig = key("annotations and images")
    task: TaskConfig = key("the task", TaskConfig())
    loss: LossConfig = key("the loss", LossConfig())
    training: TrainingConfig = key("the loop")
    logging: LoggingConfig = key("logging", LoggingConfig())
    custom: CustomConfig = key("trainer variant and rollouts", req="R01")
    stage2_ab: Stage2Config | None = key("required by `stage2_ab_training`, refused elsewhere", None, req="R26")
    global_max_length: int = key("cap of a packed row and of a segment", 4096, unit="tokens", req="R36", ge=8)

    @property
    def rollout_matching(self) -> RolloutMatchingConfig:
        return self.custom.extra.rollout_matching
