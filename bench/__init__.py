"""Benchmarks of what the system costs and of what it learns: `python -m bench.run`; see README.md."""
