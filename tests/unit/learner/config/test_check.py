"""`--check` and `--check --probe` as a user meets them (R16, R23): stdout, stderr, exit code, imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.__main__ import main
from learner.doctor.check import run_check
from learner.run.lock import locked
from learner.run.output_dir import JOB, JOB_VARIABLE
from shared.config.parse import dump_yaml
from shared.wire import ErrorBody
from tests.examples import examples
from tests.unit.learner.config.examples import ROLLOUT, SERVER, changed, everything, minimal, stage2
from tests.unit.learner.rollout.fakes import status

HEAVY = ("torch", "vllm", "transformers", "numpy", "scipy", "httpx", "peft")
LIGHT = {
    "learner", "shared", "yaml", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection",
    "annotated_types", "cython_runtime",
}  # fmt: skip
# Scripts may read these from the plan, by these names.
PROMISED = {
    "gradient_accumulation_steps", "effective_batch_size", "rollouts_per_step", "local_rollouts_per_step",
    "decode_batch_size", "servers", "sync_mode", "rollout_backend", "vllm_mode", "packing_length", "timeout_s",
    "infer_timeout_s", "channels",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.fixture
def wire() -> Iterator[respx.MockRouter]:
    with respx.mock(assert_all_called=False) as router:
        yield router


def write(file: Path, data: dict[str, Any], changes: dict[str, Any] | None = None) -> str:
    file.write_text(dump_yaml(changed(data, changes or {})))
    return str(file)


def test_a_good_file_prints_one_object(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(write(file, stage2()), world_size=2) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert err == ""
    assert set(plan) >= PROMISED
    assert (plan["world_size"], plan["gradient_accumulation_steps"]) == (2, 4)
    assert "chunk" not in plan


def test_d17_choosing_by_the_test_annotations_is_a_warning(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_test = {"data.test": "t.jsonl", "training.eval_steps": 5, "training.keep_best": "f1@0.5"}
    assert run_check(write(file, minimal(), by_test)) == 0
    assert any("data.test" in line for line in json.loads(capsys.readouterr().out)["advice"])
    assert run_check(write(file, minimal(), {**by_test, "data.val": "v.jsonl"})) == 0
    assert not any("data.test" in line for line in json.loads(capsys.readouterr().out).get("advice", ()))


def test_mistakes_are_lines_on_stderr(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        file, stage2(), {"training.effective_batch_size": 9, "training.sed": 1, "stage2_ab.schedule.b_ratio": 2}
    )
    assert run_check(path, world_size=2) == 2
    out, err = capsys.readouterr()
    assert out == ""
    paths = [line.split(": ")[0] for line in err.splitlines()]
    assert sorted(paths) == ["stage2_ab.schedule.b_ratio", "training.effective_batch_size", "training.sed"]
    assert all(line.count("; ") >= 2 and f"({path}:" in line for line in err.splitlines())


def test_a_line_has_its_key_once(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "taken"
    (run / "checkpoint-1").mkdir(parents=True)
    key = "training.output_dir"
    assert run_check(write(file, minimal(), {key: str(run)})) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{key}: found ")
    assert line.count(f"{key}:") == 1
    resumed = {key: str(tmp_path / "new"), "training.resume_from_checkpoint": "latest"}
    assert run_check(write(file, minimal(), resumed)) == 2
    assert capsys.readouterr().err.startswith("training.resume_from_checkpoint: found ")


@pytest.mark.parametrize("path", ["/nonexistent/model", "./nomodel", "../nomodel", "~/model", "runs/x/checkpoint-9"])
def test_a_model_that_is_not_there_is_a_mistake(file: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(write(file, minimal(), {"model.path": path})) == 2
    line = capsys.readouterr().err
    assert line.startswith("model.path: found ")
    assert path in line
    assert line.count("model.path:") == 1


@pytest.mark.parametrize("world_size", [0, -3])
def test_a_world_has_ranks(file: Path, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(write(file, minimal()), world_size=world_size) == 2
    assert capsys.readouterr().err.startswith("--world-size: ")


@given(text=st.binary(max_size=80) | st.text(max_size=60).map(str.encode))
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(100))
def test_no_file_gives_a_traceback(file: Path, text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(text)
    assert run_check(str(file)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip()
    assert "Traceback" not in err


@given(
    cut=st.integers(0, 4000),
    put=st.sampled_from(["", "\t", ":", "[", "- ", "\x00", "&a ", "*a", "!!x ", '"']),
    drop=st.integers(0, 9),
)
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=examples(200))
def test_a_damaged_file_is_a_plan_or_mistakes(
    file: Path, cut: int, put: str, drop: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = dump_yaml(everything())
    cut %= len(text)
    file.write_bytes((text[:cut] + put + text[cut + drop :]).encode())
    code = run_check(str(file))
    out, err = capsys.readouterr()
    assert (code, bool(out), bool(err)) in ((0, True, False), (2, False, True))


@pytest.mark.parametrize("option", [["--probe"], ["--world-size", "2"]])
def test_options_of_check_are_refused_without_it(
    file: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--config", write(file, stage2()), *option])
    assert (code, "go with --check" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize("flag", [["--learning-rate", "1"], ["--training.seed", "3"], ["--b-ratio=0.5"]])
def test_r01_r18_yaml_only(file: Path, flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No hyperparameter has a flag."""
    code = main(["--config", write(file, stage2()), "--check", *flag])
    assert (code, capsys.readouterr().out) == (2, "")


