"""One protocol for everything that makes rollouts: rollout servers, colocated vLLM and Hugging Face `generate`.

`RolloutBackend` is the protocol. `Requests` are the samples that a backend must answer, with the seed of each request.
A backend makes one or more calls for a `generate_window`. The backend writes each call's seed, time and error into a
`RolloutCallLog`, which the trainer reads for the step's metrics and the log (R15, R30).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from learner.config.sections.decoding import DecodingConfig
from learner.records import CallRecord, Rollout, RolloutCallLog, Sample
from shared.seeds import request_seed

# Values of `micro_step_idx` for requests outside of a micro-step. The values are negative, so that no two requests have
# the same seed. Rollouts made ahead of the steps. The `global_step` of such rollouts is the number of their share (the
# samples of one step).
AHEAD_OF_STEPS = -1
COMPLETES_LABELS = -2  # rollouts that complete the labels of samples
TELL_S = 10.0  # seconds between two lines that report the progress of an evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStep:
    """The samples of one micro-step on this rank. `first_req_idx`: index of the first sample's request, counted over
    all ranks."""

    samples: Sequence[Sample]
    micro_step_idx: int
    first_req_idx: int


class RequestIndex(NamedTuple):
    """A request's position in its optimizer step. `req_idx` counts the micro-step's requests of all ranks."""

    micro_step_idx: int
    req_idx: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The requests of a window (a few micro-steps), all in one sequence. A request's seed depends on its index in the
    run only (R11), not on the other requests."""

    samples: Sequence[Sample]
    indices: Sequence[RequestIndex]
    seeds: Sequence[int]

    @classmethod
    def of(cls, window: Sequence[MicroStep], *, run_seed: int, global_step: int) -> Requests:
        line = [(step, i) for step in window for i in range(len(step.samples))]
        indices = [RequestIndex(step.micro_step_idx, step.first_req_idx + i) for step, i in line]
        return cls(
            samples=[step.samples[i] for step, i in line],
            indices=indices,
            seeds=[request_seed(run_seed=run_seed, global_step=global_step, **index._asdict()) for index in indices],
        )


class RolloutBackend(Protocol):
    """Makes one rollout for each sample. All rollouts of a call are made with the same version of the weights. `stream`
    yields rollouts as they end; the other methods return them in the samples' order. Backends subclass this protocol.

    The methods raise ServerError, SyncError, RolloutError or DeadlineError.
    """

    def generate_window(
        self,
        window: Sequence[MicroStep],
        *,
        global_step: int,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[list[Rollout]]:
        """Return the rollouts of several micro-steps, made with the same weights: one list per micro-step.

        Decoding follows the run's configuration, unless one of these arguments is given. `greedy`: decode greedily.
        `temperature`: sample from all tokens at this temperature.
        """
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
        """Return the rollouts of one micro-step."""
        window = [MicroStep(samples=samples, micro_step_idx=micro_step_idx, first_req_idx=first_req_idx)]
        (rollouts,) = self.generate_window(window, global_step=global_step, greedy=greedy)
        return rollouts

    def stream(self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False) -> RolloutStream:
        """Begin the rollouts of `generate_window`, which other processes make, and return at once. Only the backend of
        rollout servers has this method."""
        raise AssertionError("only servers hand on rollouts as they end")

    def close(self) -> None: ...


class RolloutStream(Protocol):
    """Yields a window's rollouts as they end, as pairs (index of the sample in the window, rollout). One thread may
    iterate the stream, once. The iteration raises the error that ended the rollouts."""

    def __iter__(self) -> Iterator[tuple[int, Rollout]]: ...

    def close(self) -> None:
        """Cancel the rollouts that have not ended. The iteration then ends without an error. Any thread may call this
        at any time."""
        ...


def drawn_at(temperature: float, decoding: DecodingConfig) -> DecodingConfig:
    """Return `decoding` changed so that each token is sampled from the whole vocabulary at this temperature."""
    plain = {"top_p": 1.0, "top_k": -1, "decode_mode": "sample", "num_beams": 1}
    return decoding.model_copy(update={"temperature": temperature, **plain})


def split_window(window: Sequence[MicroStep], rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Split the rollouts of a window, in order, into a list for each micro-step."""
    line = iter(rollouts)
    return [[next(line) for _ in step.samples] for step in window]


def begin_record(
    window: Sequence[MicroStep], *, global_step: int, chunk: int, ver: int | None = None
) -> RolloutCallLog:
    """Return the record of a window's calls, with no call yet. The window has at least one micro-step. `global_step`:
    the step that the seeds of the window depend on."""
    is_ahead = window[0].micro_step_idx == AHEAD_OF_STEPS
    return RolloutCallLog(
        global_step=None if is_ahead else global_step,
        share=global_step if is_ahead else None,
        micro_step_idx=window[0].micro_step_idx,
        first_req_idx=window[0].first_req_idx,
        num_requests=sum(len(step.samples) for step in window),
        num_micro_steps=len(window),
        chunk=chunk,
        ver=ver,
    )


@contextmanager
def recorded(record: RolloutCallLog, on_call: Callable[[RolloutCallLog], None] | None) -> Iterator[None]:
    """Measure the time of one `generate_window`, which runs in the `with` block. At the end, also after an error, write
    its seconds into `record` and call `on_call(record)`."""
    begin = time.monotonic()
    try:
        yield
    finally:
        record.seconds = time.monotonic() - begin
        if on_call is not None:
            on_call(record)


@contextmanager
def local_call(record: RolloutCallLog, asked: Requests, *, name: str) -> Iterator[None]:
    """Add one call to `record`: the `with` block, which generates in the learner's own process. The record has `name`
    instead of a server's URL."""
    begin, error_text = time.monotonic(), ""
    try:
        yield
    except BaseException as error:
        error_text = str(error)
        raise
    finally:
        first = asked.indices[0] if asked.indices else RequestIndex(record.micro_step_idx, record.first_req_idx)
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
