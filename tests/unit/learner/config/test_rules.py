"""Rules between keys: one test per fail-fast of the documents, by requirement id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.config.load import load_config, write_resolved
from learner.config.modes import sync_mode
from learner.config.plan import resolve
from learner.config.sections.loss import preset_advice
from learner.config.sections.training import chosen_by_test, kept_metric
from shared.config.model import ConfigErrors
from tests.unit.learner.config.examples import (
    REMOVE,
    ROLLOUT,
    SERVER,
    everything,
    minimal,
    mistakes,
    only_mistake,
    stage2,
    valid,
)

VLLM = f"{ROLLOUT}.vllm"
DECODING = f"{ROLLOUT}.decoding"
COLOCATE = {f"{VLLM}.mode": "colocate", f"{VLLM}.tensor_parallel_size": 1}
HF = {f"{ROLLOUT}.rollout_backend": "hf"}
DECODE_BATCH_SIZE = f"{ROLLOUT}.decode_batch_size"
ASYNC = "stage2_ab.async_actor_learner"
STAGE2 = {"custom.trainer_variant": "stage2_ab_training", "training.effective_batch_size": 6}


def test_the_examples_are_valid() -> None:
    for example in (minimal(), stage2(), everything()):
        valid(example)


# ---- the run, its data ---------------------------------------------------------------------------------------------


def test_the_run_has_one_length() -> None:
    assert "no length" in only_mistake(minimal(), {"training.max_steps": REMOVE}).found
    assert only_mistake(minimal(), {"training.num_train_epochs": 1}).found == "both"
    valid(minimal(), {"training.max_steps": None, "training.num_train_epochs": 1})


def test_each_kind_of_bad_record_has_a_rule() -> None:
    on_bad = "data.on_bad_record"
    assert only_mistake(minimal(), {on_bad: {"no_area": "clip"}}).wanted == "error or drop"
    unknown = only_mistake(minimal(), {on_bad: {"too_lng": "drop"}})
    assert (unknown.path, unknown.remedy) == (f"{on_bad}.too_lng", "did you mean too_long?")
    assert only_mistake(minimal(), {on_bad: {"no_area": "dropp"}}).remedy == "did you mean drop?"
    kept = valid(minimal(), {on_bad: {"no_area": "drop", "outside_image": "clip"}}).data.bad_records
    assert (kept["no_area"], kept["outside_image"], kept["duplicate"]) == ("drop", "clip", "error")


def test_warmup_is_part_of_the_run() -> None:
    assert only_mistake(minimal(), {"training.warmup_steps": 11}).path == "training.warmup_steps"
    valid(minimal(), {"training.warmup_steps": 10})


@pytest.mark.parametrize("key", ["eval_on_start", "eval_on_end", "eval_steps"])
def test_evaluation_needs_data(key: str) -> None:
    asked = {f"training.{key}": 5 if key == "eval_steps" else True}
    assert only_mistake(minimal(), asked).path == f"training.{key}"
    valid(minimal(), {**asked, "data.val": "val.jsonl"})
    valid(minimal(), {**asked, "data.test": "test.jsonl"})


def test_a_prompt_is_for_annotations_without_messages() -> None:
    prompt = {"data.prompt": "<image>Look"}
    assert only_mistake(minimal(), {**prompt, "data.format": "jsonl"}).path == "data.prompt"
    valid(minimal(), {**prompt, "data.format": "coco"})
    valid(minimal(), prompt)  # found out from the files


def test_r38_keys_of_detection_are_not_for_key_value() -> None:
    wrong = {"task.type": "key_value", "task.iou_threshold": 0.3, "loss.prefix_end": "first_miss"}
    assert [m.path for m in mistakes(minimal(), wrong)] == ["task.iou_threshold", "loss.prefix_end"]
    valid(minimal(), {"task.type": "key_value", "loss.function": "my_parts:focal"})


def test_limits_of_pixels_are_in_order() -> None:
    limits = {"model.min_pixels": 65, "model.max_pixels": 64}
    assert only_mistake(minimal(), limits).path == "model.min_pixels"
    valid(minimal(), {**limits, "model.max_pixels": 65})


@pytest.mark.parametrize("pattern", ["[(", "*", "a{99999999999}"])
def test_target_modules_is_a_pattern(pattern: str) -> None:
    lora = {"model.lora": {"target_modules": pattern}}
    assert only_mistake(minimal(), lora).path == "model.lora.target_modules"
    valid(minimal(), {"model.lora": {"target_modules": [pattern]}})  # a name, not a pattern


@pytest.mark.parametrize("seed", [1 << 63, 1 << 200, -1])
def test_a_seed_fits_the_generators(seed: int) -> None:
    assert only_mistake(minimal(), {"training.seed": seed}).path == "training.seed"
    valid(minimal(), {"training.seed": (1 << 63) - 1})


# ---- packing -------------------------------------------------------------------------------------------------------


def test_d6_a_rollout_buffer_needs_drop_last() -> None:
    """R18: the run's last step may be an M-step, which leaves what is carried alone."""
    changes = {"training.packing_drop_last": False, f"{ROLLOUT}.rollout_buffer": {"enabled": True, "m_steps": 2}}
    mistake = only_mistake(minimal(), changes)
    assert mistake.path == "training.packing_drop_last"
    assert "rollout_buffer" in mistake.remedy


