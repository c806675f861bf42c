"""Photographs in flight: what is sent, whose CPU time is counted, and the ratios."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from bench.in_flight import Thread, Turn, _figures, _text, draw, thread_seconds
from bench.models import grown_tokenizer, photograph_config


def test_photographs_are_of_a_megapixel_and_none_comes_twice(tmp_path: Path) -> None:
    files = [*draw(tmp_path, 2, seed=0), *draw(tmp_path, 2, seed=1)]
    assert len({file.read_bytes() for file in files}) == 4
    assert {Image.open(file).size for file in files} == {(1024, 1024)}


@pytest.mark.parametrize("num_tokens", [60, 1045])
def test_a_text_has_as_many_tokens_as_a_photograph(num_tokens: int) -> None:
    turns = [{"role": "user", "content": _text("3-17", num_tokens)}]
    tokenizer = grown_tokenizer(4096)
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert len(tokenizer(text)["input_ids"]) == pytest.approx(num_tokens, abs=16)


def test_the_thread_that_works_is_the_fullest() -> None:
    tids, measured = [], threading.Event()

    def work() -> None:
        tids.append(threading.get_native_id())
        while not measured.is_set():
            sum(range(1000))

    before = thread_seconds(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.25)
    after = thread_seconds(os.getpid())
    measured.set()
    thread.join()
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    assert max(used, key=used.__getitem__) == Thread("server", os.getpid(), tids[0])


def test_ratios_are_within_a_round() -> None:
    def turns(*seconds: float) -> list[Turn]:
        cpu = {Thread("server", 1, 1): 0.5, Thread("server", 1, 2): 1.0, Thread("images", 3, 3): 0.25}
        return [Turn(seconds=s, tokens=64, prompt_tokens=1045, cpu=cpu) for s in seconds]

    figures = _figures({"new": turns(4.0, 2.0), "known": turns(2.0, 1.5), "text": turns(1.0, 1.0)}, 2)
    found = {figure.name: figure for figure in figures}
    assert found["new against known"].samples == [0.5, 0.75]
    assert found["new against text"].samples == [0.25, 0.5]
    assert found["2 at once, new: the event loop's thread"].samples == [0.125, 0.25]
    assert found["2 at once, new: the fullest other"].samples == [0.25, 0.5]
    assert found["new: what the preparing thread could do alone"].samples == [2.0, 2.0]
    assert found["2 at once, new: CPU of server"].value == 1.5
    assert found["2 at once, new: CPU of images"].value == 0.25


def test_the_large_model_has_the_parameters_of_qwen3_vl_4b() -> None:
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(photograph_config(grown_tokenizer(151_936), "4B"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(4.44e9, rel=0.01)
