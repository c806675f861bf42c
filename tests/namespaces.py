"""Several "machines" on this one, for tests of several nodes (`bench.namespaces`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from bench import namespaces
from bench.namespaces import Node, NoNamespacesError


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Node]]:
    """Make the nodes of `bench.namespaces.network`. Skips the test where this machine makes no namespaces."""
    with contextlib.ExitStack() as stack:
        try:
            _, nodes = stack.enter_context(namespaces.network(names))
        except NoNamespacesError as refused:
            pytest.skip(f"no network namespaces here: {refused}")
        yield nodes