@pytest.mark.parametrize("changes", [{}, {"training.packing": False}, {"custom.trainer_variant": "sft"}])
def test_d6_drop_last_is_free_without_one(changes: dict[str, Any]) -> None:
    valid(minimal(), {"training.packing_drop_last": False, **changes})
    valid(stage2(), {"training.packing_drop_last": False})


def test_what_was_cut_can_stay_only_where_something_is_cut() -> None:
    kept = {"loss.keep_unmatched": True}
    assert only_mistake(minimal(), kept).path == "loss.prefix_end"
    fitting = {**kept, "loss.prefix_end": "first_miss"}
    assert only_mistake(minimal(), {**fitting, "loss.missed_order": "random"}).path == "loss.missed_order"
    valid(minimal(), fitting)


def test_d6_packing_buffer_too_small() -> None:
    changes = {"training.packing_buffer": 3, "training.per_device_train_batch_size": 4}
    mistake = only_mistake(minimal(), changes)
    assert (mistake.path, mistake.found) == ("training.packing_buffer", "3")
    assert "(4)" in mistake.wanted
    valid(minimal(), {**changes, "training.packing_buffer": 4})
    valid(minimal(), {**changes, "training.packing": False})


# ---- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [{}, COLOCATE])
def test_r29_beam_needs_hf(backend: dict[str, Any]) -> None:
    beam = {f"{DECODING}.decode_mode": "beam", f"{DECODING}.num_beams": 4}
    mistake = only_mistake(minimal(), {**beam, **backend})
    assert mistake.path == f"{DECODING}.decode_mode"
    assert "rollout_backend: hf" in mistake.remedy
    valid(minimal(), {**beam, **HF, DECODE_BATCH_SIZE: 4})


def test_d10_beams_count() -> None:
    """R21: one sample's beams fit `decode_batch_size`, or nothing can be decoded."""
    beam = {f"{DECODING}.decode_mode": "beam", f"{DECODING}.num_beams": 4, **HF}
    for changes in (beam, {**beam, DECODE_BATCH_SIZE: 3}):
        mistake = only_mistake(minimal(), changes)
        assert mistake.path == DECODE_BATCH_SIZE
        assert "num_beams" in mistake.remedy


@pytest.mark.parametrize(
    ("decoding", "path"),
    [
        ({"decode_mode": "greedy", "temperature": 0.5}, "temperature"),
        ({"decode_mode": "beam", "temperature": 0.5, "num_beams": 2}, "temperature"),
        ({"decode_mode": "sample"}, "temperature"),
        ({"decode_mode": "beam"}, "num_beams"),
        ({"num_beams": 2}, "num_beams"),
        ({"decode_mode": "sample", "temperature": 1.0, "num_beams": 2}, "num_beams"),
    ],
)
def test_d7_decode_mode_contradicts(decoding: dict[str, Any], path: str) -> None:
    assert only_mistake(minimal(), {DECODING: decoding, **HF, DECODE_BATCH_SIZE: 4}).path == f"{DECODING}.{path}"


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 20)])
def test_r29_sampling_needs_a_temperature(key: str, value: float) -> None:
    """Nothing is sampled at temperature 0: the key would have no effect."""
    mistake = only_mistake(minimal(), {f"{DECODING}.{key}": value})
    assert mistake.path == f"{DECODING}.{key}"
    assert "temperature" in mistake.remedy
    beam = {f"{DECODING}.decode_mode": "beam", f"{DECODING}.num_beams": 4, **HF, DECODE_BATCH_SIZE: 4}
    assert only_mistake(minimal(), {f"{DECODING}.{key}": value, **beam}).path == f"{DECODING}.{key}"
    valid(minimal(), {f"{DECODING}.{key}": value, f"{DECODING}.temperature": 0.7})


def test_a_rollout_leaves_room_for_its_prompt() -> None:
    longer = {"global_max_length": 512}
    assert only_mistake(minimal(), longer).path == f"{DECODING}.max_new_tokens"
    valid(minimal(), {"global_max_length": 513})
    valid(minimal(), {**longer, "custom.trainer_variant": "sft"})
    context = {**COLOCATE, f"{VLLM}.max_model_len": 512}
    assert "max_model_len" in only_mistake(minimal(), context).wanted


