"""`rollout-learner check --config F --machine`: checks what usually goes wrong before a run, one line per check.

`command.py` has the table of checks. Each check is a function from a `Situation` to a `Finding`. Checks of this machine
are in `machine.py`, checks of the servers in `server_checks.py`.
"""
