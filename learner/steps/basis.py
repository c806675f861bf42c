"""The parts of a run that all other parts need: configuration, ranks, policy, task, samples.

`learner.wiring` makes each part once, and all users share the object. So when labels are added to the samples in
`data.train`, all users see the new labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from learner.extensions import Task, reward_functions
from learner.policy.load import Policy
from learner.policy.parallel import Ranks
from learner.records import Sample
from learner.steps.segments import GroundTruthSource
from learner.tasks.rewards import Rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Retained:
    """One entry of `data.retain`: samples that each evaluation scores too, and their task."""

    name: str
    task: Task
    samples: list[Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The samples of a run. `test` is scored at the end, `retained` at each evaluation. `bad_records`: for each split,
    the numbers of dropped or clipped records, by kind and action."""

    train: list[Sample]
    evaluation: list[Sample]
    test: list[Sample]
    retained: list[Retained]
    bad_records: Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The parts that all other parts of a run need."""

    config: RunConfig
    plan: Plan
    ranks: Ranks
    policy: Policy
    task: Task
    data: RunData

    @property
    def ground_truth(self) -> GroundTruthSource:
        return GroundTruthSource(self.task, loss=self.config.loss)

    @cached_property
    def rewards(self) -> Rewards:
        functions, weights = reward_functions(self.config), dict(self.config.reward.weights)
        if self.config.custom.trainer_variant == "grpo" and not functions and not weights:
            weights = {"f1": 1.0}
        return Rewards(tokenizer=self.policy.tokenizer, functions=functions, weights=weights, task=self.task)
