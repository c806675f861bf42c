"""Code that the rollout server and the learner share. This package imports neither of them."""
