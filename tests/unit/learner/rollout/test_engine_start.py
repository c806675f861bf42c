"""Tests of what a colocated engine need not do at its start. That it starts so: tests/integration/test_colocate.py."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.tiny import build_tokenizer
from learner.rollout.engine_start import learner_set_aside, sharing_tokenizers


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


class Node:
    """An object that only a collection frees: it holds itself."""

    def __init__(self) -> None:
        self.me = self


def is_walked(node: Node) -> bool:
    return any(one is node for one in gc.get_objects())


def test_vllm_s_collections_do_not_walk_what_the_learner_made() -> None:
    """Garbage is not set aside, but freed first. All comes back, also after an error."""
    lives, garbage = Node(), weakref.ref(Node())

    def fail() -> None:
        with learner_set_aside():
            assert garbage() is None
            assert not is_walked(lives)
            assert is_walked(Node()), "what vLLM makes is walked"
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert is_walked(lives)
    assert gc.get_freeze_count() == 0
