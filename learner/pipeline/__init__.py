"""Rollout ahead of learning: `queue.RolloutPipeline` is what the trainer uses; `protocol.py` holds the rules."""
