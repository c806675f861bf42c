"""The file and the figures of `bench.fp8`, without an engine. tests/integration/test_bench_fp8.py runs it on CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.fp8 import KEYS, KINDS, WARM_UP, Fp8Results, check_scenes, figures
from learner.config.sections.vllm import VllmConfig
from shared.errors import DataError
from shared.quantization import keys_in_fp8


def scored(scenes: int, f1: float = 0.5) -> dict[str, Any]:
    return {"scenes": scenes, "metrics": {"f1@0.5": f1}}


def rounds(number: int, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "sync": [{"seconds": seconds, "canary_gap": 0.01}] * number,
        "rollouts": [{"seconds": seconds, "engine": seconds, "tokens": 100}] * number,
    }


def results(folder: Path) -> Fp8Results:
    return Fp8Results(path=folder / "fp8.json", what={"size": "tiny"})


@pytest.mark.parametrize(("none", "fp8"), [(0, 0), (0, 10), (10, 0), (10, 8)])
def test_a_part_without_its_scenes_meets_nothing(none: int, fp8: int) -> None:
    with pytest.raises(DataError) as caught:
        figures({"f1 none": scored(none), "f1 fp8": scored(fp8)})
    assert "scenes" in caught.value.found
    assert "--scenes" in caught.value.remedy


def test_equal_scenes_are_compared() -> None:
    parts = {"f1 none": scored(10, 0.5), "f1 fp8": scored(10, 0.4), "f1 fp8-cache": scored(10, 0.503)}
    found = {figure.name: figure for figure in figures(parts)}
    assert found["F1@0.5, fp8 against none"].value == pytest.approx(0.1)
    assert found["F1@0.5, fp8 against none"].good is False
    assert found["F1@0.5, fp8-cache against none"].good is True
    with pytest.raises(DataError, match="f1 fp8-cache"):
        figures(parts | {"f1 fp8-cache": scored(9)})


@pytest.mark.parametrize(("found", "wanted"), [(0, 0), (0, 8), (7, 8)])
def test_too_few_scenes_are_an_error(found: int, wanted: int) -> None:
    check_scenes("f1 none", 8, wanted=8)
    with pytest.raises(DataError, match="f1 none"):
        check_scenes("f1 none", found, wanted=wanted)


def test_what_has_not_ended_is_measured_again(tmp_path: Path) -> None:
    """A round counts as soon as it is put, also for an object that was made before."""
    mine, other = results(tmp_path), results(tmp_path)
    assert mine.lacks_speed("none", 6)
    assert mine.lacks_f1("none", 8)
    other.put("speed none", rounds(5))
    assert mine.lacks_speed("none", 6)
    other.put("speed none", rounds(6))
    other.put("f1 none", scored(8))
    assert not mine.lacks_speed("none", 6)
    assert not mine.lacks_f1("none", 8)
    assert mine.lacks_f1("none", 9)
    assert mine.lacks_speed("fp8", 6)
    mine.conclude(figures(mine.parts))
    stored = json.loads((tmp_path / "fp8.json").read_text())
    assert stored["parts"].keys() == {"speed none", "f1 none"}
    assert {figure["name"] for figure in stored["figures"]} >= {"tokens/s, none", "sync, none"}


WHAT = {"size": "4B", "whole_model": False, "share": 0.3, "rounds": 8, "scenes": 1000, "data": "bccd"}


@pytest.mark.parametrize(
    ("name", "value", "agrees"),
    [
        ("rounds", 8, True),
        ("rounds", 9, True),
        ("rounds", 7, False),
        ("size", "8B", False),
        ("whole_model", True, False),
        ("share", 0.4, False),
        ("scenes", 1001, False),
        ("data", "others", False),
    ],
)
def test_a_call_with_other_options_than_its_file_is_refused(
    tmp_path: Path, name: str, value: object, agrees: bool
) -> None:
    """One side would be compared with another one's measurements. The file stays as it is."""
    out = tmp_path / "fp8.json"
    Fp8Results(path=out, what=WHAT).check()
    Fp8Results(path=out, what=WHAT).put("f1 none", scored(8))
    before = out.read_bytes()
    later = Fp8Results(path=out, what={**WHAT, name: value})
    if agrees:
        later.check()
    else:
        with pytest.raises(DataError) as refused:
            later.check()
        assert (refused.value.found, refused.value.wanted) == (f"{name} {WHAT[name]}", f"{name} {value}")
        assert "--out" in refused.value.remedy
    assert out.read_bytes() == before


def test_rounds_of_the_warm_up_alone_have_no_figures() -> None:
    assert figures({"speed none": rounds(WARM_UP)}) == []


def test_kinds_in_fp8_are_compared_with_the_one_without() -> None:
    """Each that has rounds, and only if that one has some too."""
    parts = {"speed fp8": rounds(WARM_UP + 2, 0.5), "speed fp8-cache": rounds(WARM_UP + 1, 0.25)}
    assert not [figure for figure in figures(parts) if "/ none" in figure.name]
    found = {figure.name: figure for figure in figures(parts | {"speed none": rounds(WARM_UP + 1)})}
    assert found["tokens/s, fp8 / none"].value == pytest.approx(2.0)
    assert found["tokens/s, fp8-cache / none"].value == pytest.approx(4.0)
    assert found["sync, fp8-cache / none"].value == pytest.approx(0.25)


def test_each_kind_is_a_configuration() -> None:
    assert KEYS.keys() == set(KINDS)
    for kind, keys in KEYS.items():
        vllm = VllmConfig.model_validate(keys)
        assert [name == "kv_cache_dtype" for name in keys_in_fp8(vllm)] == {"none": [], "fp8": [False]}.get(
            kind, [False, True]
        )
