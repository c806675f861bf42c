"""Log-probabilities of given answers under the served weights: `/score/`, and the canary of a weight update.

In: items of `shared/wire.py`. Out: one reply, all of one version. Whoever calls holds the gate. Called by `service.py`
and `sync.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_server.engine import Engine
from rollout_server.gathering import gather
from shared.wire import ScoreItem, ScoreReply


async def score(engine: Engine, items: Sequence[ScoreItem], ver: int) -> ScoreReply:
    """Raises what the media rules and the engine raise."""
    scores = await gather([engine.score(item.request, item.response_token_ids) for item in items])
    return ScoreReply(
        ver=ver,
        logprobs=[one.logprobs for one in scores],
        prompt_token_ids=[one.prompt_token_ids for one in scores],
    )
