"""A number that stands alone has the tokens that tokenizing it in its place gives ("Loss on Y_train")."""

from __future__ import annotations

import functools

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.tiny import build_tokenizer
from learner.config.sections.task import TaskConfig
from learner.tasks.detection.spelling import NO_TOKEN, Numbers, Spelling
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import TokenPieces
from tests.examples import examples
from tests.unit.learner.tasks.detection.answers import CONTAINERS, answers
from tests.unit.learner.tasks.fakes import make_rollout


@functools.cache
def pieces() -> TokenPieces:
    return TokenPieces(build_tokenizer())


@functools.cache
def spelling(*, alone: bool) -> Spelling:
    made = Spelling(str, pieces())
    assert len(made._alone) == 1000
    if not alone:
        made._alone = made._alone[:0]
    return made


@functools.cache
def task(container: str) -> DetectionTask:
    return DetectionTask(
        TaskConfig.model_validate({"container": container, "coordinates": "digits"}), build_tokenizer()
    )


@st.composite
def tokenized(draw: st.DrawFn, container: str) -> list[int]:
    """Draw an answer's tokens as the tokenizer makes them, or with some of them spelled in bytes."""
    ids = pieces().encode(draw(answers(container, "digits")))
    torn = draw(st.sets(st.sampled_from(ids)))
    return [byte for token in ids for byte in ((*pieces()[token],) if token in torn else (token,))]


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), container=st.sampled_from(CONTAINERS))
def test_alone_is_as_in_place(data: st.DataObject, container: str) -> None:
    ids = np.array(data.draw(tokenized(container)))
    parsed = task(container).parse(make_rollout(ids.tolist()))
    places = [place for predicted in parsed.objects for place in predicted.slots]
    assume(places)
    start, end, own, lead = (column[places] for column in parsed.slots)
    wanted = np.array(data.draw(st.lists(st.integers(0, 999), min_size=len(own), max_size=len(own))))
    numbers = Numbers(start, end, own, lead, wanted)
    found = spelling(alone=True).tokens_in_place(numbers, ids)
    in_place = spelling(alone=False).tokens_in_place(numbers, ids)
    for one, other in zip(found.tolist(), in_place.tolist(), strict=True):
        length = one.index(NO_TOKEN) if NO_TOKEN in one else len(one)
        assert one[:length] == other[:length]
        assert length >= 2, "the number, and the token after it"


def test_numbers_are_single_where_each_is_its_own_token() -> None:
    made = Spelling("<|coord_{}|>".format, pieces())
    ids = np.array(pieces().encode("<|coord_5|><|coord_7|>"))
    assert len(ids) == 2
    first, second, zeros = np.array([0, 1]), np.array([1, 2]), np.array([0, 0])
    for bins, wanted in (([5, 7], True), ([5, 8], False), ([6, 8], False)):  # other bins are spelled otherwise
        assert made.are_single(Numbers(first, second, np.array(bins), zeros, zeros), ids) == wanted
    assert not spelling(alone=True).are_single(Numbers(first, second, np.array([5, 7]), zeros, zeros), ids)
