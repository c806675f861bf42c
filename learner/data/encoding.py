"""Encodes prompts ahead of time: in the learner's process, or in worker processes.

In: jobs of samples, in order. Out: the samples' encoded prompts, when a job is called. A worker sends a job's
pixels back as one tensor in shared memory, and the learner cuts it into views. Nothing is copied or pickled per sample,
so 16 cores can feed a GPU. Errors raised in a worker keep their type.

Workers are not forked from the learner, because CUDA, NCCL and gloo have threads, which a fork would break. Workers are
forked from a server process that has imported only the modules that they need. On slow file systems, eight processes
that import torch at the same time take a minute or more.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from typing import Protocol

import torch

from learner.records import EncodedPrompt, Sample, VisionInputs
from shared.errors import DataError, DeadlineError
from shared.waits import result_of


class Encoder(Protocol):
    """Encodes a sample. An encoder must be picklable if workers are used."""

    def encode(self, sample: Sample) -> EncodedPrompt: ...


# Returns a job's prompts, in the order of its samples. Raises the encoder's errors, and DeadlineError.
EncodingJob = Callable[[], list[EncodedPrompt]]


class LocalPool:
    """Encodes in the learner's process, when a job's prompts are asked for."""

    lookahead = 0  # samples to encode ahead of the next micro-batch
    job_size = 1_000_000  # max number of samples in a job

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def submit(self, samples: Sequence[Sample]) -> EncodingJob:
        """Begin one job."""
        return lambda: [self._encoder.encode(sample) for sample in samples]

    def submit_all(self, samples: Sequence[Sample]) -> EncodingJob:
        """Begin as many jobs as the samples need. Equal neighbours (`grpo`) are encoded once."""
        runs = [(first, 1 + sum(1 for _ in again)) for _, again in groupby(samples, key=id) for first in [next(again)]]
        ones = tuple(one for one, _ in runs)
        jobs = [self.submit(ones[i : i + self.job_size]) for i in range(0, len(ones), self.job_size)]

        def prompts() -> list[EncodedPrompt]:
            encoded = (prompt for job in jobs for prompt in job())
            return [prompt for prompt, (_, times) in zip(encoded, runs, strict=True) for _ in range(times)]

        return prompts

    def close(self) -> None: ...


# ---- workers -------------------------------------------------------------------------------------------------------

# One job runs and two wait, so that no worker is idle while the learner computes.
JOBS_PER_WORKER = 3
MAX_JOB_SIZE = 16
END_TIMEOUT_S = 5.0
_STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A job's prompts in the form in which a worker sends them: the vision inputs of all samples are concatenated."""

    token_ids: list[tuple[int, ...]]
    num_images: list[int | None]  # number of images of each prompt; None: no vision inputs
    pixel_values: torch.Tensor | None  # [P, patch_dim] patches of all images
    image_grid_thw: list[list[int]]  # [I][3]: frames, rows and columns of patches of each image


