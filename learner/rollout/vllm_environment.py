"""What vLLM takes from environment variables only, where its engine is inside the learner's process.

Set by `learner.__main__` before anything imports vLLM; what the user has set stays, but for the first: an engine in a
process of its own would neither share the device's weights nor run in step with other ranks.
"""

from __future__ import annotations

from collections.abc import MutableMapping


def prepare(environment: MutableMapping[str, str]) -> None:
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its log goes where the run's does
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
