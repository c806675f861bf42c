"""Detection as a library (R38): its names, its records, and the notebook that shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

import learner.tasks.detection as library
from deploy.demo.model import build_tokenizer
from learner.tasks.detection import LossConfig, load_task, pack, rollout_of, sample_of, segment_of
from shared.errors import ConfigError, DataError, LossError

ROOT = Path(__file__).parents[5]
NOTEBOOK = ROOT / "docs" / "notebooks" / "library.ipynb"
CHECKPOINT = ROOT / "deploy" / "demo" / "checkpoint"
LOADS = """
import sys
from learner.tasks.detection import load_task
load_task(sys.argv[1])
print(*sorted({"torch", "transformers", "vllm", "httpx"} & set(sys.modules)))
"""


def test_every_name_is_there_and_documented() -> None:
    for name in library.__all__:
        assert getattr(library, name).__doc__, name
    assert set(dir(library)) == set(library.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = library.nothing


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
    with pytest.raises(DataError):
        task.validate(sample_of([("seven", (30, 2, 1, 40))], width=100, height=100))
    with pytest.raises(ConfigError, match="tokenizer") as caught:
        load_task("no/such/folder")
    assert "no/such/folder" in caught.value.found


def test_the_notebook_runs_and_its_outputs_are_real() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    shown = [_texts(cell) for cell in book.cells]
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert [_texts(cell) for cell in book.cells] == shown


def _texts(cell: nbformat.NotebookNode) -> list[str]:
    return [output.text for output in cell.get("outputs", []) if output.output_type == "stream"]
