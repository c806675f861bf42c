"""Seeds of rollouts (R11). A seed depends only on the run, the step and the request, not on servers, ranks or time.

    request_seed = (base_seed(run_seed, global_step, micro_step_idx) + req_idx) mod (2**31 - 1)

The learner sends a seed with each request, and the first request's seed with the call. For a request `i` without a seed
(from another client), the server uses `offset_seed(seed, i)` with the call's seed.
"""

from __future__ import annotations

import hashlib
import struct

SEED_MODULUS = 2**31 - 1


def base_seed(run_seed: int, global_step: int, micro_step_idx: int) -> int:
    """Return a stable 64-bit hash (BLAKE2b over three little-endian int64) of the run's seed and the micro-step."""
    packed = struct.pack("<qqq", run_seed, global_step, micro_step_idx)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def offset_seed(seed: int, req_idx: int) -> int:
    """Return the seed of the request that comes `req_idx` requests after the request with `seed`."""
    return (seed + req_idx) % SEED_MODULUS


def request_seed(*, run_seed: int, global_step: int, micro_step_idx: int, req_idx: int) -> int:
    """Return the seed of one request. `req_idx` numbers a micro-step's requests of all ranks, in dataloader order."""
    return offset_seed(base_seed(run_seed, global_step, micro_step_idx), req_idx)
