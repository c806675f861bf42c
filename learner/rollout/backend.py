"""Where rollouts come from. One protocol for the server, colocated vLLM and Hugging Face `generate`.

Whether an error says that memory did not suffice. Called by the backends that generate beside the training state.

What one `generate` call did, for the step's metrics and the log (R15, R30).

In: a call as it begins, or ends. Out: its record, which also tells how long it took and what it failed with. Written by
the backends, read by the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from learner.records import Rollout, Sample
from shared.seeds import request_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStep:
    """What this rank rolls out for one micro-step. `first_req_idx` is its first request, counted over all ranks."""

    samples: Sequence[Sample]
    micro_step_idx: int
    first_req_idx: int


class Place(NamedTuple):
    """Where a request stands in its optimizer step; `req_idx` counts over all ranks."""

    micro_step_idx: int
    req_idx: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """A window's requests in one line. A seed follows from its request's place only (R11), not from what is rolled out
    together."""

    samples: Sequence[Sample]
    places: Sequence[Place]
    seeds: Sequence[int]

    @classmethod
    def of(cls, window: Sequence[MicroStep], *, run_seed: int, global_step: int) -> Requests:
        line = [(step, i) for step in window for i in range(len(step.samples))]
        places = [Place(step.micro_step_idx, step.first_req_idx + i) for step, i in line]
        return cls(
            samples=[step.samples[i] for step, i in line],
            places=places,
            seeds=[request_seed(run_seed=run_seed, global_step=global_step, **place._asdict()) for place in places],
        )


class RolloutBackend(Protocol):
    """Rollouts by the weights of one version, one per sample, in order; never fewer. To be subclassed.

    Raises ServerError, SyncError, RolloutError or DeadlineError.
    """

    def generate_window(
        self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False
    ) -> list[list[Rollout]]:
        """Those of several micro-steps at once, between which the weights stay as they are: a list for each."""
        ...

    def generate(
        self,
        samples: Sequence[Sample],
        *,
        global_step: int,
        micro_step_idx: int,
        first_req_idx: int,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Those of one micro-step."""
        window = [MicroStep(samples=samples, micro_step_idx=micro_step_idx, first_req_idx=first_req_idx)]
        (rollouts,) = self.generate_window(window, global_step=global_step, greedy=greedy)
        return rollouts

    def close(self) -> None: ...


def split_window(window: Sequence[MicroStep], rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """All micro-steps' rollouts in one line, cut where each begins."""
    line = iter(rollouts)
    return [[next(line) for _ in step.samples] for step in window]


def is_out_of_memory(error: Exception) -> bool:
    """On CPU torch has no type for it, only words."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """One `/infer/` call as it ended; `error` is empty where it was answered."""

    base_url: str
    seed: int  # of its first request
    micro_step_idx: int  # likewise
    first_req_idx: int  # likewise, over all ranks
    num_requests: int
    seconds: float
    error: str = ""
    began_at: float = 0.0  # Unix seconds; 0: in the learner's own process, whose phases tell when


@dataclass(kw_only=True, slots=True)
class RolloutCallLog:
    """What one `generate_window` did, for the step's metrics (R15, R30). `splits` are (micro_step_idx, first_req_idx,
    requests) sent again; `micro_step_idx` and `first_req_idx` those of the first request.

    A call that runs ahead of the steps belongs to none of them: there `micro_step_idx` is -1, and `global_step` the
    number of the rank's call.
    """

    global_step: int
    micro_step_idx: int
    first_req_idx: int
    num_requests: int
    num_micro_steps: int
    chunk: int  # requests that this rank may have in flight
    ver: int | None = None
    seconds: float = 0.0
    began_at: float = 0.0  # as in `CallRecord`
    calls: list[CallRecord] = field(default_factory=list)
    splits: list[tuple[int, int, int]] = field(default_factory=list)


def begin_record(
    window: Sequence[MicroStep], *, global_step: int, chunk: int, ver: int | None = None
) -> RolloutCallLog:
    """The record of a window with at least one micro-step, before anything was generated."""
    return RolloutCallLog(
        global_step=global_step,
        micro_step_idx=window[0].micro_step_idx,
        first_req_idx=window[0].first_req_idx,
        num_requests=sum(len(step.samples) for step in window),
        num_micro_steps=len(window),
        chunk=chunk,
        ver=ver,
    )


@contextmanager
def recorded(record: RolloutCallLog, on_call: Callable[[RolloutCallLog], None] | None) -> Iterator[None]:
    """Around one `generate_window`: `on_call` hears of it at its end, also where it failed."""
    begin = time.monotonic()
    try:
        yield
    finally:
        record.seconds = time.monotonic() - begin
        if on_call is not None:
            on_call(record)


@contextmanager
def local_call(record: RolloutCallLog, asked: Requests, *, name: str) -> Iterator[None]:
    """Around what is generated at once in the learner's own process; `name` stands where a server's URL would."""
    begin, error_text = time.monotonic(), ""
    try:
        yield
    except Exception as error:
        error_text = str(error)
        raise
    finally:
        first = asked.places[0] if asked.places else Place(record.micro_step_idx, record.first_req_idx)
        ended = CallRecord(
            base_url=name,
            seed=asked.seeds[0] if asked.seeds else 0,
            micro_step_idx=first.micro_step_idx,
            first_req_idx=first.req_idx,
            num_requests=len(asked.samples),
            seconds=time.monotonic() - begin,
            error=error_text,
        )
        record.calls.append(ended)