# ---- sync ----------------------------------------------------------------------------------------------------------

LORA = {"model.lora": {}}


def test_r08_adapter_needs_enable_lora() -> None:
    mistake = only_mistake(minimal(), {f"{VLLM}.sync.mode": "adapter", **LORA})
    assert mistake.path == f"{VLLM}.sync.mode"
    assert mistake.wanted == "enable_lora: true"
    valid(minimal(), {f"{VLLM}.sync.mode": "adapter", f"{VLLM}.enable_lora": True, **LORA})


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_r08_adapter_needs_an_adapter(mode: str) -> None:
    mistake = only_mistake(minimal(), {f"{VLLM}.sync.mode": mode, f"{VLLM}.enable_lora": True})
    assert mistake.wanted == "model.lora"


def test_r08_an_adapter_s_folder_is_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    config = valid(minimal(), {"model.path": str(tmp_path), f"{VLLM}.sync.mode": "auto", f"{VLLM}.enable_lora": True})
    assert sync_mode(config) == "adapter"


def test_r08_auto_resolves_both_ways() -> None:
    auto = {f"{VLLM}.sync.mode": "auto"}
    assert sync_mode(valid(minimal(), auto)) == "full"
    assert sync_mode(valid(minimal(), {**auto, **LORA, f"{VLLM}.enable_lora": True})) == "adapter"


def test_r08_dora_travels_merged() -> None:
    dora = {f"{VLLM}.sync.mode": "adapter", f"{VLLM}.enable_lora": True, "model.lora": {"type": "dora"}}
    assert "DoRA" in only_mistake(minimal(), {**dora, f"{VLLM}.sync.fallback_to_full": False}).found
    valid(minimal(), dora)
    valid(minimal(), {**dora, f"{VLLM}.sync.mode": "full", f"{VLLM}.sync.fallback_to_full": False})


# ---- buffer, offload -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [None, {}, {"enabled": False}, {"enabled": True, "m_steps": 4}])
def test_d2_no_rollout_buffer_under_stage2(buffer: dict[str, Any]) -> None:
    mistake = only_mistake(stage2(), {f"{ROLLOUT}.rollout_buffer": buffer})
    assert mistake.path == f"{ROLLOUT}.rollout_buffer"
    assert "staleness" in mistake.wanted
    assert ASYNC in mistake.remedy
    valid(minimal(), {f"{ROLLOUT}.rollout_buffer": buffer})


def test_r18_no_rollout_buffer_under_sft() -> None:
    sft = {"custom.trainer_variant": "sft"}
    only_mistake(minimal(), {**sft, f"{ROLLOUT}.rollout_buffer": {"enabled": True}})
    valid(minimal(), {**sft, f"{ROLLOUT}.rollout_buffer": {"enabled": False}})


def test_r20_the_documented_defaults_are_legal() -> None:
    """`enabled: true` and no more moves nothing, and may stand wherever it is."""
    offload = f"{ROLLOUT}.offload"
    valid(minimal(), {**COLOCATE, offload: {"enabled": True}})
    valid(minimal(), {**COLOCATE, offload: {"enabled": True, "offload_model": False, "offload_optimizer": False}})
    valid(minimal(), {**COLOCATE, offload: {"enabled": True, "offload_optimizer": True}})
    valid(minimal(), {**COLOCATE, offload: {"offload_model": True}})


@pytest.mark.parametrize(
    ("learning", "words", "others"),
    [
        ({}, "packed Channel-B", {f"{VLLM}.mode"}),
        ({f"{ASYNC}.enabled": True}, "the asynchronous learner", {f"{VLLM}.mode", f"{ASYNC}.enabled"}),
    ],
)
def test_r20_nothing_is_offloaded_while_it_is_trained(learning: dict[str, Any], words: str, others: set[str]) -> None:
    """The other mistake is that colocated rollouts can't overlap with learning at all (R25 R32)."""
    offload = {f"{ROLLOUT}.offload": {"enabled": True, "offload_optimizer": True}}
    found = {m.path: m for m in mistakes(stage2(), {**COLOCATE, **learning, **offload})}
    assert set(found) == {f"{ROLLOUT}.offload.enabled", *others}
    assert words in found[f"{ROLLOUT}.offload.enabled"].found
    assert "enabled: false" in found[f"{ROLLOUT}.offload.enabled"].remedy
    valid(stage2(), {**COLOCATE, **offload, "training.packing": False})
    valid(stage2(), {**learning, **offload})  # there is nothing to offload for with servers


@pytest.mark.parametrize("elsewhere", [{}, HF])
def test_r20_offload_is_ignored_elsewhere(elsewhere: dict[str, Any]) -> None:
    valid(minimal(), {**elsewhere, f"{ROLLOUT}.offload": {"enabled": True}})


