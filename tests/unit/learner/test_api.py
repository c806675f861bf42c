"""Detection as a library (R38): its names, its records, and the notebook that shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from bench.tiny import build_tokenizer
from learner import api
from learner.api import LossConfig, load_task, pack, rollout_of, sample_of, segment_of
from shared.errors import ConfigError, DataError, LossError

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "notebooks" / "library.ipynb"
CHECKPOINT = ROOT / "deploy" / "demo" / "checkpoint"
LOADS = """
import sys
from learner.api import load_task
load_task(sys.argv[1])
print(*sorted({"torch", "transformers", "vllm", "httpx"} & set(sys.modules)))
"""


def test_every_name_is_there_and_documented() -> None:
    for name in api.__all__:
        assert getattr(api, name).__doc__, name


def test_it_loads_neither_torch_nor_transformers() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LOADS, str(CHECKPOINT)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def test_a_folder_and_a_tokenizer_of_transformers_give_the_same() -> None:
    ours, theirs = load_task(CHECKPOINT), load_task(build_tokenizer())
    sample = sample_of([("seven", (1, 2, 30, 40)), ("two ü", (50, 60, 90, 80, 70, 99))], width=100, height=100)
    text = ours.serialize(sample.objects, after=None).text
    targets = [task.ground_truth(sample, LossConfig()).token_ids.tolist() for task in (ours, theirs)]
    assert targets[0] == targets[1]
    assert ours.tokenizer.decode(targets[0][:-1]) == text
    assert ours.evaluate([ours.match(ours.parse(rollout_of(sample, text, ours)))])["f1@miou"] == 1.0


def test_what_does_not_fit_is_told() -> None:
    task = load_task(CHECKPOINT)
    sample = sample_of([("seven", (1, 2, 30, 40))], width=100, height=100)
    target = task.ground_truth(sample, LossConfig())
    with pytest.raises(LossError):
        segment_of([], target)
    with pytest.raises(DataError):
        pack([segment_of([1, 2], target)], row_tokens=4)


@pytest.mark.parametrize(
    "coords",
    [
        (30, 2, 1, 40),  # corners reversed
        (1, 40, 30, 2),
        (1, 2, 30, 101),  # outside
        (-1, 2, 30, 40),
        (float("nan"), 2, 30, 40),
        (1, 2, 1, 40),  # no area
        (1, 2, 30, 40, 5),  # half a point
        (1, 2, 30),
        (5, 5, 5, 9, 5, 7),
    ],
)
def test_boxes_that_are_none_are_refused(coords: tuple[float, ...]) -> None:
    with pytest.raises(DataError) as caught:
        sample_of([("seven", coords)], width=100, height=100)
    assert "seven" in caught.value.found


def test_pixels_come_back_from_bins() -> None:
    pixels = (1, 2, 30, 40, 99.5, 0)
    assert api.to_pixels(api.to_bins(pixels, 200, 50), 200, 50) == pytest.approx(pixels, abs=0.11)
    with pytest.raises(ConfigError, match="tokenizer") as caught:
        load_task("no/such/folder")
    assert "no/such/folder" in caught.value.found


@pytest.mark.slow
def test_the_notebook_runs_and_its_outputs_are_real() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    shown = [_text(cell) for cell in book.cells]
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert [_text(cell) for cell in book.cells] == shown


def _text(cell: nbformat.NotebookNode) -> str:
    """Return what the cell printed, as one text, because a busy kernel sends it in several pieces. Progress bars of
    libraries go to stderr, and differ from run to run."""
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")
