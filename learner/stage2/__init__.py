"""`stage2_ab_training`: scheduled channels, step-budgeted Channel-B, rollouts within the step or ahead of it."""
