"""`rollout-learner predict` by real vLLM: in its own process, and from a server that runs already (R43).

The shipped checkpoint answers four scenes. Whichever engine decodes them, the boxes and their scores are the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bench import forked
from deploy.demo import build_data
from learner.__main__ import main
from tests.servers import RunningServer, running_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]
CHECKPOINT = Path(__file__).parents[2] / "deploy" / "demo" / "checkpoint"
TIMEOUT_S = 300.0
SCENES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    build_data.build(build_data.Build(train=0, val=0, test=SCENES), folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[dict[str, Any]]:
    """Return what transformers' `generate` finds."""
    assert main(arguments(folder, "hf", "--backend", "hf")) == 0
    return found_in(folder / "hf")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """It may read no file: photographs come as bytes."""
    config = {"model": str(CHECKPOINT), "max_model_len": 1024, "allowed_image_roots": []}
    with running_server(config, folder) as running:
        yield running


def arguments(folder: Path, out: str, *more: str) -> list[str]:
    return ["predict", "--model", str(CHECKPOINT), "--out", str(folder / out), str(folder / "images" / "test"), *more]


def found_in(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "predictions.json").read_text())
    assert len(list((out / "pictures").iterdir())) == SCENES
    return rows


def assert_same(found: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """The same boxes but for a token that was nearly equal to another, with the same scores."""
    wanted = {(row["file_name"], row["category"], *row["bbox"]): row["score"] for row in reference}
    shared = {
        key: row["score"] for row in found if (key := (row["file_name"], row["category"], *row["bbox"])) in wanted
    }
    assert len(shared) >= 0.8 * max(len(found), len(wanted)) > 5
    assert shared == pytest.approx({key: wanted[key] for key in shared}, abs=0.05)


def test_in_this_process(folder: Path, reference: list[dict[str, Any]]) -> None:
    """This is the default."""
    (done,) = forked.finish(
        forked.COLOCATED, "learner", arguments(folder, "vllm"), envs=[{**os.environ}], timeout_s=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert_same(found_in(folder / "vllm"), reference)


def test_by_a_server(folder: Path, server: RunningServer, reference: list[dict[str, Any]]) -> None:
    assert main(arguments(folder, "server", "--server", server.base_url)) == 0
    assert_same(found_in(folder / "server"), reference)


def test_drawn_answers_of_a_server_are_the_same_again(folder: Path, server: RunningServer) -> None:
    """Seeds follow from the photograph's place, so an interrupted command goes on with what it would have drawn."""
    for out in ("first", "second"):
        assert main(arguments(folder, out, "--server", server.base_url, "--samples", "2")) == 0
    first, second = (
        json.loads((folder / out / "predictions.jsonl").read_text().splitlines()[0]) for out in ("first", "second")
    )
    assert {votes for *_, votes in first["boxes"]} <= {0, 1, 2}
    assert first["boxes"] == second["boxes"]


def test_a_server_with_other_weights_is_refused(
    folder: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its boxes would get the scores of another model."""
    other = folder / "other"
    shutil.copytree(CHECKPOINT, other)
    file = other / "model.safetensors"
    save_file({name: weight * 1.01 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    call = ["predict", "--model", str(other), "--out", str(folder / "refused"), str(folder / "images" / "test")]
    assert main([*call, "--server", server.base_url]) == 2
    told = capsys.readouterr().err
    assert server.base_url in told
    assert "other weights" in told