# ---- stage2_ab -----------------------------------------------------------------------------------------------------


def test_r26_b_ratio_is_required() -> None:
    ways = ({"stage2_ab.schedule.b_ratio": REMOVE}, {"stage2_ab": REMOVE}, {"stage2_ab": None}, {"stage2_ab": {}})
    for changes in (*ways, {"stage2_ab": {"async_actor_learner": {}}}):
        mistake = only_mistake(stage2(), changes)
        assert (mistake.path, mistake.found) == ("stage2_ab.schedule.b_ratio", "nothing")
        assert "[0, 1]" in mistake.wanted


@pytest.mark.parametrize("ratio", [-0.01, 1.01, 2, float("nan"), float("inf"), "0.5", True, None])
def test_r26_b_ratio_is_a_share(ratio: object) -> None:
    mistake = only_mistake(stage2(), {"stage2_ab.schedule.b_ratio": ratio})
    assert (mistake.path, mistake.wanted) == ("stage2_ab.schedule.b_ratio", "a number in [0, 1]")


@pytest.mark.parametrize("ratio", [0, 1, 0.0, 1.0, 0.1])
def test_r26_b_ratio_may_be_an_end(ratio: float) -> None:
    valid(stage2(), {"stage2_ab.schedule.b_ratio": ratio})


@pytest.mark.parametrize("variant", ["sft", "rollout_matching_sft"])
def test_r26_the_section_belongs_to_its_variant(variant: str) -> None:
    assert only_mistake(stage2(), {"custom.trainer_variant": variant}).path == "stage2_ab"


def test_d8_stage2_needs_its_batch() -> None:
    mistake = only_mistake(stage2(), {"training.effective_batch_size": REMOVE})
    assert (mistake.path, mistake.found) == ("training.effective_batch_size", "nothing")
    valid(minimal(), {"training.effective_batch_size": None})


@pytest.mark.parametrize("backend", [HF, COLOCATE])
def test_r32_overlap_needs_servers(backend: dict[str, Any]) -> None:
    mistake = only_mistake(stage2(), backend)
    assert mistake.path == f"{VLLM}.mode"
    assert "vllm.mode: server" in mistake.remedy
    valid(stage2(), {**backend, "training.packing": False})
    valid(stage2(), {**backend, "stage2_ab.schedule.b_ratio": 0.0})


@pytest.mark.parametrize("backend", [HF, COLOCATE])
def test_r25_async_needs_servers(backend: dict[str, Any]) -> None:
    changes = {f"{ASYNC}.enabled": True, "training.packing": False, **backend}
    mistake = only_mistake(stage2(), changes)
    assert (mistake.path, mistake.wanted) == (f"{ASYNC}.enabled", "vllm.mode: server")


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_r25_async_needs_full_sync(mode: str) -> None:
    changes = {f"{ASYNC}.enabled": True, **LORA, f"{VLLM}.enable_lora": True, f"{VLLM}.sync.mode": mode}
    assert only_mistake(stage2(), changes).wanted == "full weight sync"
    valid(stage2(), {**changes, f"{VLLM}.sync.mode": "full"})


def test_r25_the_queue_holds_what_is_prefetched() -> None:
    changes = {f"{ASYNC}.queue_limit": 3}
    assert only_mistake(stage2(), changes).path == f"{ASYNC}.prefetch_target_packs"
    valid(stage2(), {**changes, f"{ASYNC}.prefetch_target_packs": 3})


def test_r25_packs_need_no_packed_rows() -> None:
    """A pack is a number of samples, whatever rows they are learned in."""
    valid(stage2(), {f"{ASYNC}.enabled": True, "training.packing": False, "training.per_device_train_batch_size": 2})


# ---- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "per_device", "ranks"), [(36, 2, 2), (9, 1, 1)])
def test_r27_the_queue_holds_a_whole_step(batch: int, per_device: int, ranks: int) -> None:
    """Nine packs per rank and step, in a queue of eight: Channel-B could never run."""
    changes = {"training.effective_batch_size": batch, "training.per_device_train_batch_size": per_device}
    config = valid(stage2(), {**changes, f"{ASYNC}.enabled": True}, world_size=None)
    with pytest.raises(ConfigErrors, match=rf"{ASYNC}\.queue_limit: found the default 8.*at least the 9 packs"):
        resolve(config, ranks)
    for allowed in ({f"{ASYNC}.enabled": True, f"{ASYNC}.queue_limit": 9}, {}):
        resolve(valid(stage2(), {**changes, **allowed}, world_size=None), ranks)


