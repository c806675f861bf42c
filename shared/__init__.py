"""What the rollout server and the learner must agree on. Imports neither of them."""
