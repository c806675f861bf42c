"""The order of the modules: every name is a module's, and modules that keep vLLM in their process come last."""

from __future__ import annotations

from tests.order import BESIDE_VLLM, LONGEST, TESTS, VLLM_IN_PROCESS, place


def test_every_named_module_exists_and_is_named_once() -> None:
    names = [*LONGEST, BESIDE_VLLM, *VLLM_IN_PROCESS]
    assert [name for name in names if not (TESTS / name).is_file()] == []
    assert len(set(names)) == len(names)


def test_long_modules_come_first_and_those_with_vllm_last() -> None:
    found = sorted(TESTS.rglob("test_*.py"), key=place)
    names = [path.relative_to(TESTS).as_posix() for path in found]
    assert tuple(names[: len(LONGEST)]) == LONGEST
    assert tuple(names[-len(VLLM_IN_PROCESS) - 1 :]) == (BESIDE_VLLM, *VLLM_IN_PROCESS)


def test_modules_with_an_engine_in_their_process_are_named() -> None:
    """`bench.engines` starts one."""
    users = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if "from bench.engines import" in path.read_text() and path.parent.name == "integration"
    }
    assert users == set(VLLM_IN_PROCESS)
