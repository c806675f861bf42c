"""`stage2_ab_training`: scheduled channels, and Channel-B's rollouts within the step that learns them."""
