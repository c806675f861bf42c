"""Micro-batches: prompts that belong to their samples, a resume that repeats and skips nothing, workers like none."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.data.batches import Batches, MicroBatch
from learner.data.encoding import Encoder, WorkerPool
from learner.records import EncodedPrompt, Sample
from shared.errors import CheckpointError, DataError, DeadlineError, MediaError
from tests.servers import wait_gone
from tests.unit.learner.data.fakes import (
    CountingEncoder,
    DyingEncoder,
    FailingEncoder,
    SlowEncoder,
    make_run,
    make_samples,
)


def make_batches(
    count: int,
    *,
    rank: int = 0,
    encoder: Encoder | None = None,
    samples_per_rank: int = 2,
    ranks: int = 1,
    **data: Any,
) -> Batches:
    config, plan = make_run(samples_per_rank=samples_per_rank, ranks=ranks, **data)
    return Batches(make_samples(count), config=config, plan=plan, rank=rank, encoder=encoder or CountingEncoder())


def take(batches: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
    return [next(batches) for _ in range(count)]


def ids(batches: list[MicroBatch]) -> list[tuple[str, ...]]:
    return [tuple(sample.sample_id for sample in batch.samples) for batch in batches]


def same_prompt(a: EncodedPrompt, b: EncodedPrompt) -> bool:
    if a.token_ids != b.token_ids or (a.vision is None) != (b.vision is None):
        return False
    if a.vision is None or b.vision is None:
        return True
    return torch.equal(a.vision.pixel_values, b.vision.pixel_values) and torch.equal(
        a.vision.image_grid_thw, b.vision.image_grid_thw
    )


@given(
    count=st.integers(1, 30),
    samples_per_rank=st.integers(1, 4),
    ranks=st.integers(1, 3),
    before=st.integers(0, 12),
)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(
    count: int, samples_per_rank: int, ranks: int, before: int
) -> None:
    """R12: state travels as JSON, is equal on all ranks, and names what was handed out, not what was prefetched."""
    for rank in range(ranks):
        whole = make_batches(count, rank=rank, samples_per_rank=samples_per_rank, ranks=ranks)
        first = make_batches(count, rank=0, samples_per_rank=samples_per_rank, ranks=ranks)
        take(whole, before)
        take(first, before)
        state = json.loads(json.dumps(first.state()))
        resumed = make_batches(count, rank=rank, samples_per_rank=samples_per_rank, ranks=ranks)
        take(resumed, 1)  # a restore must forget what was prefetched
        resumed.restore(state)
        assert ids(take(resumed, 6)) == ids(take(whole, 6))
        assert resumed.state() == whole.state()


@given(count=st.integers(1, 30), ranks=st.integers(1, 3), before=st.integers(0, 12), number=st.integers(1, 6))
def test_what_is_upcoming_is_what_comes(count: int, ranks: int, before: int, number: int) -> None:
    """Up to an epoch's end, and without a prompt encoded or a place moved."""
    encoded: list[Sample] = []

    class Told(CountingEncoder):
        def encode(self, sample: Sample) -> EncodedPrompt:
            encoded.append(sample)
            return super().encode(sample)

    for rank in range(ranks):
        batches = make_batches(count, rank=rank, ranks=ranks, encoder=Told())
        take(batches, before)
        state, num_encoded = batches.state(), len(encoded)
        upcoming = batches.upcoming(number)
        assert (batches.state(), len(encoded)) == (state, num_encoded)
        coming = take(batches, len(upcoming))
        assert upcoming == [(batch.samples, batch.first_req_idx) for batch in coming]
        assert [batch.ends_epoch for batch in coming[:-1]] == [False] * (len(coming) - 1)
        assert len(coming) == number or coming[-1].ends_epoch


def test_every_sample_once_per_epoch_over_ranks() -> None:
    """R12"""
    ranks = [make_batches(11, rank=rank, ranks=2) for rank in range(2)]
    for _ in range(3):
        epoch = [batch for batches in ranks for batch in take(batches, batches.per_epoch)]
        assert sorted(i for share in ids(epoch) for i in share) == sorted(s.sample_id for s in make_samples(11))
        assert [batch.ends_epoch for batch in epoch] == [False, False, True] * 2


def test_prompts_belong_to_their_samples() -> None:
    for batch in take(make_batches(9, samples_per_rank=4), 5):
        assert len(batch.prompts) == len(batch.samples)
        for sample, prompt in zip(batch.samples, batch.prompts, strict=True):
            assert same_prompt(prompt, CountingEncoder().encode(sample))


