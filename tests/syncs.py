"""A `Sync` as tests want it, from canary items to the servers of a backend, and weights that change for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from learner.config.sections.vllm import VllmConfig
from learner.policy.canary_scores import CanaryScores
from learner.policy.load import Policy
from learner.policy.parallel import Ranks
from learner.rollout.control import ServerControl
from learner.rollout.server_backend import ServerBackend
from learner.sync.broadcast_groups import StartJoin
from learner.sync.canary import Canary, CanaryItem, Scorer
from learner.sync.server_delivery import ServerDelivery
from learner.sync.source import AdapterSource, SyncRanks, WeightSource
from learner.sync.sync import Sync
from shared.canary import Logprobs
from shared.sync.group import start_join
from shared.wire import TensorSpec

ONE_RANK = Ranks()


def scorer_of(learner_logprobs: Callable[[], Logprobs]) -> Scorer:
    """Scores of weights that nothing merges or rounds."""

    def score(dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        found = [list(one) for one in learner_logprobs()]
        return CanaryScores(read=lambda: found, merge_gap=0.0)

    return score


CPU = torch.device("cpu")


def server_sync(
    backend: ServerBackend,
    weights: WeightSource,
    canary: Sequence[CanaryItem],
    learner_logprobs: Callable[[], Logprobs],
    *,
    scorer: Scorer | None = None,
    adapter: AdapterSource | None = None,
    config: VllmConfig | None = None,
    ranks: SyncRanks = ONE_RANK,
    device: torch.device = CPU,
    start_join: StartJoin = start_join,
    control: ServerControl | None = None,
) -> Sync:
    """Make a sync with servers. `config`: the backend's, by default. `scorer`: instead of
    `learner_logprobs`."""
    config = config or backend.config.vllm
    scorer = scorer or scorer_of(learner_logprobs)
    checked = Canary(items=canary, scorer=scorer, tolerance=config.sync.canary_tolerance)
    delivery = ServerDelivery(
        backend,
        config,
        canary=checked,
        ranks=ranks,
        device=device,
        start_join=start_join,
        control=control,
    )
    return Sync(delivery, weights, adapter=adapter, fallback_to_full=config.sync.fallback_to_full)


class Incomplete:
    """A policy's weights, but for one tensor."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._name = policy.weight_specs()[1].name

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self._policy.named_weights(dtype) if name != self._name)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return [spec for spec in self._policy.weight_specs(dtype) if spec.name != self._name]