def test_r25_rarer_syncs_need_packs_ready_for_more_steps() -> None:
    """Two packs a step, a sync after every third step: packs of four steps."""
    batch = {"training.effective_batch_size": 8, "training.per_device_train_batch_size": 4, f"{ASYNC}.enabled": True}
    config = valid(stage2(), {**batch, f"{ASYNC}.sync_every": 3}, world_size=None)
    with pytest.raises(ConfigErrors, match=r"prefetch_target_packs: found the default 4.*at least 8 with sync_every"):
        resolve(config, 1)
    enough = {f"{ASYNC}.sync_every": 3, f"{ASYNC}.prefetch_target_packs": 8}
    resolve(valid(stage2(), {**batch, **enough}, world_size=None), 1)


@pytest.mark.parametrize("data", [minimal(), stage2()])
@pytest.mark.parametrize(
    ("batch", "per_device", "ranks", "nearest"),
    [(32, 3, 4, "24 and 36"), (7, 2, 1, "6 and 8"), (3, 1, 4, "4 and 8"), (13, 1, 12, "12 and 24")],
)
def test_r33_effective_batch_divides(
    data: dict[str, Any], batch: int, per_device: int, ranks: int, nearest: str
) -> None:
    changes = {"training.effective_batch_size": batch, "training.per_device_train_batch_size": per_device}
    mistake = only_mistake(data, changes, world_size=ranks)
    assert (mistake.path, mistake.found) == ("training.effective_batch_size", str(batch))
    assert nearest in mistake.remedy
    valid(data, changes, world_size=None)


def test_r33_explicit_accumulation_equals_the_derived() -> None:
    changes = {"training.effective_batch_size": 32, "training.gradient_accumulation_steps": 4}
    mistake = only_mistake(stage2(), changes, world_size=4)
    assert mistake.path == "training.gradient_accumulation_steps"
    assert "remove it" in mistake.remedy
    assert "8" in mistake.remedy
    valid(stage2(), {**changes, "training.gradient_accumulation_steps": 8}, world_size=4)


def test_r04_tensor_parallel_size_divides_the_ranks() -> None:
    changes = {f"{VLLM}.mode": "colocate"}
    assert valid(minimal(), changes, world_size=4).rollout_matching.vllm.tensor_parallel_size == 4
    valid(minimal(), changes, world_size=8)
    mistake = only_mistake(minimal(), changes, world_size=6)
    assert mistake.path == f"{VLLM}.tensor_parallel_size"
    assert "1 or 2 or 3 or 6" in mistake.remedy
    for nothing_is_rolled_out in ({"custom.trainer_variant": "sft"}, {**STAGE2, "stage2_ab.schedule.b_ratio": 0.0}):
        valid(minimal(), {**changes, **nothing_is_rolled_out}, world_size=6)


def test_r04_an_explicit_tensor_parallel_size_stands_or_is_refused() -> None:
    """One rank lowers the default to 1; a size that the user wrote is never lowered in silence."""
    colocated = {f"{VLLM}.mode": "colocate"}
    assert valid(minimal(), colocated, world_size=1).rollout_matching.vllm.tensor_parallel_size == 1
    for size in (2, 4):
        mistake = only_mistake(minimal(), {**colocated, f"{VLLM}.tensor_parallel_size": size}, world_size=1)
        assert (mistake.path, mistake.found) == (f"{VLLM}.tensor_parallel_size", str(size))
        assert mistake.remedy == "set it to 1"
    valid(minimal(), {f"{VLLM}.tensor_parallel_size": 4}, world_size=1)  # servers: not used


@pytest.mark.parametrize("rollouts", [COLOCATE, HF])
def test_a_sharded_model_rolls_out_on_servers(rollouts: dict[str, Any]) -> None:
    """R24: no rank has the whole model to generate by; one rank alone always has."""
    changes = {"model.sharding": "fsdp"}
    valid(minimal(), changes, world_size=2)
    mistake = only_mistake(minimal(), {**changes, **rollouts}, world_size=2)
    assert mistake.path == "model.sharding"
    assert "vllm.mode: server" in mistake.wanted
    valid(minimal(), {**changes, **rollouts}, world_size=1)
    valid(minimal(), {**changes, **rollouts, "custom.trainer_variant": "sft"}, world_size=2)
    evaluated = {"custom.trainer_variant": "sft", "training.eval_on_end": True, "data.val": "val.jsonl"}
    assert only_mistake(minimal(), {**changes, **rollouts, **evaluated}, world_size=2).path == "model.sharding"


def test_a_sharded_model_is_not_compiled() -> None:
    changes = {"model.sharding": "fsdp", "model.compile": True}
    assert only_mistake(minimal(), changes, world_size=2).path == "model.compile"
    valid(minimal(), changes, world_size=1)
    valid(minimal(), {**changes, "model.compile": "auto"}, world_size=2)


