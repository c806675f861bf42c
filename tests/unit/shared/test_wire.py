"""Bodies between the programs (R13): unknown fields are refused, errors survive the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import ProjectError, error_classes
from shared.wire import ErrorBody, InferCall, RequestConfig, RolloutInferRequest

OWN = sorted(name for name, cls in error_classes().items() if cls.__module__ == "shared.errors")


@given(st.sampled_from(OWN), st.lists(st.text(), min_size=4, max_size=4))
def test_every_error_comes_back_as_itself(name: str, parts: list[str]) -> None:
    cls = error_classes()[name]
    what, found, wanted, remedy = parts
    error = cls(what, found=found, wanted=wanted, remedy=remedy)
    back = ErrorBody.model_validate_json(ErrorBody.of(error).model_dump_json()).to_exception()
    assert (type(back), back.what, back.found, back.wanted, back.remedy) == (cls, what, found, wanted, remedy)


def test_an_unknown_error_is_still_an_error() -> None:
    back = ErrorBody(error="ErrorOfTheFuture", what="w", found="f").to_exception()
    assert (type(back), str(back)) == (ProjectError, "w; found f")


def test_a_request_as_ms_swift_writes_it() -> None:
    """R13: strings for images, a uuid that is made where it is missing."""
    body = {"messages": [{"role": "user", "content": "<image>hi"}], "images": ["/a.png"], "data_dict": {"id": 3}}
    first, second = (RolloutInferRequest.model_validate(body) for _ in range(2))
    assert first.images == ["/a.png"]
    assert first.uuid != second.uuid
    assert RolloutInferRequest.model_validate(body | {"uuid": "u"}).uuid == "u"


@pytest.mark.parametrize(
    "body",
    [
        {"infer_requests": [], "typo": 1},
        {"infer_requests": [{"messages": []}]},
        {"infer_requests": [{"messages": [{"role": "tool", "content": ""}]}]},
        {"infer_requests": [], "request_config": {"temperature": -1}},
        {"infer_requests": [], "request_config": {"n": 2}},
        {"infer_requests": [], "request_config": {"top_p": 0}},
    ],
)
def test_what_is_not_understood_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        InferCall.model_validate(body)


def test_bodies_are_frozen() -> None:
    config = RequestConfig()
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]
