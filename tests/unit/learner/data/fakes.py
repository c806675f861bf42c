"""Tiny datasets, and encoders that need no model. Encoders are module-level: worker processes unpickle them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from learner.config.plan import Plan, resolve
from learner.config.schema import RunConfig
from learner.records import EncodedPrompt, Sample, VisionInputs
from shared.errors import DataError, MediaError


def make_samples(count: int) -> list[Sample]:
    return [
        Sample(
            sample_id=f"s{i}",
            messages=({"role": "user", "content": "Detect."},),
            images=(),
            objects=(),
            width=10,
            height=10,
        )
        for i in range(count)
    ]


def make_run(*, samples_per_rank: int = 2, ranks: int = 1, **data: Any) -> tuple[RunConfig, Plan]:
    """Return a plain `sft` run; `data` are keys of the section `data`."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", **data},
            "training": {
                "output_dir": "out",
                "seed": 7,
                "max_steps": 10,
                "per_device_train_batch_size": samples_per_rank,
                "gradient_accumulation_steps": 1,
                "collective_timeout_s": 60.0,
            },
            "custom": {"trainer_variant": "sft"},
        }
    )
    return config, resolve(config, ranks)


@dataclass(frozen=True)
class CountingEncoder:
    """Sample s5 -> token ids (5, 5); i % 3 images of i + 1 patches each whose pixels are all i."""

    def encode(self, sample: Sample) -> EncodedPrompt:
        i = int(sample.sample_id[1:])
        vision = None
        if i % 3:
            grid = torch.tensor([[1, 1, i + 1]] * (i % 3))
            vision = VisionInputs(pixel_values=torch.full(((i + 1) * (i % 3), 4), float(i)), image_grid_thw=grid)
        return EncodedPrompt(token_ids=(i, i), vision=vision)


@dataclass(frozen=True)
class FailingEncoder:
    def encode(self, sample: Sample) -> EncodedPrompt:
        raise MediaError("an image is bad", found=sample.sample_id, wanted="an image", remedy="replace it")


@dataclass(frozen=True)
class DyingEncoder:
    def encode(self, sample: Sample) -> EncodedPrompt:
        os._exit(3)


@dataclass(frozen=True)
class SlowEncoder:
    def encode(self, sample: Sample) -> EncodedPrompt:
        time.sleep(100)
        return EncodedPrompt(token_ids=(0,), vision=None)


IMPORTED_BY = os.getpid()


@dataclass(frozen=True)
class ImportTellingEncoder:
    """An encoder that tells whether its process is another than the one that imported this module, and a child of that
    one."""

    def encode(self, sample: Sample) -> EncodedPrompt:
        return EncodedPrompt(token_ids=(os.getpid() != IMPORTED_BY, os.getppid() == IMPORTED_BY), vision=None)


class AnyTask:
    """Validates all samples but those that have an object called `bad`."""

    def validate(self, sample: Sample) -> None:
        if any(obj.desc == "bad" for obj in sample.objects):
            raise DataError("the task can't use it", found="bad", wanted="good", remedy="rename it")


def draw(folder: Path, *names: str, size: tuple[int, int] = (200, 100), orientation: int = 1) -> None:
    """Write black images: readers look at their headers."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", size).save(file, exif=exif)
