"""What the system costs and what it learns, measured: `python -m bench.run`; see README.md."""
