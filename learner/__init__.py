"""The learner: rollouts in, better weights out."""
