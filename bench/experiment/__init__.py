"""The parts of a comparison of training methods: `bench.study` says what is compared.

`arms`: what a method adds to a run's configuration. `gaps`: which labels a scene loses. `runner`: runs as separate
processes, side by side, resumed. `results`: one file per run, scored by two sets of labels, and the table.
"""
