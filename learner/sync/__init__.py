"""Weight sync: what the trainer needs of it."""

from learner.sync.canary import CanaryItem
from learner.sync.colocate import ColocateSync
from learner.sync.protocol import Sync
from learner.sync.weight_sync import WeightSync

__all__ = ["CanaryItem", "ColocateSync", "Sync", "WeightSync"]
