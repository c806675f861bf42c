"""What the system costs on GPUs, measured: `python -m bench.gpu.run`; see bench/README.md."""
