"""Datasets: annotation files in, micro-batches of samples with their encoded prompts out.

`load_samples` reads and checks everything once, at start-up; `Batches` walks over the samples epoch by epoch.
"""

from learner.data.batches import Batches, MicroBatch
from learner.data.load import load_samples

__all__ = ["Batches", "MicroBatch", "load_samples"]