@given(count=st.integers(1, 30), samples_per_rank=st.integers(1, 4), order=st.randoms(use_true_random=False))
def test_micro_batches_are_handed_out_in_any_order(count: int, samples_per_rank: int, order: random.Random) -> None:
    """D11: taken or skipped, each once, and the state says what is left, also to another number of ranks."""
    one = {"count": count, "samples_per_rank": 2 * samples_per_rank}
    batches, in_order = make_batches(**one), make_batches(**one)
    wanted = take(in_order, batches.per_epoch)
    shuffled = order.sample(range(batches.per_epoch), batches.per_epoch)
    for number, position in enumerate(shuffled):
        assert batches.num_taken == number
        assert batches.left(0) == sorted(shuffled[number:])
        if order.random() < 0.3:
            state = json.loads(json.dumps(batches.state()))
            halves = [make_batches(count, samples_per_rank=samples_per_rank, ranks=2, rank=rank) for rank in (0, 1)]
            for half in halves:
                half.restore(state)
            found = [half.take(position) for half in halves]
            assert [s for half in found for s in half.samples] == list(wanted[position].samples)
            batches.restore(state)
        if order.random() < 0.3:
            batches.skip(position)
        else:
            batch = batches.take(position, then=order.sample(shuffled[number:], 1))
            assert batch.fingerprint == wanted[position].fingerprint
    assert batches.state() == in_order.state()


@pytest.mark.parametrize(
    "other",
    [
        {"count": 10},
        {"count": 9, "samples_per_rank": 3},
        {"count": 9, "shuffle": False},
    ],
)
def test_a_state_of_other_data_is_refused(other: dict[str, Any]) -> None:
    state = make_batches(9).state()
    with pytest.raises(CheckpointError, match=r"differs.*resume with the data"):
        make_batches(**other).restore(state)


# ---- worker processes ----------------------------------------------------------------------------------------------


def test_workers_give_what_the_learner_itself_would_give() -> None:
    """Images of several sizes and numbers, prompts without any, short last micro-batches, over an epoch's end."""
    with closing(make_batches(17, samples_per_rank=5, num_workers=2)) as batches:
        ahead = take(batches, 8)
        state = batches.state()
        batches.restore(state)
        ahead += take(batches, 2)
    here = take(make_batches(17, samples_per_rank=5), 10)
    assert ids(ahead) == ids(here)
    for a, b in zip(ahead, here, strict=True):
        assert all(same_prompt(x, y) for x, y in zip(a.prompts, b.prompts, strict=True))


def test_an_error_in_a_worker_keeps_its_type_and_words() -> None:
    with (
        closing(make_batches(4, encoder=FailingEncoder(), num_workers=1)) as batches,
        pytest.raises(MediaError, match=r"an image is bad; found s.*replace it"),
    ):
        next(batches)


def test_a_worker_that_dies_is_told() -> None:
    with (
        closing(make_batches(4, encoder=DyingEncoder(), num_workers=1)) as batches,
        pytest.raises(DataError, match=r"worker process ended.*data\.num_workers"),
    ):
        next(batches)


def test_a_worker_that_hangs_is_told_and_ended() -> None:
    pool = WorkerPool(SlowEncoder(), num_workers=1, samples_per_micro_batch=1, timeout_s=0.2)
    started = time.monotonic()
    with closing(pool), pytest.raises(DeadlineError, match=r"0\.2 s"):
        pool.submit(make_samples(1))()
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_stop_signal_to_the_whole_group_leaves_the_workers_at_work() -> None:
    """A terminal's Ctrl-C reaches them too, and the learner still needs prompts to end its step."""
    samples = make_samples(2)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # another test's, which may not block signals
    with closing(WorkerPool(CountingEncoder(), num_workers=1, samples_per_micro_batch=1, timeout_s=60.0)) as pool:
        before = pool.submit(samples[:1])()
        for signum in (signal.SIGINT, signal.SIGTERM):
            for process in (*pool._pool._processes, forkserver._forkserver._forkserver_pid):  # type: ignore[attr-defined]
                os.kill(process, signum)
            after = pool.submit(samples[:1])()
            assert same_prompt(before[0], after[0]), signum


@pytest.mark.slow
def test_workers_fork_from_a_process_that_has_imported_what_they_need_and_end_with_a_killed_learner() -> None:
    code = (
        "import os, signal; from tests.unit.learner.data.fakes import ImportTellingEncoder, make_samples\n"
        "from learner.data.encoding import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    pool = WorkerPool(ImportTellingEncoder(), num_workers=2, samples_per_micro_batch=2, timeout_s=60.0)\n"
        "    jobs = [pool.submit([sample]) for sample in make_samples(4)]\n"
        "    print(*{job()[0].token_ids for job in jobs})\n"
        "    print(*pool._pool._processes, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    imported, pids = done.stdout.splitlines()
    assert imported == "(True, True)", done.stderr
    assert not wait_gone(map(int, pids.split()), 30.0)


def test_workers_run_ahead_by_a_bounded_amount() -> None:
    """While the learner computes, at least one micro-batch is under way behind it, and never all of the data."""
    with closing(make_batches(1000, samples_per_rank=8, num_workers=1)) as batches:
        next(batches)
        under_way = sum(len(batches._seen[position].share.indices) for position in batches._ahead)
        assert 8 <= under_way <= 8 * 4


def test_the_real_encoder_pickles(tiny_vlm: Any) -> None:
    from learner.data.prompt import PromptEncoder as RealEncoder

    encoder = RealEncoder.load(str(tiny_vlm))
    sample = make_samples(1)[0]
    assert pickle.loads(pickle.dumps(encoder)).encode(sample).token_ids == encoder.encode(sample).token_ids
