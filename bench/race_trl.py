"""TRL's side of `bench.race`: its GRPOTrainer on the same photographs, in a process of its own.

In: the race's settings as JSON in the first argument. Out: a line of JSON per step in `out`. A step ends at
`on_step_end`, after a synchronize. TRL ends if a random model writes an image token, so those are never sampled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoConfig, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Writes the seconds of each step."""

    def __init__(self, out: Path) -> None:
        self._file = out.open("w")
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self._file.write(json.dumps({"step_s": now - self._began}) + "\n")
        self._file.flush()
        self._began = now


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """Any that differ: random answers are all worthless."""
    return [float(len(str(completion)) % 7) for completion in completions]


# TRL's colocated engine reads them, and torchrun is not used here.
ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def main(settings: dict[str, Any]) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    data, lora = Path(settings["data"]), settings["lora"]
    names = (data / "splits" / "train.txt").read_text().split()
    samples = settings["steps"] * settings["photographs"]
    files = [next((data / "images").glob(f"{names[i % len(names)]}.*")) for i in range(samples)]
    text = settings["prompt"].removeprefix("<image>")
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": text}]] * samples,
            "image": [Image.open(file).convert("RGB") for file in files],
        }
    )
    model_config = AutoConfig.from_pretrained(settings["model"])
    images = [getattr(model_config, f"{name}_token_id") for name in ("image", "video", "vision_start", "vision_end")]
    batch = settings["photographs"] * settings["group"]
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=rewards,
        args=GRPOConfig(
            output_dir=str(Path(settings["out"]).parent / "trl"),
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=settings["share"],
            vllm_max_model_length=2048,
            per_device_train_batch_size=batch // 4,
            gradient_accumulation_steps=4,
            num_generations=settings["group"],
            max_completion_length=settings["tokens"],
            max_steps=settings["steps"],
            generation_kwargs={"logit_bias": dict.fromkeys(images, -100)},
            learning_rate=1e-5,
            bf16=True,
            gradient_checkpointing=True,
            model_init_kwargs={"dtype": "bfloat16"},
            report_to="none",
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(settings["model"]),
        peft_config=LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["target_modules"])
        if lora
        else None,
        callbacks=[Clock(Path(settings["out"]))],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