def test_what_is_the_default_is_called_so() -> None:
    """A number that the user did not write can't be found in their file."""
    assert only_mistake(minimal(), {f"{VLLM}.mode": "colocate"}, world_size=2).found == "the default 4"
    assert only_mistake(minimal(), {"global_max_length": 512}).found == "the default 512"
    assert only_mistake(minimal(), {"training.per_device_train_batch_size": 65}).found == "the default 64"
    assert only_mistake(stage2(), {f"{ASYNC}.queue_limit": 3}).found == "the default 4"
    assert only_mistake(stage2(), {ASYNC: {"queue_limit": 3, "prefetch_target_packs": 5}}).found == "5"


@pytest.mark.parametrize("task", ["key_value", "my_parts:Task"])
def test_r37_rollouts_are_compared_by_a_reward(task: str) -> None:
    grpo = {"custom.trainer_variant": "grpo", "training.per_device_train_batch_size": 8}
    changes = {**grpo, f"{DECODING}.temperature": 1.0}
    assert only_mistake(minimal(), {**changes, "task.type": task}).path == "reward.functions"
    valid(minimal(), {**changes, "task.type": task, "reward.functions": ["my_parts:found"]})
    weighted = {**changes, "reward.weights": {"right": 1.0}}
    valid(minimal(), {**weighted, "task.type": "my_parts:Task"})  # its own reward
    assert only_mistake(minimal(), {**weighted, "task.type": "key_value"}).path == "reward.functions"


def test_r37_a_weight_of_a_reward_that_does_not_exist_is_refused() -> None:
    """Such a run trained nothing, without a word."""
    mistake = only_mistake(minimal(), {**GRPO, "reward.weights": {"f1_mious": 1.0, "f1": 1.0}})
    assert (mistake.path, mistake.remedy) == ("reward.weights.f1_mious", "did you mean f1_miou?")
    own = {**GRPO, "reward.functions": ["my_parts:found"]}
    assert "found?" in only_mistake(minimal(), {**own, "reward.weights": {"fond": 1.0}}).remedy
    valid(minimal(), {**own, "reward.weights": {"found": 2.0, "soft_iou": 1.0}})
    pairs = {**own, "task.type": "key_value", "reward.weights": {"f1": 1.0}}
    assert only_mistake(minimal(), pairs).path == "reward.weights.f1"
    assert (
        only_mistake(minimal(), {"task.type": "key_value", "reward.weights": {"f1": 1.0}}).path == "reward.weights.f1"
    )


# ---- the best checkpoint (D17) -------------------------------------------------------------------------------------


def test_d17_the_best_is_kept_where_val_is_set_and_evaluations_run() -> None:
    evaluated = {"data.val": "val.jsonl", "training.eval_steps": 5}
    assert kept_metric(valid(minimal(), evaluated)) == "f1@0.5"
    assert kept_metric(valid(minimal(), {**evaluated, "task.type": "key_value"})) == "f1"
    assert kept_metric(valid(minimal(), {**evaluated, "labels.complete": {}})) == "fm@0.5"
    assert kept_metric(valid(minimal(), {**evaluated, "loss.preset": "recommended"})) == "fm@0.5"
    assert kept_metric(valid(minimal(), {**evaluated, "training.keep_best": None})) is None
    assert kept_metric(valid(minimal(), {"data.val": "val.jsonl", "training.eval_on_end": True})) is None
    assert kept_metric(valid(minimal(), {"data.test": "test.jsonl", "training.eval_steps": 5})) is None


def test_d17_early_stopping_needs_evaluations_and_a_metric() -> None:
    patience = "training.early_stop_patience"
    assert only_mistake(minimal(), {patience: 2, "data.val": "v.jsonl"}).path == patience
    assert only_mistake(minimal(), {patience: 2, "data.test": "t.jsonl", "training.eval_steps": 5}).path == patience
    assert only_mistake(minimal(), {"training.keep_best": "f1@0.5"}).path == "training.keep_best"
    valid(minimal(), {patience: 2, "data.val": "v.jsonl", "training.eval_steps": 5})


def test_d17_it_says_what_the_test_annotations_choose() -> None:
    """Their scores were reported as those of held-out annotations, without a word."""
    by_test = {"data.test": "t.jsonl", "training.eval_steps": 5, "training.keep_best": "f1@0.5"}
    kept = chosen_by_test(valid(minimal(), by_test))
    assert kept is not None
    assert ("training.keep_best" in kept, "early_stop" in kept, "data.val" in kept) == (True, False, True)
    both = chosen_by_test(valid(minimal(), {**by_test, "training.early_stop_patience": 2}))
    assert both is not None
    assert ("training.keep_best" in both, "training.early_stop_patience" in both) == (True, True)
    assert chosen_by_test(valid(minimal(), {**by_test, "data.val": "v.jsonl"})) is None
    assert chosen_by_test(valid(minimal(), {**by_test, "training.keep_best": "auto"})) is None  # nothing is chosen
    assert chosen_by_test(valid(minimal())) is None


