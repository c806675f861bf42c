"""The common parts of comparisons of training methods: arms, runs in slots, result files with intervals.

`arms`: what a method adds to a run's configuration. `runner`: runs as separate processes, side by side, resumed.
`results`: one file per run, and the table with intervals over scenes and seeds.

The drivers say what is compared: `bench.study` and `bench.bccd`.
"""