# ---- as a process --------------------------------------------------------------------------------------------------


def test_check_imports_nothing_heavy(file: Path) -> None:
    """The configuration's part of it; annotations are in `tests/unit/learner/data/test_check.py`."""
    code = (
        "import sys; from learner.doctor.check import run_check; code = run_check(sys.argv[1], world_size=2);"
        f"print(code, sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, write(file, stage2())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["world_size"] == 2


def test_200_keys_are_checked_with_few_packages(file: Path) -> None:
    """Outside the standard library a check loads what reads YAML and validates it, and nothing else."""
    servers = [{"base_url": f"http://host{i}:8000", "group_port": 9000} for i in range(60)]
    text = dump_yaml(changed(everything(), {f"{SERVER}.servers": servers}))
    assert text.count(":") > 200
    file.write_text(text)
    code = (
        "import sys; before = set(sys.modules); from learner.doctor.check import run_check; run_check(sys.argv[1]);"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names;"
        "print(*sorted(tops), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert [server["base_url"] for server in json.loads(done.stdout)["servers"]] == [s["base_url"] for s in servers]
    assert {name for name in done.stderr.split() if not name.startswith("_")} <= LIGHT


def test_the_work_of_a_check_grows_with_its_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many servers take about twice as many calls of Python functions."""

    def num_calls(num_servers: int) -> int:
        servers = [{"base_url": f"http://host{i}:8000", "group_port": 9000} for i in range(num_servers)]
        path, calls = write(file, everything(), {f"{SERVER}.servers": servers}), 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        profiler = sys.getprofile()
        sys.setprofile(count)
        try:
            assert run_check(path) == 0
        finally:
            sys.setprofile(profiler)
        capsys.readouterr()
        return calls

    num_calls(1)  # loads and caches what is needed once
    few, many, most = num_calls(1), num_calls(101), num_calls(201)
    assert most - many < 1.1 * (many - few)


# ---- probe ---------------------------------------------------------------------------------------------------------

TWO = {
    SERVER: {"servers": [{"base_url": "http://a:1", "group_port": 5}, {"base_url": "http://b:1/x", "group_port": 5}]},
    f"{ROLLOUT}.decode_batch_size": 4,
}


def ready(wire: respx.MockRouter, base_url: str, world_size: object) -> None:
    wire.get(f"{base_url}/ready/").respond(200, json={})
    wire.get(f"{base_url}/status/").respond(200, json=status(world_size=world_size))


def test_r23_probe_adds_world_sizes_and_chunk(
    file: Path, wire: respx.MockRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    ready(wire, "http://a:1", 2)
    ready(wire, "http://b:1/x", 1)
    env = {"ROLLOUT_SERVER_TOKEN": "secret"}
    assert run_check(write(file, minimal(), TWO), world_size=5, probe=True, env=env) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["server_world_sizes"], plan["chunk"]) == ([2, 1], 2)  # floor(4 * 3 / 5)
    assert {call.request.headers["Authorization"] for call in wire.calls} == {"Bearer secret"}


def test_r23_cap_infeasible(file: Path, wire: respx.MockRouter, capsys: pytest.CaptureFixture[str]) -> None:
    """002's example: decode_batch_size 1, two devices, four ranks."""
    ready(wire, "http://a:1", 1)
    ready(wire, "http://b:1/x", 1)
    path = write(file, minimal(), {**TWO, f"{ROLLOUT}.decode_batch_size": 1})
    assert run_check(path, world_size=4, probe=True) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{ROLLOUT}.decode_batch_size: found ")
    assert "raise decode_batch_size" in err
    assert run_check(path, world_size=2, probe=True) == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.ConnectError("refused"), "does not answer"),
        (httpx.ReadTimeout("late"), "did not answer in time"),
        (
            httpx.Response(503, json=ErrorBody(error="ServerPoisonedError", what="weights unknown").model_dump()),
            "unknown",
        ),
        (httpx.Response(401), "HTTP 401"),
        (httpx.Response(404, text="<html>"), "HTTP 404"),
    ],
)
def test_r16_each_server_that_is_not_ready_is_told(
    file: Path, wire: respx.MockRouter, capsys: pytest.CaptureFixture[str], answer: Any, words: str
) -> None:
    for base_url in ("http://a:1", "http://b:1/x"):
        wire.get(f"{base_url}/status/").respond(200, json=status())
        wire.get(f"{base_url}/ready/").mock(
            **{"side_effect" if isinstance(answer, Exception) else "return_value": answer}
        )
    assert run_check(write(file, minimal(), TWO), probe=True) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{SERVER}.servers[{i}].base_url" for i in range(2)]
    assert all(words in line and "rollout_backend: hf" in line for line in lines)