# ---- loss.preset (D18) ----------------------------------------------------------------------------------------------

RECOMMENDED = {"loss.preset": "recommended"}


def test_d18_the_default_loss_is_the_specified_one() -> None:
    assert valid(minimal()).loss == valid(minimal(), {"loss.preset": "specified"}).loss
    assert (valid(minimal()).loss.prefix_end, valid(minimal()).loss.keep_unmatched) == ("last_object", False)


def test_d18_keys_of_ones_own_win_over_the_preset() -> None:
    loss = valid(minimal(), RECOMMENDED).loss
    assert (loss.prefix_end, loss.matched_desc_weight, loss.keep_unmatched) == ("first_miss", 1.0, True)
    own = valid(minimal(), {**RECOMMENDED, "loss.keep_unmatched": False, "loss.matched_desc_weight": 0.5}).loss
    assert (own.prefix_end, own.matched_desc_weight, own.keep_unmatched) == ("first_miss", 0.5, False)
    assert only_mistake(minimal(), {**RECOMMENDED, "loss.missed_order": "random"}).path == "loss.missed_order"
    assert only_mistake(minimal(), {**RECOMMENDED, "task.type": "key_value"}).path == "loss.preset"


def test_d18_a_run_with_a_preset_can_be_repeated_from_what_it_wrote(tmp_path: Path) -> None:
    config = valid(minimal(), {**RECOMMENDED, "loss.keep_unmatched": False})
    assert load_config(write_resolved(config, tmp_path), world_size=1, env={}) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "loss.preset: recommended"),
        (RECOMMENDED, "loss.preset: specified"),
        ({"loss.prefix_end": "last_match"}, None),
        ({**RECOMMENDED, "loss.keep_unmatched": False}, None),
        ({"custom.trainer_variant": "sft"}, None),
        ({"task.type": "key_value"}, None),
    ],
)
def test_d18_it_says_when_to_take_the_other_preset(changes: dict[str, Any], says: str | None) -> None:
    advice = preset_advice(valid(minimal(), changes))
    assert (advice is None) if says is None else (advice is not None and says in advice and "\n" not in advice)


# ---- grpo ----------------------------------------------------------------------------------------------------------

SAMPLED = {f"{DECODING}.temperature": 1.0, f"{DECODING}.decode_mode": "sample"}
GRPO = {"custom.trainer_variant": "grpo", "training.per_device_train_batch_size": 8, **SAMPLED}
GRPO_STAGE2 = {**GRPO, "stage2_ab.schedule.b_ratio": 0.5, "training.effective_batch_size": 64}


def test_r37_credit_by_object_needs_objects() -> None:
    pairs = {**GRPO, "task.type": "key_value", "reward.functions": ["my_parts:found"]}
    valid(minimal(), pairs)
    assert only_mistake(minimal(), {**pairs, "grpo.credit": "object"}).path == "grpo.credit"


def test_r37_grpo_needs_no_section_of_its_own() -> None:
    valid(minimal(), GRPO)
    valid(minimal(), {**GRPO, f"{DECODING}.decode_mode": None})  # temperature 1 samples
    valid(minimal(), {**GRPO, "grpo": {}, f"{ROLLOUT}.rollout_buffer": {"enabled": True, "m_steps": 2}})


@pytest.mark.parametrize("changes", [GRPO, GRPO_STAGE2])
def test_r37_a_grpo_run_can_be_repeated_from_what_it_wrote(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = valid(minimal(), changes)
    assert load_config(write_resolved(config, tmp_path), world_size=1, env={}) == config


@pytest.mark.parametrize("variant", ["rollout_matching_sft", "sft", "stage2_ab_training"])
def test_r37_the_section_belongs_to_its_variant(variant: str) -> None:
    data = stage2() if variant == "stage2_ab_training" else minimal()
    assert only_mistake(data, {"custom.trainer_variant": variant, "grpo.kl_weight": 0.1}).path == "grpo"


def test_r37_grpo_has_its_own_loss() -> None:
    mistake = only_mistake(minimal(), {**GRPO, "loss.function": "my_parts:focal"})
    assert mistake.path == "loss.function"
    assert "reward.functions" in mistake.remedy


@pytest.mark.parametrize(("batch", "size", "fitting"), [(6, 4, 8), (3, 8, 8), (65, 8, 72)])
def test_r37_batches_hold_whole_groups(batch: int, size: int, fitting: int) -> None:
    changes = {**GRPO, "grpo.num_generations": size, "training.packing": False}
    mistake = only_mistake(minimal(), {**changes, "training.per_device_train_batch_size": batch})
    assert mistake.path == "training.per_device_train_batch_size"
    assert str(fitting) in mistake.remedy
    valid(minimal(), {**changes, "training.per_device_train_batch_size": fitting})


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", 0.7), ("top_p", 0.9), ("repetition_penalty", 1.1), ("top_k", 20)]
)
def test_r37_rollouts_are_drawn_by_the_probabilities_that_are_learned(key: str, value: float) -> None:
    path = f"{DECODING}.{key}"
    assert only_mistake(minimal(), {**GRPO, path: value}).path == path
    valid(minimal(), {**SAMPLED, path: value})


