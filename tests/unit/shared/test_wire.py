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


# `asdict` of the classes of ms-swift 4.6, with nothing set but what must be.
SWIFT_REQUEST = {"messages": [{"role": "user", "content": "<image>hi"}], "images": ["/a.png"], "audios": []}
SWIFT_REQUEST |= {"videos": [], "tools": None, "objects": {}, "chat_template_kwargs": {}, "data_dict": {}, "uuid": None}
SWIFT_CONFIG = {"max_tokens": None, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
SWIFT_CONFIG |= {"repetition_penalty": None, "num_beams": 1, "stop": [], "seed": None, "stream": False}
SWIFT_CONFIG |= {"logprobs": False, "top_logprobs": None, "prompt_logprobs": None, "n": 1, "best_of": None}
SWIFT_CONFIG |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "length_penalty": 1.0, "return_details": False}
SWIFT_CONFIG |= {"structured_outputs_regex": None}
SWIFT_CALL = {"infer_requests": [SWIFT_REQUEST], "metrics": None, "use_tqdm": None, "adapter_request": None}


@pytest.mark.parametrize("config", [None, SWIFT_CONFIG])
def test_a_call_as_ms_swifts_client_writes_it(config: dict[str, object] | None) -> None:
    """R13: null is as good as nothing; only for `max_tokens` it has a meaning of its own."""
    call = InferCall.model_validate({**SWIFT_CALL, "request_config": config})
    assert call.request_config == RequestConfig(max_tokens=None if config else RequestConfig().max_tokens)
    assert call.infer_requests[0].images == ["/a.png"]
    assert InferCall.model_validate_json(call.model_dump_json()) == call


def test_where_null_is_allowed_the_schema_says_so() -> None:
    definitions = InferCall.model_json_schema()["$defs"]
    null = {"type": "null"}
    assert null in definitions["RolloutInferRequest"]["properties"]["images"]["anyOf"]
    assert "anyOf" not in definitions["RolloutInferRequest"]["properties"]["messages"]


A_REQUEST = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    "body",
    [
        {"infer_requests": [], "typo": 1},
        {"infer_requests": [{"messages": []}]},
        {"infer_requests": [{"messages": [{"role": "tool", "content": ""}]}]},
        {"infer_requests": [], "request_config": {"temperature": -1}},
        {"infer_requests": [], "request_config": {"n": 0}},
        {"infer_requests": [], "request_config": {"num_beams": 2}},
        {"infer_requests": [], "request_config": {"stream": True}},
        {"infer_requests": [], "request_config": {"best_of": 2}},
        {"infer_requests": [], "request_config": {"length_penalty": 0.5}},
        {"infer_requests": [], "request_config": {"prompt_logprobs": 0}},
        {"infer_requests": [], "request_config": {"structured_outputs_regex": "a"}},
        {"infer_requests": [], "adapter_request": {"name": "a"}},
        {"infer_requests": [], "metrics": ["a"]},
        {"infer_requests": [{**A_REQUEST, "audios": ["a.wav"]}]},
        {"infer_requests": [{**A_REQUEST, "videos": ["a.mp4"]}]},
        {"infer_requests": [{**A_REQUEST, "tools": [{"type": "function"}]}]},
        {"infer_requests": [{**A_REQUEST, "objects": {"bbox": [[1, 2, 3, 4]]}}]},
        {"infer_requests": [{**A_REQUEST, "messages": None}]},
        {"infer_requests": [{"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}]},
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
