"""`python -m learner doctor --config F`: what usually goes wrong before a run, one line per check.

`command.py` holds the table of checks; each check is a function from a `Situation` to a `Finding`, in `machine.py`,
`network.py`, `data.py` and `servers.py`.
"""
