"""The server's program on a machine that has no vLLM: a test starts it."""

from __future__ import annotations

import sys

from rollout_server.__main__ import main

if __name__ == "__main__":
    sys.modules["vllm"] = None  # type: ignore[assignment]
    main()
