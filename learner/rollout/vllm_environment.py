"""What vLLM takes from environment variables only, where its engine is inside the learner's process.

Set by `learner.__main__` before anything imports vLLM; what the user has set stays, but for what would not work here:
- an engine in a process of its own would neither share the device's weights nor run in step with other ranks;
- under torchrun, a process group is joined at torchrun's own store, wherever it is said to be. One rank alone makes no
  group, but its engine does, at an address where nobody listens: it would wait there until a time-out of half an hour.
"""

from __future__ import annotations

from collections.abc import MutableMapping


def prepare(environment: MutableMapping[str, str]) -> None:
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if environment.get("WORLD_SIZE", "1") == "1":
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its log goes where the run's does
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
