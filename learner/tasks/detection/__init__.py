"""Detection: objects in an answer, read, matched to labels, taught and scored. `learner.api` is its Python API."""
