"""What the test modules have loaded is kept out of the collector's walks: a program's `gc.collect` takes half a second
in a process that has loaded all of them.

A run that ends in this process lets the collector walk through all again (`learner.trainer.start_set_aside`), so
`set_aside` comes before each test and each run.
"""

from __future__ import annotations

import gc
import itertools

_EVERY = 100  # garbage that is set aside would stay, so it is collected before each so many times: a walk takes 1.3 s
_times = itertools.count()
_unfreeze = gc.unfreeze
_is_walked = True  # `gc.get_freeze_count` walks too: 0.1 s


def _noted() -> None:
    global _is_walked
    _is_walked = True
    _unfreeze()


gc.unfreeze = _noted


def set_aside() -> None:
    """Do nothing where things are set aside already."""
    global _is_walked
    if not _is_walked:
        return
    if next(_times) % _EVERY == _EVERY - 1:
        gc.collect()
    gc.freeze()
    _is_walked = False
