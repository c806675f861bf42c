"""The order in which modules are handed to the workers: the longest first, so that no worker ends long before the
others.

A module's whole time counts, with what it waits for. Modules with vLLM in their own process are last: vLLM leaves
threads, groups and variables behind that other tests would find. In `make test` it is one module of half a minute, so
one as long goes before it, for the other worker.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent

LONGEST = (
    "integration/test_fsdp.py",
    "integration/test_multinode.py",
    "integration/test_chaos.py",
    "integration/test_restarts.py",
    "integration/test_fsdp_sync.py",
    "integration/test_stage2.py",
    "integration/test_colocate_run.py",
    "integration/test_training.py",
    "unit/learner/test_trainer.py",  # without vLLM, whose first import the module before waits for
    "integration/test_server.py",
    "unit/learner/rollout/test_hf.py",
    "unit/deploy/test_launch.py",
    "integration/test_ranks.py",
    "integration/test_adapters.py",
    "integration/test_faults.py",
    "integration/test_sync.py",
    "integration/test_ddp.py",
    "integration/test_images.py",
    "unit/learner/policy/test_compiled.py",
    "unit/learner/run/test_checkpoint.py",
    "unit/learner/tasks/detection/test_gaps.py",
    "unit/learner/detector/test_evaluation.py",
    "unit/learner/tasks/detection/test_ranking.py",
    "unit/learner/steps/test_completing.py",
    "unit/learner/doctor/test_init.py",
    "unit/learner/missing/test_review.py",
    "unit/deploy/test_help.py",
    "unit/learner/run/test_best.py",
    "unit/docs/test_generated.py",
    "unit/rollout_server/test_config.py",
    "unit/learner/data/test_batches.py",
    "unit/rollout_server/test_advisories.py",
    "unit/learner/test_command.py",
    "unit/shared/sync/test_group.py",
    "unit/learner/config/test_schema.py",
    "unit/rollout_server/test_fuzz.py",
    "unit/learner/steps/test_buffered_training.py",
    "unit/learner/steps/test_ahead.py",
    "unit/rollout_server/test_api_schema.py",
    "unit/deploy/test_torchrun.py",
)
BESIDE_VLLM = "unit/learner/test_failover.py"  # waits for most of its time, while the other worker computes
VLLM_IN_PROCESS = (
    "integration/test_backends.py",
    "integration/test_colocate_adapters.py",
    "integration/test_colocate.py",
)

_LAST = (BESIDE_VLLM, *VLLM_IN_PROCESS)
_PLACES = {name: place for place, name in enumerate(LONGEST)} | {
    name: len(LONGEST) + 1 + place for place, name in enumerate(_LAST)
}


def place(path: Path) -> int:
    """Return the key to sort by. Modules that are not named keep their order."""
    return _PLACES.get(path.relative_to(TESTS).as_posix(), len(LONGEST))
