"""Where rollouts come from. One protocol for the server, colocated vLLM and Hugging Face `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
