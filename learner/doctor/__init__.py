"""Says what is wrong before a run starts (`rollout-learner check`), and writes a first configuration (`init`).

`check.py` runs the checks. The checks of configuration and data return lists of mistakes. The checks of the machine
(`machine.py`) and of the servers (`server_checks.py`) are functions from a `Situation` to a `Finding`, which is one
line.
"""
