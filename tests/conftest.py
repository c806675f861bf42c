"""Settings of all tests: hypothesis draws the same examples in every run, machines may be slow, and two processes test.

One thread of OpenMP each, which sleeps while it waits: this must stand before torch is imported.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key
from hypothesis import HealthCheck, settings

from shared import masking
from tests import garbage, order
from tests.examples import examples

gc.disable()  # until the tests are collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile(
    "repeatable",
    max_examples=examples(100),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """The workers of one run fork programs from the same processes. None collects garbage as it ends to
    find exceptions that nobody could raise: these are ignored here, and each of two collections takes 1.5 s."""
    config.stash[gc_collect_iterations_key] = 0
    if hasattr(config, "workerinput"):
        from bench import forked  # imports much, so it comes after the settings of OpenMP

        folder = Path(config.option.basetemp).parent / "forked"  # of all workers, and removed as pytest removes it
        folder.mkdir(parents=True, exist_ok=True)
        forked.share(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers are the same whatever ran before. This comes before the fixtures, which draw too."""
    garbage.set_aside()
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order.place(item.path))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """While the test modules were loaded the collector did not walk either.

    pytest adds its handlers to each logger that does not propagate, six times a test, and torch has eighty of them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    garbage.set_aside()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # some libraries count what is left at exit, and would complain


@pytest.fixture(autouse=True)
def no_secrets_yet() -> None:
    """Forget the secrets that an earlier test's configuration named."""
    masking.forget()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Put logging back: commands that a test runs in this process send logs to a file, or switch them off, which must
    not reach the next test."""
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    before = {one: (one.propagate, one.level) for one in loggers if one.parent is logging.root}
    yield
    logging.disable(logging.NOTSET)
    for logger, (propagate, level) in before.items():
        logger.propagate = propagate
        if logger.level != level:  # setting it clears the caches of all loggers
            logger.setLevel(level)


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """SIGHUP is not ignored in the test, nor in what it starts, whatever started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
