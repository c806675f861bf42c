"""How long a sample will be, found out without its pixels (R36)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.build import load_data
from learner.config.schema import RunConfig, TaskConfig
from learner.data.lengths import RowLimit
from learner.data.prompt import PromptEncoder
from learner.records import DetectionObject
from learner.target.target import ground_truth_target
from learner.tasks.detection.task import DetectionTask
from shared.errors import DataError
from tests.unit.learner.data.fakes import draw, make_run
from tests.unit.learner.policy.rows import image, sample

SIZES = [(128, 128), (64, 96), (300, 20), (9, 8)]


@pytest.mark.parametrize("limits", [{}, {"max_pixels": 64 * 64}, {"min_pixels": 100 * 100}])
@pytest.mark.parametrize("model", ["tiny_vlm", "tiny_qwen2_5_vl"])
def test_prompts_are_counted_as_they_are_encoded(
    model: str, limits: dict[str, int], request: pytest.FixtureRequest
) -> None:
    encoder = PromptEncoder.load(str(request.getfixturevalue(model)), **limits)
    for width, height in SIZES:
        one = replace(sample([image(width, height)]), width=width, height=height)
        assert encoder.num_tokens(one) == len(encoder.encode(one).token_ids)
    several = sample([image(*size) for size in SIZES])
    assert encoder.num_tokens(several) == len(encoder.encode(several).token_ids)
    assert encoder.num_tokens(sample()) == len(encoder.encode(sample()).token_ids)


def test_prompts_of_text_models_are_counted(tiny_text: Path) -> None:
    encoder = PromptEncoder.load(str(tiny_text))
    assert encoder.num_tokens(sample(text="Hello")) == len(encoder.encode(sample(text="Hello")).token_ids)


@pytest.mark.parametrize("coordinates", ["tokens", "digits"])
@pytest.mark.parametrize("desc", ["cat", "\u00e9\u00e8\u732b" * 9, '"\\\n\x01' * 9])
def test_a_sample_fits_to_the_token(tiny_vlm: Path, coordinates: Any, desc: str) -> None:
    encoder = PromptEncoder.load(str(tiny_vlm))
    task = DetectionTask(TaskConfig(coordinates=coordinates), encoder.tokenizer)
    objects = tuple(DetectionObject(desc=desc, kind="bbox_2d", bins=(i, i, 900, 999)) for i in range(20))
    for number in (0, 1, 20):
        one = replace(sample([image(128, 128)]), objects=objects[:number])
        length = encoder.num_tokens(one) + len(ground_truth_target(one, task, encoder.tokenizer).token_ids)
        assert RowLimit(encoder=encoder, task=task, max_tokens=length)(one) is None
        told = RowLimit(encoder=encoder, task=task, max_tokens=length - 1)(one)
        assert told is not None
        assert f"{length} tokens" in told
        assert f"{number} objects" in told


def test_a_run_is_refused_before_its_first_step_or_leaves_out_what_is_too_long(tiny_vlm: Path, tmp_path: Path) -> None:
    """R41: told by line; dropped, it is an event of the run. Evaluation samples are never packed."""
    draw(tmp_path, "1.png", size=(128, 128))
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["1.png"], "width": 128, "height": 128}
    many = [{"desc": "cat", "bbox_2d": [i, i, 99, 99]} for i in range(20)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({**row, "objects": objects}) + "\n" for objects in (many[:1], many)))
    config, _ = make_run(train=str(file), val=str(file), on_bad_record="drop")
    encoder = PromptEncoder.load(str(tiny_vlm))
    task = DetectionTask(config.task, encoder.tokenizer)
    short = config.model_copy(
        update={"global_max_length": 256, "training": config.training.model_copy(update={"eval_on_end": True})}
    )
    data = load_data(short, task, encoder)
    assert [s.sample_id for s in data.train] == ["1"]
    assert [s.sample_id for s in data.evaluation] == ["1", "2"]
    assert data.bad_records == {"train": {"too_long": {"drop": 1}}}
    strict = short.model_copy(update={"data": config.data.model_copy(update={"on_bad_record": "error"})})
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: too long.*20 objects.*global_max_length"):
        load_data(strict, task, encoder)


def test_a_rollout_with_all_objects_appended_is_counted_where_rollouts_are_learned(tiny_vlm: Path) -> None:
    """The worst case of a step: nothing of the longest answer was right, and it is kept whole."""
    encoder = PromptEncoder.load(str(tiny_vlm))
    task = DetectionTask(TaskConfig(), encoder.tokenizer)
    objects = tuple(DetectionObject(desc="cat", kind="bbox_2d", bins=(i, i, 900, 999)) for i in range(3))
    one = replace(sample([image(128, 128)]), objects=objects)
    length = encoder.num_tokens(one) + len(ground_truth_target(one, task, encoder.tokenizer).token_ids) + 100
    assert RowLimit(encoder=encoder, task=task, max_tokens=length, max_new_tokens=100)(one) is None
    told = RowLimit(encoder=encoder, task=task, max_tokens=length - 1, max_new_tokens=100)(one)
    assert told is not None
    assert f"{length} tokens" in told
    assert "max_new_tokens" in told


def test_only_runs_that_learn_rollouts_count_them(tiny_vlm: Path, tmp_path: Path) -> None:
    draw(tmp_path, "1.png", size=(128, 128))
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["1.png"], "width": 128, "height": 128}
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({**row, "objects": [{"desc": "cat", "bbox_2d": [1, 1, 99, 99]}]}) + "\n")
    config, _ = make_run(train=str(file))
    encoder = PromptEncoder.load(str(tiny_vlm))
    task = DetectionTask(config.task, encoder.tokenizer)

    def run(variant: str) -> RunConfig:
        custom = config.custom.model_copy(update={"trainer_variant": variant})
        return config.model_copy(update={"custom": custom, "global_max_length": 513})

    assert len(load_data(run("sft"), task, encoder).train) == 1
    with pytest.raises(DataError, match="max_new_tokens"):
        load_data(run("rollout_matching_sft"), task, encoder)