@pytest.mark.parametrize("world_size", [0, "many", None, []])
def test_r16_a_nonsense_world_size(
    file: Path, wire: respx.MockRouter, capsys: pytest.CaptureFixture[str], world_size: object
) -> None:
    ready(wire, "http://h:8000", world_size)
    assert run_check(write(file, minimal()), probe=True) == 2
    assert f"{SERVER}.servers[0].base_url" in capsys.readouterr().err


def test_without_servers_there_is_nothing_to_probe(
    file: Path, wire: respx.MockRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_check(write(file, minimal(), {f"{ROLLOUT}.rollout_backend": "hf"}), probe=True) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["server_world_sizes"], plan["chunk"], len(wire.calls)) == ([], None, 0)


def test_a_family_that_does_not_work_is_a_mistake(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be a KeyError in the first step otherwise."""
    (tmp_path / "llava").mkdir()
    (tmp_path / "llava" / "config.json").write_text('{"model_type": "llava"}')
    assert run_check(write(file, minimal(), {"model.path": str(tmp_path / "llava")})) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("model.path: ")
    assert "llava" in line
    assert "docs/models.md" in line


def test_a_folder_with_another_run_is_a_mistake(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoint-5").mkdir(parents=True)
    path = write(file, minimal(), {"training.output_dir": str(run_dir)})
    assert run_check(path) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("training.output_dir: ")
    assert run_check(write(file, minimal(), {"training.output_dir": str(run_dir), "training.overwrite": True})) == 0


def test_a_folder_of_a_run_that_goes_on(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run holds it; or it is of the same job, whose next start goes on there."""
    run_dir = tmp_path / "run"
    path = write(file, minimal(), {"training.output_dir": str(run_dir), "training.overwrite": True})
    with locked(run_dir):
        assert run_check(path) == 2
    assert f"process {os.getpid()}" in capsys.readouterr().err
    assert run_check(path) == 0
    (run_dir / "checkpoint-5").mkdir()
    (run_dir / JOB).write_text("job 17")
    path = write(file, minimal(), {"training.output_dir": str(run_dir)})
    assert [run_check(path, env={JOB_VARIABLE: job}) for job in ("17", "18")] == [0, 2]


MODEL = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}


@pytest.mark.parametrize(("new", "code"), [(511, 0), (512, 2)])
def test_an_answer_that_leaves_no_room_for_a_prompt(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], new: int, code: int
) -> None:
    """`check` said `ready`, and the run ended once its model was loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({**MODEL, "text_config": {"max_position_embeddings": 512}}))
    decoding = {f"{ROLLOUT}.rollout_backend": "hf", f"{ROLLOUT}.decoding.max_new_tokens": new}
    assert run_check(write(file, minimal(), {**decoding, "model.path": str(tmp_path / "model")})) == code
    said = capsys.readouterr().err
    key = f"{ROLLOUT}.decoding.max_new_tokens"
    assert (key in said, "max_position_embeddings" in said) == (code == 2, code == 2)


def test_a_model_that_was_trained_with_other_settings(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers nothing right then, and its first evaluation has zeros, without a word why."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    trained = {
        "task": {"container": "index_map", "coordinates": "tokens"},
        "messages": [{"role": "user", "content": "<image>Find it."}],
        "max_pixels": 100_000,
    }
    (tmp_path / "model/inference.json").write_text(json.dumps(trained))
    same = {"model.path": str(tmp_path / "model"), "data.prompt": "Find it.", "model.max_pixels": 100_000}
    same |= {"task": trained["task"]}
    other = {
        "data.prompt": "Where?",
        "model.max_pixels": 200_000,
        "task": {"container": "array", "coordinates": "digits"},
    }
    for changes, named in (
        (same, []),
        (same | other, ["data.prompt", "model.max_pixels", "task.container", "task.coordinates"]),
    ):
        assert run_check(write(file, minimal(), changes)) == 0
        said = [one for one in json.loads(capsys.readouterr().out).get("advice", []) if "was trained with" in one]
        assert [key in one for one in said for key in named] == [True] * len(named)
        assert len(said) == bool(named)
