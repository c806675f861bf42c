"""What the specification has and this version does not run, told from the configuration alone.

Such a configuration is valid: `--check` prints its plan, with this as a note on stderr. `learner.build` refuses to run
it, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from learner.config.rules import ROLLOUT, needs_rollouts
from learner.config.schema import RunConfig
from shared.config_errors import Mistake


def not_built(config: RunConfig) -> Iterator[Mistake]:
    """One `Mistake` per key whose value can't be run yet."""
    rollout = config.rollout_matching
    if needs_rollouts(config) and rollout.rollout_backend == "vllm" and rollout.vllm.mode == "colocate":
        remedy = "start rollout servers, or generate with the trained model itself"
        wanted = "server, or rollout_backend: hf"
        yield Mistake(
            path=f"{ROLLOUT}.vllm.mode", found="colocate, which this version does not run", wanted=wanted, remedy=remedy
        )