def test_r37_greedy_rollouts_are_all_the_same() -> None:
    """The default decoding is greedy, and each wrong key is reported once."""
    default = {key: value for key, value in GRPO.items() if key not in SAMPLED}
    mistake = only_mistake(minimal(), default)
    assert (mistake.path, mistake.remedy) == (f"{DECODING}.temperature", "set it to 1")
    greedy = {**default, f"{DECODING}.decode_mode": "greedy"}
    assert only_mistake(minimal(), greedy).path == f"{DECODING}.temperature"
    beam = {f"{DECODING}.decode_mode": "beam", f"{DECODING}.num_beams": 2, **HF, DECODE_BATCH_SIZE: 8}
    assert only_mistake(minimal(), {**default, **beam}).path == f"{DECODING}.temperature"


def test_r37_the_reference_is_the_model_without_its_adapter(tmp_path: Path) -> None:
    weighted = {**GRPO, "grpo.kl_weight": 0.01}
    mistake = only_mistake(minimal(), weighted)
    assert (mistake.path, mistake.found) == ("grpo.kl_weight", "0.01 without an adapter")
    valid(minimal(), {**weighted, **LORA})
    (tmp_path / "adapter_config.json").write_text("{}")
    valid(minimal(), {**weighted, "model.path": str(tmp_path)})
    sharded = {**weighted, **LORA, "model.sharding": "fsdp"}
    assert "grpo.kl_weight" in {m.path for m in mistakes(minimal(), sharded, world_size=2)}


def test_r37_grpo_may_be_a_channel_of_stage2() -> None:
    valid(minimal(), GRPO_STAGE2)
    valid(minimal(), {**GRPO_STAGE2, f"{ASYNC}.enabled": True, f"{ASYNC}.queue_limit": 8})
    missing = {key: value for key, value in GRPO_STAGE2.items() if key != "training.effective_batch_size"}
    assert only_mistake(minimal(), missing).path == "training.effective_batch_size"


def test_d21_advantage_batch_knows_the_whole_step_first() -> None:
    batch = {"grpo.advantage": "batch"}
    valid(minimal(), {**GRPO, **batch})
    valid(minimal(), {**GRPO_STAGE2, **batch, **COLOCATE})  # nothing overlaps, so no servers are needed
    ahead = {**GRPO_STAGE2, **batch, f"{ASYNC}.enabled": True, f"{ASYNC}.queue_limit": 8}
    assert only_mistake(minimal(), ahead).path == f"{ASYNC}.enabled"


def test_r37_stage2_with_grpo_has_the_rules_of_stage2() -> None:
    buffer = {f"{ROLLOUT}.rollout_buffer": {"enabled": True, "m_steps": 2}}
    assert only_mistake(minimal(), {**GRPO_STAGE2, **buffer}).path == f"{ROLLOUT}.rollout_buffer"
    for backend in (COLOCATE, HF):
        assert only_mistake(minimal(), {**GRPO_STAGE2, **backend}).path == f"{ROLLOUT}.vllm.mode"
        valid(minimal(), {**GRPO_STAGE2, **backend, "training.packing": False})
        valid(minimal(), {**GRPO, **backend})  # nothing overlaps without the section


# ---- together ------------------------------------------------------------------------------------------------------


def test_all_mistakes_at_once() -> None:
    """Rules, ranks, types, unknown and retired keys in one go; none is told twice."""
    changes = {
        "training.effective_batch_size": 9,
        "training.warmup_steps": 99,
        "training.max_step": 3,
        "model.dtype": "fp32",
        f"{DECODING}.top_p": 0,
        f"{ROLLOUT}.top_k": 5,
        f"{ROLLOUT}.rollout_buffer": {},
        f"{SERVER}.servers": [],
        "stage2_ab.schedule.b_ratio": 1.5,
    }
    assert {m.path for m in mistakes(stage2(), changes, world_size=2)} == {
        "training.effective_batch_size",
        "training.max_step",  # max_steps was probably meant: the warm-up is not judged by it
        "model.dtype",
        f"{DECODING}.top_p",
        f"{ROLLOUT}.top_k",
        f"{ROLLOUT}.rollout_buffer",
        f"{SERVER}.servers",
        "stage2_ab.schedule.b_ratio",
    }
