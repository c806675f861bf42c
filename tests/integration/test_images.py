"""The same picture on both sides: prompts of a live vLLM server and of the learner, token by token (R03, D13)."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from learner.data.prompt import PromptEncoder
from learner.records import Sample
from shared.addresses import free_port
from shared.config.parse import dump_yaml
from shared.wire import RolloutInferRequest
from tests.models import build_qwen3_vl
from tests.ranks import learner
from tests.runs import events, steps
from tests.servers import RunningServer, running_server

LIMITS = {"min_pixels": 48 * 48, "max_pixels": 64 * 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    build_qwen3_vl(path / "model")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server({"model": str(folder / "model"), "allowed_image_roots": [str(folder)], **LIMITS}, folder) as up:
        yield up


def saved(path: Path, image: Image.Image, orientation: int = 1) -> str:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)
    return str(path)


def pictures(folder: Path) -> dict[str, str]:
    """By what is special about them: a large one, a tiny one, one that lies on its side, 16-bit grey, short base64."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    deep = np.linspace(0, 65535, 96 * 32).astype(np.uint16).reshape(96, 32)
    short = io.BytesIO()
    Image.new("L", (4, 4)).save(short, "PNG")
    return {
        "large": saved(folder / "large.png", Image.fromarray(noise)),
        "tiny": saved(folder / "tiny.png", Image.fromarray(noise[:9, :20])),
        "turned": saved(folder / "turned.jpg", Image.fromarray(noise[:40, :90]), orientation=6),
        "deep": saved(folder / "deep.png", Image.fromarray(deep)),
        "short": base64.b64encode(short.getvalue()).decode(),
    }


def asked(server: RunningServer, sample: Sample) -> list[int]:
    request = RolloutInferRequest(messages=list(sample.messages), images=list(sample.images))  # type: ignore[arg-type]
    call: dict[str, Any] = {"infer_requests": [request.model_dump()], "request_config": {"max_tokens": 1}}
    reply = httpx.post(f"{server.base_url}/infer/", json=call, timeout=120)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()[0]["prompt_token_ids"]
    return ids


def test_prompts_are_equal_under_limits_of_pixels(server: RunningServer, folder: Path) -> None:
    ours = PromptEncoder.load(str(folder / "model"), **LIMITS)
    without = PromptEncoder.load(str(folder / "model"))
    turn = {"role": "user", "content": "<image>name every digit"}
    sample = Sample(sample_id="s", messages=(turn,), images=(), objects=(), width=1, height=1)
    lengths = {}
    for name, source in pictures(folder).items():
        one = replace(sample, images=(source,))
        assert asked(server, one) == list(ours.encode(one).token_ids), name
        lengths[name] = (len(ours.encode(one).token_ids), len(without.encode(one).token_ids))
    assert lengths["large"][0] < lengths["large"][1]
    assert lengths["tiny"][0] < lengths["tiny"][1]


def test_other_limits_on_the_two_sides_are_found_before_the_first_step(server: RunningServer, folder: Path) -> None:
    """The samples that the canary scores do not meet the limits: the largest image shows them."""
    objects = [{"desc": "one", "bbox_2d": [1, 1, 30, 30]}]
    rows = []
    for side in (64, 64, 128):
        Image.new("RGB", (side, side)).save(folder / f"{side}.png")
        turn = {"role": "user", "content": "<image>name every digit"}
        row = {"messages": [turn], "images": [f"{side}.png"], "objects": objects, "width": side, "height": side}
        rows.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(rows))
    entry = {"base_url": server.base_url, "group_port": free_port()}
    vllm = {"mode": "server", "server": {"servers": [entry]}, "sync": {"canary_samples": 1}}
    config = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "training": {"output_dir": str(folder / "run"), "max_steps": 1},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "extra": {"rollout_matching": {"vllm": vllm, "decoding": {"max_new_tokens": 8}}},
        },
        "global_max_length": 1024,
    }
    (folder / "run.yaml").write_text(dump_yaml(config))
    done = learner(folder / "run.yaml", timeout_s=240.0)
    assert done.returncode != 0
    assert "PromptMismatchError" in done.stderr
    assert "model.max_pixels" in done.stderr
    assert steps(folder / "run") == []
    assert events(folder / "run", "sync") == []
