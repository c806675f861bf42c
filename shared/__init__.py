"""Code that the rollout server and the learner share. `shared` imports neither of the two programs."""
