"""The detection task: parses, matches, teaches and scores objects in an answer. `learner.api` is its Python API."""
