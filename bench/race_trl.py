"""TRL's side of `bench.race`: its GRPOTrainer on the same photographs, in a process of its own.

In: the race's settings as JSON in the first argument. Out: in `out`, a line of JSON for each point that it has reached
before the first step, and for each step. A step ends at `on_step_end`, after a synchronize. TRL ends if a random model
writes an image token, so those are never sampled.
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
    """Writes what was reached when, and the seconds of each step: all, `rollout_s`, `sync_s`, and the rest of it."""

    def __init__(self, out: Path) -> None:
        self._file = out.open("w")
        self._started = self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def reached(self, what: str) -> None:
        self._write({"reached": what, "seconds": time.perf_counter() - self._started})

    def timed(self, owner: Any, method: str, name: str) -> None:
        """Count the time of `owner.method`, the device's included, as `name`."""
        call = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                torch.cuda.synchronize()
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, method, counted)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.reached("training")
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        step_s, seconds = now - self._began, self._seconds
        self._write({"step_s": step_s, **seconds, "learn_s": step_s - sum(seconds.values())})
        self._began, self._seconds = now, {}

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """Return any rewards that differ: random answers are all worthless."""
    return [float(len(str(completion)) % 7) for completion in completions]


# TRL's colocated engine reads them, and torchrun is not used here.
ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def main(settings: dict[str, Any]) -> None:
    for name, value in {**ENVIRONMENT, "MASTER_PORT": str(settings["port"])}.items():
        os.environ.setdefault(name, value)
    clock = Clock(Path(settings["out"]))
    clock.reached("imported")
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
            vllm_max_model_length=settings["context"],
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
        callbacks=[clock],
    )
    clock.timed(trainer.vllm_generation, "generate", "rollout_s")
    clock.timed(trainer.vllm_generation, "sync_weights", "sync_s")
    clock.reached("engine and trainer ready")
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
