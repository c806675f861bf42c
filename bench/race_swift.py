"""ms-swift's side of `bench.race`: `swift rlhf --rlhf_type grpo` with a colocated engine, at its documented settings.

Liger's layers and loss, and half as many micro-steps as TRL's examples. Its other way, rows without padding, needs
flash-attn, and rows of equal length have none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swift import RLHFArguments
from swift.infer_engine.vllm_engine import VllmEngine
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen3VLTemplate
from swift.trainers import mixin
from transformers import AutoConfig

from bench.race_trl import ACCUMULATED, Clock, image_files, never_sampled, rewards, start


class Rewards(ORM):
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return rewards(completions)


class Timed(SwiftRLHF):
    clock: Clock

    def train(self, trainer: Any) -> Any:
        trainer.add_callback(self.clock)
        self.clock.timed(trainer.engine, "infer", "rollout_s")
        if trainer.args.use_vllm:
            self.clock.timed(trainer, "_move_model_to_vllm", "sync_s")
        self.clock.reached("engine and trainer ready")
        return super().train(trainer)


def tuner_of(lora: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that choose what is trained: an adapter, or all weights."""
    if not lora:
        return {"tuner_type": "full"}
    sizes = {"lora_rank": lora["r"], "lora_alpha": lora["alpha"], "lora_dropout": 0.0}
    return {"tuner_type": "lora", **sizes, "target_modules": [lora["target_modules"]]}


def main(settings: dict[str, Any]) -> None:
    Timed.clock = start(settings)
    folder, on_gpu = Path(settings["out"]).parent, settings["on_gpu"]
    message = {"role": "user", "content": settings["prompt"]}
    rows = [{"messages": [message], "images": [str(file)]} for file in image_files(settings)]
    data = folder / "swift-data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    orms["race"] = Rewards
    mixin.check_local_model_is_latest = lambda *_, **__: None  # it asks a hub
    config = AutoConfig.from_pretrained(settings["model"])
    Qwen3VLTemplate.image_token_id = config.image_token_id  # it has the published tokenizer's number
    sampling, bias = VllmEngine._prepare_generation_config, never_sampled(settings)

    def without_images(engine: VllmEngine, request: Any) -> Any:
        params = sampling(engine, request)
        params.logit_bias = bias
        return params

    VllmEngine._prepare_generation_config = without_images
    batch = settings["photographs"] * settings["group"]
    arguments = RLHFArguments(
        rlhf_type="grpo",
        model=settings["model"],
        model_type="qwen3_vl",
        use_hf=True,
        dataset=[str(data)],
        split_dataset_ratio=0.0,
        reward_funcs=["race"],
        output_dir=str(folder / "swift"),
        torch_dtype="bfloat16" if on_gpu else "float32",
        **tuner_of(settings["lora"]),
        # The others adapt the vision tower too.
        freeze_vit=False,
        freeze_aligner=False,
        use_vllm=on_gpu,
        vllm_mode="colocate" if on_gpu else None,
        vllm_gpu_memory_utilization=settings["share"],
        vllm_max_model_len=settings["context"],
        per_device_train_batch_size=batch // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        num_generations=settings["group"],
        max_completion_length=settings["tokens"],
        max_length=settings["context"],
        max_steps=settings["steps"],
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        gradient_checkpointing=True,
        use_liger_kernel=on_gpu,
        attn_impl="sdpa",
        dataloader_num_workers=0,
        report_to=["none"],
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
    )
    Timed(arguments).main()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
