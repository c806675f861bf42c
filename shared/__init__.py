"""The agreements between the rollout server and the learner. This package imports neither of them."""
