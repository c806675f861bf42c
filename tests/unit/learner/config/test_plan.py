"""Every derived number by its name (R05, R08, R19, R26, R31, R33, D8)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.plan import Plan, resolve
from shared.config.model import ConfigErrors
from tests.examples import examples
from tests.unit.learner.config.examples import ROLLOUT, SERVER, changed, minimal, stage2, valid

VLLM = f"{ROLLOUT}.vllm"


def plan_of(data: dict[str, Any], changes: dict[str, Any] | None = None, world_size: int = 1) -> Plan:
    return resolve(valid(data, changes, world_size=None), world_size)


def test_d8_without_a_batch_one_micro_step() -> None:
    plan = plan_of(minimal(), {"training.per_device_train_batch_size": 3}, world_size=2)
    assert (plan.gradient_accumulation_steps, plan.effective_batch_size) == (1, 6)


def test_d8_the_batch_follows_from_accumulation() -> None:
    changes = {"training.per_device_train_batch_size": 3, "training.gradient_accumulation_steps": 4}
    assert plan_of(minimal(), changes, world_size=2).effective_batch_size == 24


@given(per_device=st.integers(1, 50), ranks=st.integers(1, 64), gas=st.integers(1, 200))
@settings(deadline=None, max_examples=examples(100))
def test_r33_r31_derived_numbers_multiply_out(per_device: int, ranks: int, gas: int) -> None:
    batch = {"training.effective_batch_size": per_device * ranks * gas}
    plan = plan_of(stage2(), {**batch, "training.per_device_train_batch_size": per_device}, world_size=ranks)
    assert plan.gradient_accumulation_steps == gas
    assert plan.rollouts_per_step == plan.effective_batch_size == per_device * ranks * gas
    assert plan.local_rollouts_per_step == (per_device * gas,) * ranks


def test_r31_the_document_s_example() -> None:
    changes = {"training.effective_batch_size": 32, "global_max_length": 12000}
    plan = plan_of(stage2(), changes, world_size=4)
    assert (plan.gradient_accumulation_steps, plan.rollouts_per_step, plan.packing_length) == (8, 32, 12000)
    assert plan.local_rollouts_per_step == (8, 8, 8, 8)


def test_r33_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigErrors, match="effective_batch_size: found 8"):
        plan_of(stage2(), world_size=3)


def test_r05_timeouts_and_servers() -> None:
    plan = plan_of(minimal(), {f"{SERVER}.timeout_s": 5, f"{SERVER}.infer_timeout_s": -1})
    assert (plan.timeout_s, plan.infer_timeout_s) == (5.0, None)
    assert [(entry.base_url, entry.group_port) for entry in plan.servers] == [("http://h:8000", 9000)]
    assert plan_of(minimal(), {f"{SERVER}.infer_timeout_s": 0}).infer_timeout_s is None
    assert plan_of(minimal(), {f"{SERVER}.infer_timeout_s": 2}).infer_timeout_s == 2
    assert plan_of(minimal(), {f"{VLLM}.mode": "colocate"}).servers == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("vllm", "server", "full", None)),
        ({f"{VLLM}.mode": "colocate"}, ("vllm", "colocate", "full", 4)),
        ({f"{ROLLOUT}.rollout_backend": "hf"}, ("hf", None, None, None)),
        ({f"{VLLM}.sync.mode": "auto"}, ("vllm", "server", "full", None)),
        (
            {f"{VLLM}.sync.mode": "auto", f"{VLLM}.enable_lora": True, "model.lora": {}},
            ("vllm", "server", "adapter", None),
        ),
    ],
)
def test_r02_r04_r08_backend_and_sync(changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    plan = plan_of(minimal(), changes, world_size=4)
    assert (plan.rollout_backend, plan.vllm_mode, plan.sync_mode, plan.tensor_parallel_size) == expected


def test_r04_one_device_is_one_engine() -> None:
    assert plan_of(minimal(), {f"{VLLM}.mode": "colocate"}).tensor_parallel_size == 1


def test_r26_the_first_channels() -> None:
    """They follow the rule, written out: B iff floor((s + 1) b) > floor(s b)."""
    for tenths in range(11):
        plan = plan_of(stage2(), {"stage2_ab.schedule.b_ratio": tenths / 10})
        assert plan.channels == tuple("B" if (s + 1) * tenths // 10 > s * tenths // 10 else "A" for s in range(10))
    assert set(plan_of(minimal()).channels) == {"B"}
    assert set(plan_of(minimal(), {"custom.trainer_variant": "sft"}).channels) == {"A"}


def test_r19_packed_rows_are_a_diagnostic() -> None:
    changes = {"training.per_device_train_batch_size": 5, "training.gradient_accumulation_steps": 3}
    plan = plan_of(minimal(), changes, world_size=2)
    assert (plan.packed_rows_per_step, plan.effective_batch_size) == (6, 30)
    assert plan_of(minimal(), {**changes, "training.packing": False}).packed_rows_per_step is None


@pytest.mark.parametrize(
    ("buffer", "m_steps"),
    [(None, 1), ({}, 1), ({"m_steps": 4}, 1), ({"enabled": True}, 1), ({"enabled": True, "m_steps": 4}, 4)],
)
def test_r18_rollouts_are_used_again_where_the_buffer_is_on(buffer: dict[str, Any] | None, m_steps: int) -> None:
    assert plan_of(minimal(), {f"{ROLLOUT}.rollout_buffer": buffer}).m_steps == m_steps


def test_r32_overlap() -> None:
    assert plan_of(stage2()).overlap
    assert not plan_of(stage2(), {"training.packing": False}).overlap
    assert not plan_of(minimal()).overlap


def test_sft_has_no_rollouts() -> None:
    plan = plan_of(minimal(), {"custom.trainer_variant": "sft"}, world_size=3)
    assert (plan.rollouts_per_step, plan.local_rollouts_per_step) == (0, (0, 0, 0))


@pytest.mark.parametrize(
    ("decoding", "mode"),
    [({}, "greedy"), ({"temperature": 0.5}, "sample"), ({"temperature": 0.5, "decode_mode": "sample"}, "sample")],
)
def test_r29_temperature_above_zero_samples(decoding: dict[str, Any], mode: str) -> None:
    assert plan_of(minimal(), {f"{ROLLOUT}.decoding": decoding}).decode_mode == mode


def test_a_plan_is_json() -> None:
    plan = plan_of(changed(stage2(), {}), world_size=2)
    values = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert set(values) == set(Plan.__slots__)
    assert values["servers"] == [{"base_url": "http://h:8000", "group_port": 9000}]
