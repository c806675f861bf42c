"""`rollout-learner check` and `init`: what is wrong before a run starts, and a first configuration.

`check.py` runs the checks. Those of the configuration and data list mistakes. Those of the machine (`machine.py`) and
of the servers (`server_checks.py`) are functions from a `Situation` to a `Finding`, one line each.
"""
