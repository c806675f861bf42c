"""The same picture on both sides: prompts of a live vLLM server and of the learner, token by token (R03, D13) and
pixel by pixel (R45)."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter
from transformers.image_utils import PILImageResampling, SizeDict

from bench.tiny_models import build_qwen3_vl
from learner.data.prompt import PromptCheck, PromptEncoder
from learner.records import Rollout, Sample
from learner.rollout.requests import infer_request, read_rollout
from shared.addresses import free_port
from shared.config.parse import dump_yaml
from shared.errors import ServerMismatchError
from shared.images import ImageRules, Images
from shared.wire import InferCall, RequestConfig, RolloutOutput
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
    """Return pictures by what is special about them: a large one, a tiny one, one that lies on its side, 16-bit grey,
    short base64."""
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


def asked(server: RunningServer, *samples: Sample, pixels: bool = False) -> list[Rollout]:
    """A rollout of each, asked for together."""
    requests = [infer_request(sample, pixels=pixels) for sample in samples]
    call = InferCall(infer_requests=requests, request_config=RequestConfig(max_tokens=1))
    reply = httpx.post(f"{server.base_url}/infer/", json=call.model_dump(), timeout=120)
    assert reply.status_code == 200, reply.text
    outputs = TypeAdapter(list[RolloutOutput]).validate_json(reply.content)
    return [
        read_rollout(output, sample=sample, request_uuid=request.uuid, seed=0, served=None, base_url=server.base_url)
        for output, sample, request in zip(outputs, samples, requests, strict=True)
    ]


def sample_of(*images: str) -> Sample:
    turn = {"role": "user", "content": "<image>" * len(images) + "name every digit"}
    return Sample(sample_id="s", messages=(turn,), images=images, objects=(), width=1, height=1)


def test_prompts_are_equal_under_limits_of_pixels(server: RunningServer, folder: Path) -> None:
    ours = PromptEncoder.load(str(folder / "model"), **LIMITS)
    without = PromptEncoder.load(str(folder / "model"))
    lengths = {}
    for name, source in pictures(folder).items():
        one = sample_of(source)
        (rollout,) = asked(server, one)
        assert rollout.prompt_token_ids == ours.encode(one).token_ids, name
        assert rollout.pixels is None
        lengths[name] = (len(ours.encode(one).token_ids), len(without.encode(one).token_ids))
    assert lengths["large"][0] < lengths["large"][1]
    assert lengths["tiny"][0] < lengths["tiny"][1]


def test_the_engine_is_fed_the_learners_pixels(server: RunningServer, folder: Path) -> None:
    """R45: bit for bit, for one image and for several; for one that vLLM has sent to its engine before anybody asked
    (the first), and for one that several requests bring at the same time."""
    encoder = PromptEncoder.load(str(folder / "model"), **LIMITS)
    check = PromptCheck(image_processing=encoder.image_processing)
    sources = list(pictures(folder).values())
    samples = [*map(sample_of, sources), *map(sample_of, sources), sample_of(*sources), sample_of()]
    asked(server, samples[0])
    rollouts = asked(server, *samples, pixels=True)
    for sample, rollout in zip(samples, rollouts, strict=True):
        prompt = encoder.encode(sample)
        check(prompt, rollout)
        if prompt.vision is None:
            assert rollout.pixels is None
            continue
        assert rollout.pixels is not None
        vision, processing = prompt.vision, encoder.image_processing
        assert processing is not None
        mine = processing.processed(vision.pixel_values, vision.image_grid_thw, rollout.pixels.dtype)
        assert rollout.pixels == mine, "settings too"


def reading(images: Images) -> Callable[[PromptEncoder], PromptEncoder]:
    return lambda encoder: replace(encoder, images=images)


def with_(**changes: Any) -> Callable[[PromptEncoder], PromptEncoder]:
    def change(encoder: PromptEncoder) -> PromptEncoder:
        for name, value in changes.items():
            setattr(encoder.processor.image_processor, name, value)  # type: ignore[union-attr]
        return encoder

    return change


class Turned(Images):
    """EXIF is not applied on this side. (`Images.load` gives upright images.)"""

    def load(self, source: str) -> Image.Image:
        return super().load(source).rotate(90, expand=True)


class Swapped(Images):
    def load(self, source: str) -> Image.Image:
        red, green, blue = super().load(source).split()
        return Image.merge("RGB", (blue, green, red))


class CutOff(Images):
    """Images as a decoder makes them of a file whose end is missing."""

    def load(self, source: str) -> Image.Image:
        image = super().load(source)
        image.paste((128, 128, 128), (0, image.height // 2, *image.size))
        return image


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (with_(size=SizeDict(shortest_edge=2304, longest_edge=2304)), "size"),
        (with_(resample=PILImageResampling.BILINEAR), "resample"),
        (with_(do_convert_rgb=False, image_mean=[0.5, 0.5, 0.5]), "image_mean"),
        (reading(Turned(ImageRules())), "EXIF"),
        (reading(Swapped(ImageRules())), "colour channels"),
        (reading(CutOff(ImageRules())), "cut off"),
    ],
)
def test_a_fault_on_one_side_ends_the_run_by_name(
    server: RunningServer, folder: Path, fault: Callable[[PromptEncoder], PromptEncoder], cause: str
) -> None:
    """R45. The server keeps what it is; the learner differs."""
    encoder = fault(PromptEncoder.load(str(folder / "model"), **LIMITS))
    sample = sample_of(pictures(folder)["large"])
    (rollout,) = asked(server, sample, pixels=True)
    assert rollout.pixels is not None
    prompt = encoder.encode(sample)
    assert prompt.vision is not None
    check = PromptCheck(image_processing=encoder.image_processing)
    with pytest.raises(ServerMismatchError) as raised:
        check.pixels(prompt.vision, rollout.pixels, sample_id="s7", name="http://a")
    error = raised.value
    assert "s7" in error.what
    assert cause in error.what
    processing = encoder.image_processing
    assert processing is not None
    for told, settings in ((error.found, rollout.pixels.settings), (error.wanted, processing.settings)):
        assert "grids" in told
        assert f"resample {settings['resample']}" in told
        assert f"transformers {settings['transformers']}" in told
    assert str(prompt.vision.image_grid_thw.tolist()) in error.wanted


@pytest.mark.slow
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
    vllm = {"mode": "server", "server": {"servers": [entry]}}
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
    assert "ServerMismatchError" in done.stderr
    assert "grids" in done.stderr
    assert "model.max_pixels" in done.stderr
    assert steps(folder / "run") == []
    assert events(folder / "run", "sync") == []
