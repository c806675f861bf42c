"""The learner's configuration: one frozen pydantic model per YAML section, unknown keys refused at every level.

`load.py` reads YAML into `RunConfig`; `legacy.py` turns retired keys into advice; `plan.py` derives every number that
follows. Every field's description, default, unit (in its name) and requirement id land in CONFIG.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# ---- model, data, task, loss ---------------------------------------------------------------------------------------


class LoraConfig(Section):
    type: Literal["lora", "dora"] = "lora"
    r: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the trained weights
    lora: LoraConfig | None = None
    freeze: list[str] = []  # parameter-name prefixes that are not trained
    gradient_checkpointing: bool = False


class DataConfig(Section):
    train: str
    val: str | None = None
    test: str | None = None
    format: Literal["jsonl", "coco"] = "jsonl"
    image_root: str | None = None  # relative image paths start here; default: the annotation file's folder
    prompt: str | None = None  # COCO only: the user's turn
    shuffle: bool = True
    max_samples: int | None = Field(default=None, ge=1)
    num_workers: int = Field(default=0, ge=0)


class TaskConfig(Section):
    name: Literal["detection"] = "detection"
    container: Literal["index_map", "array"] = "index_map"
    coordinates: Literal["tokens", "digits"] = "tokens"
    iou_threshold: float = Field(default=0.5, ge=0.0, le=1.0)  # pairs below it are infeasible


class LossConfig(Section):
    desc_weight: float = Field(default=1.0, ge=0.0)


# ---- training ------------------------------------------------------------------------------------------------------


class TrainingConfig(Section):
    output_dir: str
    seed: int = Field(default=42, ge=0)
    max_steps: int | None = Field(default=None, ge=1)  # optimizer steps
    num_train_epochs: int | None = Field(default=None, ge=1)
    per_device_train_batch_size: int = Field(default=1, ge=1)  # samples per micro-step and rank
    effective_batch_size: int | None = Field(default=None, ge=1)  # samples per optimizer step, all ranks
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=1e-5, gt=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    adam_epsilon: float = Field(default=1e-8, gt=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    bf16: bool = False  # autocast of the forward pass
    packing: bool = True
    packing_buffer: int = Field(default=64, ge=1)  # segments carried at most
    packing_min_fill_ratio: float = Field(default=0.6, gt=0.0, le=1.0)
    packing_drop_last: bool = True
    eval_steps: int | None = Field(default=None, ge=1)
    eval_on_start: bool = False
    eval_on_end: bool = False
    eval_samples: int | None = Field(default=None, ge=1)
    save_steps: int | None = Field(default=None, ge=1)
    save_total_limit: int | None = Field(default=None, ge=1)
    save_on_end: bool = True
    resume_from_checkpoint: str | None = None  # a path, or "latest"
    collective_timeout_s: float = Field(default=600.0, gt=0.0)


class LoggingConfig(Section):
    tensorboard: bool = True
    progress_bar: bool = True
    wandb_project: str | None = None


# ---- custom.extra.rollout_matching ---------------------------------------------------------------------------------


class DecodingConfig(Section):
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    max_new_tokens: int = Field(default=512, ge=1)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    decode_mode: Literal["greedy", "sample", "beam"] | None = None  # null: follows temperature
    num_beams: int = Field(default=1, ge=1)


class ServerEntry(Section):
    base_url: str
    group_port: int = Field(ge=1, le=65535)


class ServerClientConfig(Section):
    """Either `servers`, or `base_url` with `group_port`; `load.py` turns the second form into the first."""

    servers: list[ServerEntry] | None = None
    base_url: str | list[str] | None = None
    group_port: int | list[int] | None = None
    timeout_s: float = 240.0  # reachability checks, communicator set-up, weight updates
    infer_timeout_s: float | None = None  # null or <= 0: none


class SyncConfig(Section):
    mode: Literal["full", "adapter", "auto"] = "full"
    fallback_to_full: bool = True
    bucket_bytes: int = Field(default=512 * 2**20, ge=1)
    canary_samples: int = Field(default=2, ge=1)
    canary_tolerance: float = Field(default=0.1, gt=0.0)  # mean |logprob gap|, nats per token


class VllmConfig(Section):
    mode: Literal["colocate", "server"] = "colocate"
    enable_lora: bool = False
    gpu_memory_utilization: float = Field(default=0.45, gt=0.0, le=1.0)
    tensor_parallel_size: int = Field(default=4, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    server: ServerClientConfig = ServerClientConfig()
    sync: SyncConfig = SyncConfig()


class RolloutBufferConfig(Section):
    enabled: bool = False
    m_steps: int = Field(default=1, ge=1)


class OffloadConfig(Section):
    enabled: bool = False
    offload_model: bool = False
    offload_optimizer: bool = False


class RolloutMatchingConfig(Section):
    rollout_backend: Literal["vllm", "hf"] = "vllm"
    decode_batch_size: int = Field(default=1, ge=1)  # sequences per rollout GPU and generation call
    decoding: DecodingConfig = DecodingConfig()
    vllm: VllmConfig = VllmConfig()
    rollout_buffer: RolloutBufferConfig | None = None
    offload: OffloadConfig = OffloadConfig()


class ExtraConfig(Section):
    rollout_matching: RolloutMatchingConfig = RolloutMatchingConfig()


class CustomConfig(Section):
    trainer_variant: Literal["sft", "rollout_matching_sft", "stage2_ab_training"]
    extra: ExtraConfig = ExtraConfig()


# ---- stage2_ab -----------------------------------------------------------------------------------------------------


class ScheduleConfig(Section):
    b_ratio: float = Field(ge=0.0, le=1.0)


class AsyncActorLearnerConfig(Section):
    enabled: bool = False
    version_window: int = Field(default=1, ge=0)
    queue_limit: int = Field(default=8, ge=1)
    prefetch_target_packs: int = Field(default=4, ge=1)


class Stage2Config(Section):
    schedule: ScheduleConfig
    async_actor_learner: AsyncActorLearnerConfig = AsyncActorLearnerConfig()


# ---- the whole -----------------------------------------------------------------------------------------------------


class RunConfig(Section):
    model: ModelConfig
    data: DataConfig
    task: TaskConfig = TaskConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig
    logging: LoggingConfig = LoggingConfig()
    custom: CustomConfig
    stage2_ab: Stage2Config | None = None
    global_max_length: int = Field(default=4096, ge=8)  # tokens; the cap of a packed row

    @property
    def rollout_matching(self) -> RolloutMatchingConfig:
        return self.custom.extra.rollout_matching
