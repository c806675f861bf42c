"""A run directory as the learner would leave it, made up: PNG scenes of bright blocks, metrics that improve."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from learner.config.load import RESOLVED_NAME
from learner.report.read import read_scene
from learner.report.scores import classify

SIZE = 96  # pixels


def write_run(
    path: Path,
    *,
    steps: int = 40,
    variant: str = "rollout_matching_sft",
    quality: Sequence[tuple[int, float]] = ((0, 0.35), (40, 0.8)),
    num_scenes: int = 24,
    seed: int = 0,
    images: Path | None = None,
) -> Path:
    """`quality` is (global_step, share of objects found) per evaluation; scenes are the same for every `images`."""
    rng = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model": {"path": "deploy/demo/checkpoint"},
        "custom": {"trainer_variant": variant},
        "training": {"max_steps": steps, "seed": 17},
    }
    (path / RESOLVED_NAME).write_text(yaml.safe_dump(config))
    scenes = [make_scene(i, images or path / "images") for i in range(num_scenes)]
    events: list[dict[str, Any]] = []
    for step, share in quality:
        (path / "eval").mkdir(exist_ok=True)
        answers = [answer(scene, share, random.Random(f"{seed} {step} {i}")) for i, scene in enumerate(scenes)]
        lines = [json.dumps(line) for line in answers]
        (path / "eval" / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
        metrics = {
            "f1@0.5": f1_at_half(answers),
            "f1@miou": share * 0.7,
            "parse_rate": 0.9 + share / 12,
            "duplicate_rate": 0.02,
        }
        events.append({"event": "eval", "global_step": step, "metrics": metrics})
    for step in range(1, steps + 1):
        if variant != "sft":
            events.append(_sync(step, rng))
        events.append(_step(step, steps, variant, rng))
    for i, event in enumerate(events):
        event["time"] = 1_700_000_000.0 + 2.3 * i
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def make_scene(index: int, folder: Path) -> dict[str, Any]:
    """Draw a scene's PNG; return the scene, whose objects are in bins."""
    rng = random.Random(index)
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(index)
    pixels = noise.integers(20, 70, size=(SIZE, SIZE)).astype(np.uint8)
    truth = []
    for _ in range(rng.randint(1, 7)):
        side = rng.randint(14, 30)
        x, y = rng.randint(0, SIZE - side), rng.randint(0, SIZE - side)
        pixels[y : y + side, x : x + side] = np.kron(noise.integers(40, 255, (2, 2)), np.ones((15, 15)))[:side, :side]
        box = [round(999 * v / SIZE) for v in (x, y, x + side, y + side)]
        truth.append({"desc": f"digit {rng.randint(0, 9)}", "bbox_2d": box})
    file = folder / f"scene_{index:04d}.png"
    Image.fromarray(pixels).save(file)
    return {"id": f"test-{index:04d}", "images": [str(file)], "width": SIZE, "height": SIZE, "truth": truth}


def answer(scene: dict[str, Any], share: float, rng: random.Random) -> dict[str, Any]:
    """Return what a policy that finds `share` of the objects says about a scene."""
    predictions, pairs = [], []
    for index, item in enumerate(scene["truth"]):
        if rng.random() > share + 0.12:
            continue
        right = rng.random() < 0.88
        box = [min(999, max(0, v + rng.randint(-14, 14))) for v in item["bbox_2d"]]
        pairs.append([len(predictions), index, 0.8])
        predictions.append({"desc": item["desc"] if right else f"digit {rng.randint(0, 9)}", "bbox_2d": box})
    if rng.random() > share:
        x, y = rng.randint(0, 700), rng.randint(0, 700)
        predictions.append({"desc": f"digit {rng.randint(0, 9)}", "bbox_2d": [x, y, x + 220, y + 240]})
    drops = {"bbox_invalid": 1} if rng.random() > share + 0.3 else {}
    return {**scene, "predictions": predictions, "pairs": pairs, "drops": drops, "truncated": False, "ver": 0}


def f1_at_half(answers: Sequence[dict[str, Any]]) -> float:
    """Return what the learner would have recorded for these scenes."""
    scenes = [scene for scene in map(read_scene, answers) if scene is not None]
    hits = sum(len(classify(scene).found) for scene in scenes)
    return 2 * hits / max(1, sum(len(scene.predictions) + len(scene.truth) for scene in scenes))


def _step(step: int, steps: int, variant: str, rng: random.Random) -> dict[str, Any]:
    done = step / steps
    seconds = {"learn_s": 0.9 + rng.random() * 0.1, "data_s": 0.03, "target_s": 0.01, "pack_s": 0.005}
    metrics: dict[str, float] = {}
    if variant != "sft":
        seconds |= {"rollout_s": 1.1 + rng.random() * 0.3, "sync_s": 0.2}
        matched = round(30 + 35 * (1 - math.exp(-3 * done)) + rng.randint(-4, 4))
        metrics |= {"matched": matched, "missed": 72 - matched, "spurious": 14 - round(8 * done)}
        metrics |= {"match_rate": matched / 72, "rollout_tokens": 900.0, "truncated": 0.0, "unusable": 0.0}
        if rng.random() > done:
            metrics |= {"drop/bbox_invalid": rng.randint(1, 3), "drop/wrong_arity": rng.randint(0, 2)}
        if rng.random() > 0.9:
            metrics["drop/truncated"] = 1
    seconds["other_s"] = 0.02
    seconds["step_s"] = sum(seconds.values())
    return {
        "event": "step",
        "global_step": step,
        "channel": "A" if variant == "sft" else "B",
        "loss": 0.9 * math.exp(-2.2 * done) + 0.12 + rng.random() * 0.06,
        "grad_norm": 1.2,
        "learning_rate": 3e-4,
        "num_segments": 16,
        "num_rows": 2,
        "num_tokens": 5100,
        "num_supervised": 800,
        "ver": step,
        "metrics": {**metrics, **seconds, "tokens_per_s": 5100 / seconds["step_s"], "packing_fill": 0.9},
    }


def _sync(ver: int, rng: random.Random) -> dict[str, Any]:
    gap = 2e-4 + rng.random() * 3e-4
    return {
        "event": "sync",
        "ver": ver,
        "mode": "full",
        "seconds": 0.18 + rng.random() * 0.06,
        "num_bytes": 21_000_000,
        "num_tensors": 131,
        "canary_gap": gap,
        "canary_gap_max": gap * 6,
    }
