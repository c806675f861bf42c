"""What the start of a run has made is not walked by later garbage collections, and given back at the end."""

from __future__ import annotations

import contextlib
import gc
import weakref

from learner.trainer import start_set_aside


class Node:
    """An object that only a collection frees: it holds itself."""

    def __init__(self) -> None:
        self.me = self


def collected(node: weakref.ref[Node]) -> bool:
    gc.collect()
    return node() is None


def is_walked(node: Node) -> bool:
    return any(one is node for one in gc.get_objects())


def test_only_what_lives_after_the_first_step_is_set_aside() -> None:
    with start_set_aside() as after_step:
        first = Node()
        assert is_walked(first), "nothing is set aside before the first step has ended"
        garbage = weakref.ref(Node())
        after_step()
        assert garbage() is None, "garbage of the start is freed, not set aside"
        assert not is_walked(first)
        second = Node()
        after_step()
        assert is_walked(second), "later steps set nothing aside"
        garbage = weakref.ref(Node())
        assert collected(garbage), "the garbage of later steps is freed"
    assert is_walked(first)


def failing_run() -> weakref.ref[Node]:
    """Return an object that was set aside, and that nobody held when the run failed."""
    with contextlib.suppress(KeyError), start_set_aside() as after_step:
        node = Node()
        seen = weakref.ref(node)
        after_step()
        del node
        assert not collected(seen)
        raise KeyError("learning broke")
    return seen


def test_all_is_given_back_when_a_run_fails() -> None:
    seen = failing_run()
    assert gc.get_freeze_count() == 0
    assert collected(seen)


def test_a_run_without_a_step_sets_nothing_aside() -> None:
    before = gc.get_freeze_count()
    with start_set_aside():
        assert gc.get_freeze_count() <= before  # objects that were set aside before may be freed meanwhile
