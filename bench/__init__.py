"""What the system costs, measured: `python -m bench.run`; see README.md."""
