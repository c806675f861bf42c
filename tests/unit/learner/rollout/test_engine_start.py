"""Tests of what a colocated engine need not do at its start. That it starts so: tests/integration/test_colocate.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from learner.rollout.engine_start import sharing_tokenizers
from learner.tiny import build_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> str:
    build_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_starting_engine_reads_its_tokenizer_once(folder: str, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "other")
    with sharing_tokenizers(folder):
        first = AutoTokenizer.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(Path(folder), trust_remote_code=False) is first
        passed_on = AutoTokenizer.from_pretrained(tmp_path / "other")
        assert passed_on is not AutoTokenizer.from_pretrained(tmp_path / "other")
        # A processor gets the tokenizer that it is given, so none is read for it.
        assert AutoTokenizer.from_pretrained(folder, tokenizer=passed_on) is passed_on
    assert first.encode("every digit") == AutoTokenizer.from_pretrained(folder).encode("every digit")


def test_nobody_else_gets_the_engine_s_tokenizer(folder: str) -> None:
    """Not another thread meanwhile, and nobody afterwards, also after an error."""
    method, found = AutoTokenizer.__dict__["from_pretrained"], []

    def fail() -> None:
        with sharing_tokenizers(folder), ThreadPoolExecutor(1) as other:
            found.append(AutoTokenizer.from_pretrained(folder))
            found.append(other.submit(AutoTokenizer.from_pretrained, folder).result())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert AutoTokenizer.__dict__["from_pretrained"] is method
    assert len({id(tokenizer) for tokenizer in [*found, AutoTokenizer.from_pretrained(folder)]}) == 3
