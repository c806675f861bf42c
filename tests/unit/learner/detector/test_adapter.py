"""A checkpoint with an adapter is a detector too: it has no config.json, and its weights are merged first (R43)."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from learner.config.inference import INFERENCE_NAME, InferenceSettings, prompt_messages
from learner.config.sections.model import LoraConfig
from learner.config.sections.task import TaskConfig
from learner.data.prompt import PromptEncoder
from learner.detector import Detector
from learner.policy.parallel import Ranks
from learner.run.checkpoint import CheckpointStore, TrainerState
from tests.unit.learner.run.test_checkpoint import start


@pytest.fixture
def checkpoint(tiny_vlm: Path, tmp_path: Path) -> Path:
    policy, optimizer = start(tiny_vlm, LoraConfig(r=4, alpha=8))
    folder = CheckpointStore(root=tmp_path, ranks=Ranks()).save(policy, optimizer, TrainerState(global_step=1))
    settings = InferenceSettings(task=TaskConfig(), messages=prompt_messages("Detect every digit."), max_new_tokens=4)
    (folder / INFERENCE_NAME).write_text(settings.to_json())
    return folder


def test_an_adapter_is_asked_as_its_base_is(checkpoint: Path, tiny_vlm: Path) -> None:
    own, base = PromptEncoder.load(str(checkpoint)), PromptEncoder.load(str(tiny_vlm))
    assert own.processor is not None
    assert type(own.processor) is type(base.processor)
    assert own.tokenizer.get_vocab() == base.tokenizer.get_vocab()


def test_an_adapter_finds_objects(checkpoint: Path) -> None:
    with Detector(checkpoint, backend="hf") as detector:
        (prediction,) = detector.predict(Image.new("RGB", (64, 64)))
    assert (prediction.width, prediction.height) == (64, 64)