class WorkerPool(LocalPool):
    """Encodes in `num_workers` processes. Raises DataError if a process dies."""

    def __init__(self, encoder: Encoder, *, num_workers: int, samples_per_micro_batch: int, timeout_s: float) -> None:
        self.job_size = min(MAX_JOB_SIZE, -(-samples_per_micro_batch // num_workers))
        self.lookahead = JOBS_PER_WORKER * num_workers * self.job_size
        self._timeout_s = timeout_s
        # A fork of the learner would copy locks that threads of CUDA, NCCL and gloo hold.
        context = get_context("forkserver")
        # Eight workers that each imported everything took 80 s to their first row on a 16-core host.
        context.set_forkserver_preload(sorted({__name__, *_modules_of(encoder)}))
        _start_fork_server()
        self._pool = ProcessPoolExecutor(
            num_workers, mp_context=context, initializer=_start_worker, initargs=(encoder,)
        )

    def submit(self, samples: Sequence[Sample]) -> EncodingJob:
        try:
            job = self._pool.submit(_encode_in_worker, tuple(samples))
        except BrokenProcessPool as error:
            raise _worker_died(error) from error
        return partial(self._prompts, job)

    def _prompts(self, job: Future[_Encoded]) -> list[EncodedPrompt]:
        try:
            return _split(result_of(job, self._timeout_s))
        except BrokenProcessPool as error:
            raise _worker_died(error) from error
        except TimeoutError as error:
            raise DeadlineError(
                "a data worker did not encode its samples in time",
                found=f"nothing after {self._timeout_s:g} s",
                wanted="encoded prompts",
                remedy="look for images on a slow file system, or raise training.collective_timeout_s",
            ) from error

    def close(self) -> None:
        """End the workers, even one that hangs. Waiting and running jobs are dropped."""
        workers = list((self._pool._processes or {}).values())  # Python before 3.14 has no public way to end workers
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(END_TIMEOUT_S)


def _start_fork_server() -> None:
    """Start the fork server (which starts the workers) if it does not run yet. The fork server and the workers get no
    stop signals."""
    # If the tracker did not run yet, the fork server would start it and unblock signals.
    resource_tracker.ensure_running()
    # The fork server inherits the blocked signals. With unblocked signals Ctrl-C would end the fork server, and the
    # workers that the last step needs.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _modules_of(encoder: Encoder) -> set[str]:
    """Return the modules that a process must import to unpickle the encoder."""
    modules = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> object:
            modules.add(module)
            return super().find_class(module, name)

    Unpickler(io.BytesIO(pickle.dumps(encoder))).load()
    return modules


_worker_encoder: Encoder | None = None  # set once in each worker process, when it starts


def _start_worker(encoder: Encoder) -> None:
    """Set up a worker process. The process ends when the learner closes it, or when the learner is gone."""
    global _worker_encoder
    # Workers ignore stop signals, which reach the whole process group: a learner that shall stop still needs prompts
    # for its last step.
    for signum in _STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _worker_encoder = encoder


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    # An exception in this thread would not end a job that the main thread is running. So the whole worker process is
    # ended.
    os._exit(1)


def _encode_in_worker(samples: tuple[Sample, ...]) -> _Encoded:
    assert _worker_encoder is not None
    return _join([_worker_encoder.encode(sample) for sample in samples])


def _join(prompts: Sequence[EncodedPrompt]) -> _Encoded:
    visions = [prompt.vision for prompt in prompts if prompt.vision is not None]
    return _Encoded(
        token_ids=[prompt.token_ids for prompt in prompts],
        num_images=[None if prompt.vision is None else len(prompt.vision.image_grid_thw) for prompt in prompts],
        # One tensor is sent for the whole job instead of one per sample, because each goes through shared memory of its
        # own.
        pixel_values=torch.cat([vision.pixel_values for vision in visions]) if visions else None,
        image_grid_thw=[grid for vision in visions for grid in vision.image_grid_thw.tolist()],
    )


def _split(encoded: _Encoded) -> list[EncodedPrompt]:
    prompts = []
    image = patch = 0
    for token_ids, num_images in zip(encoded.token_ids, encoded.num_images, strict=True):
        vision = None
        if num_images is not None:
            assert encoded.pixel_values is not None
            grid = torch.tensor(encoded.image_grid_thw[image : image + num_images], dtype=torch.int64).view(-1, 3)
            num_patches = int(grid.prod(dim=1).sum())
            vision = VisionInputs(pixel_values=encoded.pixel_values[patch : patch + num_patches], image_grid_thw=grid)
            image, patch = image + num_images, patch + num_patches
        prompts.append(EncodedPrompt(token_ids=token_ids, vision=vision))
    return prompts


def _worker_died(error: BrokenProcessPool) -> DataError:
    return DataError(
        "a data worker process ended unexpectedly",
        found=str(error),
        wanted="workers that run until the learner ends",
        remedy="look at its output above; if memory or /dev/shm is short, lower data.num_workers",
    )
