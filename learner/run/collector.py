"""Keeps what the start of a run has made out of Python's garbage collections.

In: the end of each step of a run. Out: nothing; from the first one on, collections walk only what was made since.
Invariant: when the run ends, however it does, all objects can be collected again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def start_set_aside() -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step. Its first call takes all objects that live then out of collections,
    until the context ends.

    Modules, model and compiled programs are about 800,000 objects that live as long as the run. A full collection walks
    all of them, in the middle of a step: 0.5 s on a CPU. Cycles of such objects are only freed when the context has
    ended.
    """
    set_aside = False

    def after_step() -> None:
        nonlocal set_aside
        if not set_aside:
            gc.collect()  # frozen garbage would stay
            gc.freeze()
            set_aside = True

    try:
        yield after_step
    finally:
        if set_aside:
            gc.unfreeze()
