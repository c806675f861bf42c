"""Single keys: defaults as the documents give them, types and ranges, unknown keys, dump and load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from learner.config.load import RESOLVED_NAME, load_config, write_resolved
from learner.config.schema import RunConfig
from shared.config.model import ConfigErrors, dotted, item_of, section_of, walk_keys
from shared.config.parse import dump_yaml, load_yaml, parse, write_yaml
from tests.examples import examples
from tests.unit.learner.config.examples import (
    REMOVE,
    ROLLOUT,
    SERVER,
    changed,
    everything,
    minimal,
    mistakes,
    only_mistake,
    stage2,
    valid,
)
from tests.unit.shared.config.strategies import refused, sections, texts

VLLM = f"{ROLLOUT}.vllm"


def test_defaults_as_the_documents_give_them() -> None:
    """R02 R04 R05 R08 R18 R20 R21 D3 D7."""
    bare = {key: value for key, value in minimal().items() if key != "custom"}
    config = valid({**bare, "custom": {"trainer_variant": "rollout_matching_sft"}}, world_size=4)
    rollout = config.rollout_matching
    assert (rollout.rollout_backend, rollout.vllm.mode, rollout.decode_batch_size) == ("vllm", "colocate", 1)
    assert (rollout.vllm.gpu_memory_utilization, rollout.vllm.tensor_parallel_size) == (0.45, 4)
    assert (rollout.vllm.server.timeout_s, rollout.vllm.server.infer_timeout_s) == (240.0, None)
    assert (rollout.vllm.sync.mode, rollout.vllm.sync.fallback_to_full, rollout.vllm.enable_lora) == (
        "full",
        True,
        False,
    )
    assert rollout.offload.model_dump() == {"enabled": False, "offload_model": False, "offload_optimizer": False}
    assert (rollout.decoding.temperature, rollout.decoding.decode_mode) == (0.0, None)
    buffer = valid(minimal(), {f"{ROLLOUT}.rollout_buffer": {}}).rollout_matching.rollout_buffer
    assert buffer is not None
    assert buffer.model_dump() == {"enabled": False, "m_steps": 1}
    section = valid(stage2()).stage2_ab
    assert section is not None
    assert section.async_actor_learner.model_dump() == {
        "enabled": False,
        "version_window": 1,
        "max_update_lag": 4,  # D12
        "max_starved_steps": 20,  # D16
        "sync_every": 1,
        "queue_limit": 8,
        "prefetch_target_packs": 4,
    }


@pytest.mark.parametrize("path", ["model.path", "data.train", "training.output_dir", "custom.trainer_variant"])
def test_r01_required_keys(path: str) -> None:
    """The key to write is named, whether it or its whole section is missing."""
    section, _ = path.split(".")
    for missing in (path, section):
        mistake = only_mistake(minimal(), {missing: REMOVE})
        assert (mistake.path, mistake.found, mistake.remedy) == (path, "nothing", "add this key")


@pytest.mark.parametrize("variant", ["sft", "rollout_matching_sft"])
def test_r01_variants(variant: str) -> None:
    assert valid(minimal(), {"custom.trainer_variant": variant}).custom.trainer_variant == variant
    mistake = only_mistake(minimal(), {"custom.trainer_variant": variant + "s"})
    assert mistake.remedy == f"did you mean {variant}?"


REFUSED = list(refused(RunConfig))


def requirements() -> dict[str, str]:
    """Return the requirement of every key, as the schema has it: failing tests are named by it."""
    extras = {dotted(keys): field.json_schema_extra for keys, field in walk_keys(RunConfig)}
    return {path: str(one.get("requirement", "")) for path, one in extras.items() if isinstance(one, dict)}


OF_KEYS = requirements()
PATHS = list(dict.fromkeys(path for path, _ in REFUSED))


@pytest.mark.parametrize("path", PATHS, ids=[f"{OF_KEYS.get(path, '').replace(' ', '_')}-{path}" for path in PATHS])
def test_types_and_ranges(path: str) -> None:
    """Every key refuses other types (a boolean given as a string, an integer as a float), NaN, and what is just out of
    its range, with its own path and in words: temperatures and probabilities (R29), sizes (R21), shares (R26) ..."""
    data = changed(minimal(), {f"{ROLLOUT}.rollout_buffer": {}}) if "rollout_buffer" in path else everything()
    for value in (value for key, value in REFUSED if key == path):
        (mistake,) = mistakes(data, {path: value})
        assert mistake.path == path, value
        assert mistake.wanted not in ("a value", "")
        assert mistake.remedy


def test_the_ranges_that_the_documents_give_are_among_them() -> None:
    """Otherwise the test above would say nothing of a bound that the schema forgot."""
    decoding, vllm = f"{ROLLOUT}.decoding", f"{ROLLOUT}.vllm"
    for path, value in (
        (f"{ROLLOUT}.decode_batch_size", 0),  # R21
        (f"{ROLLOUT}.rollout_buffer.m_steps", 0),  # R18
        (f"{decoding}.top_p", 0.0),  # R29
        (f"{decoding}.top_k", -2),
        (f"{decoding}.max_new_tokens", 0),
        (f"{decoding}.repetition_penalty", 0.0),
        (f"{vllm}.tensor_parallel_size", 0),  # R04
        (f"{vllm}.gpu_memory_utilization", 0.0),
        (f"{vllm}.server.timeout_s", 0.0),  # R05
        ("stage2_ab.async_actor_learner.version_window", -1),  # R25
        ("stage2_ab.async_actor_learner.max_update_lag", 0),  # D12
        ("stage2_ab.async_actor_learner.max_starved_steps", 0),  # D16
        ("stage2_ab.async_actor_learner.queue_limit", 0),
        ("stage2_ab.async_actor_learner.prefetch_target_packs", 0),
        ("training.packing_buffer", 0),  # D6
        ("training.packing_min_fill_ratio", 0.0),
        ("training.effective_batch_size", 0),  # D8
        ("training.gradient_accumulation_steps", 0),
        ("global_max_length", 7),  # R36
    ):
        assert (path, value) in REFUSED
    assert {path for path, value in REFUSED if value == math.nextafter(1.0, 2.0)} >= {
        "stage2_ab.schedule.b_ratio",  # R26
        f"{decoding}.top_p",
        f"{vllm}.gpu_memory_utilization",
        "training.packing_min_fill_ratio",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{ROLLOUT}.rollout_buffer", True),
        (f"{VLLM}.server.infer_timeout_s", "none"),
        ("model.lora", {"dropout": 1.0}),
        ("model.freeze", "visual"),
        ("model.freeze", ["visual", 3]),
        ("training.max_steps", 1e3),
        ("training.learning_rate", 10**400),
    ],
)
def test_other_shapes(path: str, value: object) -> None:
    (mistake,) = mistakes(minimal(), {path: value})
    assert mistake.path.startswith(path)


def test_sections_are_frozen() -> None:
    config = valid(minimal())
    with pytest.raises(ValidationError):
        config.training.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.global_max_length = 3  # type: ignore[misc]


# ---- unknown keys --------------------------------------------------------------------------------------------------

SECTIONS = [(), *(path for path, field in walk_keys(RunConfig) if section_of(field.annotation)), ("servers",)]


@pytest.mark.parametrize("section", SECTIONS, ids=dotted)
@given(name=st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "base"))
@settings(deadline=None, max_examples=4)
def test_any_unknown_key_anywhere_is_refused_with_its_path(section: tuple[str | int, ...], name: str) -> None:
    data = everything()
    if section == ("servers",):
        section = (*SERVER.split("."), "servers", 0)
    if section[-1:] == ("rollout_buffer",):
        data = changed(minimal(), {f"{ROLLOUT}.rollout_buffer": {}})
    at: Any = data
    known: Any = RunConfig
    for part in section:
        at = at[part]
        known = item_of(known) if isinstance(part, int) else section_of(known).model_fields[part].annotation
    if name in section_of(known).model_fields:
        return
    at[name] = 1
    paths = [mistake.path for mistake in mistakes(data)]
    assert paths == [dotted((*section, name))]


# ---- dump and load -------------------------------------------------------------------------------------------------


@given(data=sections(RunConfig))
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(100))
def test_any_configuration_of_the_schema_survives_dump_and_load(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "c.yaml"
    write_yaml(path, data)
    config = parse(RunConfig, load_yaml(path, {}))
    path.write_text(dump_yaml(config.model_dump(mode="json")), encoding="utf-8")
    again = parse(RunConfig, load_yaml(path, {}))
    assert again == config
    assert again.model_dump() == config.model_dump()


@given(
    data=st.sampled_from(
        [minimal(), stage2(), everything(), changed(minimal(), {f"{VLLM}.mode": "colocate", f"{VLLM}.server": {}})]
    ),
    rest=st.fixed_dictionaries(
        {},
        optional={
            "training.learning_rate": st.floats(1e-12, 1.0),
            "training.seed": st.integers(0, 2**63 - 1),
            "data.train": texts,
            "model.path": texts,
            "model.freeze": st.lists(texts, max_size=3),
            "training.max_steps": st.integers(5, 10**9),
            f"{SERVER}.infer_timeout_s": st.none() | st.floats(-5, 5) | st.integers(-5, 5),
            f"{ROLLOUT}.decoding": st.fixed_dictionaries(
                {"temperature": st.floats(0, 5, exclude_min=True), "top_p": st.floats(0.1, 1)}
            ),
        },
    ),
)
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(100))
def test_a_run_can_be_repeated_from_what_it_wrote(tmp_path: Path, data: dict[str, Any], rest: dict[str, Any]) -> None:
    config = valid(data, rest)
    path = write_resolved(config, tmp_path / "run")
    assert path.name == RESOLVED_NAME
    assert load_config(path, world_size=1, env={}) == config
    assert write_resolved(load_config(path), tmp_path / "again").read_bytes() == path.read_bytes()
    assert [p.name for p in (tmp_path / "run").iterdir()] == [RESOLVED_NAME]


def test_the_resolved_file_names_every_key(tmp_path: Path) -> None:
    """Composition, variables and defaults are gone; the paired server form has become a list."""
    paired = {"base_url": ["http://a:1", "http://b:1"], "group_port": 5}
    (tmp_path / "base.yaml").write_text(dump_yaml(changed(minimal(), {SERVER: paired})))
    (tmp_path / "run.yaml").write_text("base: base.yaml\ndata: {train: '${DATA}/t.jsonl'}\n")
    config = load_config(tmp_path / "run.yaml", env={"DATA": "/d"})
    found = load_yaml(write_resolved(config, tmp_path / "out"), {})
    assert found["data"]["train"] == "/d/t.jsonl"
    servers = [{"base_url": "http://a:1", "group_port": 5}, {"base_url": "http://b:1", "group_port": 6}]
    assert found["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"] == servers
    assert list(found["training"]) == list(type(config.training).model_fields)


def test_loading_names_the_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(changed(minimal(), {"training.max_steps": "ten"})))
    with pytest.raises(ConfigErrors, match=r"training\.max_steps: found the string 'ten' \(.*run\.yaml:7\)"):
        load_config(path)
