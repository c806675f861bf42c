"""Tests of how long a sample will be, found out without its pixels (R36)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.schema import RunConfig
from learner.config.sections.task import TaskConfig
from learner.data.lengths import RowLimit, carry_overflow, fewest_tokens
from learner.data.prompt import PromptEncoder
from learner.data.sampler import DistributedSampler
from learner.records import DetectionObject, Segment
from learner.steps.packing import CarriedRows
from learner.tasks.detection.target import ground_truth_target
from learner.tasks.detection.task import DetectionTask
from learner.wiring.steps import check_packing_buffer, load_data
from shared.errors import ConfigError, DataError
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


# ---- whether the packing buffer must overflow (D6) -----------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    ranks=st.integers(1, 3),
    samples_per_rank=st.integers(1, 5),
    row_tokens=st.integers(20, 40),
    micro_steps=st.integers(1, 60),
    most_carried=st.integers(1, 8),
)
def test_what_must_overflow_does(
    lengths: list[int], ranks: int, samples_per_rank: int, row_tokens: int, micro_steps: int, most_carried: int
) -> None:
    """Where it is said, some rank's real buffer overflows by then, though every segment is as short as it can be."""
    settings = {"num_ranks": ranks, "samples_per_rank": samples_per_rank, "seed": 1}
    samplers = [DistributedSampler(len(lengths), rank=rank, **settings) for rank in range(ranks)]
    limits = {"row_tokens": row_tokens, "micro_steps": micro_steps, "most_carried": most_carried}
    overflow = carry_overflow(lengths, samplers[0], **limits)
    if overflow is None:
        return
    assert overflow.carried > most_carried
    buffers = [CarriedRows(row_tokens, max_segments=most_carried) for _ in samplers]

    def learn() -> None:
        for position in range(overflow.micro_steps):
            for sampler, buffer in zip(samplers, buffers, strict=True):
                buffer.rows([segment_of(lengths[i]) for i in sampler.share(position).indices])

    with pytest.raises(ConfigError, match="packing_buffer"):
        learn()


def segment_of(length: int) -> Segment:
    ids = np.zeros(length, dtype=np.int64)
    weights = ids.astype(np.float32)
    return Segment(sample_id="s", input_ids=ids, labels=ids, loss_weights=weights, prompt_length=1)


def test_a_buffer_that_must_overflow_is_refused_before_the_first_step(tiny_text: Path) -> None:
    """D6: eight samples a micro-step, of which a row holds one; with rows that hold them all the run may begin."""
    encoder = PromptEncoder.load(str(tiny_text))
    samples = [replace(sample(text="Hello"), sample_id=str(i)) for i in range(100)]
    config, plan = make_run(samples_per_rank=8)
    custom = config.custom.model_copy(update={"trainer_variant": "rollout_matching_sft"})

    def check(length: int, steps: int) -> None:
        values = {**config.model_dump(), "custom": custom.model_dump(), "global_max_length": length}
        changed = RunConfig.model_validate(values)
        check_packing_buffer(samples, encoder, changed, plan, steps)

    tokens = fewest_tokens(samples[0], encoder)
    with pytest.raises(ConfigError, match=r"packing_buffer must overflow.*per_device_train_batch_size"):
        check(tokens, 100)
    check(tokens, 2)
    check(8 * tokens, 100)
