"""Where rollouts come from. One protocol for the server, colocated vLLM and Hugging Face `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from learner.records import Rollout, Sample


class RolloutBackend(Protocol):
    """`generate` returns one rollout per sample, in order, made by the weights of one version.

    `global_step`, `micro_step_idx` and `first_req_idx` (this rank's first request, counted over all ranks) derive the
    seeds (R11). Raises ServerError, SyncError, RolloutError or DeadlineError; never fewer rollouts than samples.
    """

    def generate(
        self,
        samples: Sequence[Sample],
        *,
        global_step: int,
        micro_step_idx: int,
        first_req_idx: int,
        greedy: bool = False,
    ) -> list[Rollout]: ...

    def close(self) -> None: ...
