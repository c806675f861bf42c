"""Bodies that are built in turns are the same as those that are built in one go, and so are their mistakes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from rollout_server.bodies import _built, _built_in_turns, _lists, _Turns, _WrongError
from rollout_server.openai_api import ChatCall
from shared.wire import (
    MAX_PARTS,
    Bucket,
    ContentPart,
    InferCall,
    Message,
    RolloutInferRequest,
    ScoreCall,
    ScoreItem,
    TensorSpec,
    UpdateWeightsCall,
)
from tests.unit.rollout_server.test_fuzz import RIGHT

PARTS = [{"type": "image", "image": "a"}, {"type": "text", "text": "b", "detail": None}]
MESSAGES = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "c"}]
REQUEST = {"messages": MESSAGES, "images": None, "uuid": "u"}
TENSOR = {"name": "t", "dtype": "float32", "shape": [1]}
UPDATE = {**RIGHT["/update_weights/"], "buckets": [{"tensors": [TENSOR] * 3, "num_bytes": 12}]}


def in_turns(model: type[BaseModel], value: Any) -> BaseModel:
    return asyncio.run(_built_in_turns(model, value, "", _Turns()))


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (InferCall, {"infer_requests": [REQUEST] * 3, "request_config": None}),
        (ScoreCall, {"items": [{"request": REQUEST, "response_token_ids": [1, 2]}]}),
        (UpdateWeightsCall, UPDATE),
        (ChatCall, {"messages": MESSAGES, "stop": ["a"]}),
    ],
)
def test_the_same_body(model: type[BaseModel], value: Any) -> None:
    assert in_turns(model, json.loads(json.dumps(value))) == _built(model, value, "")


def test_all_lists_of_objects_are_found() -> None:
    found: dict[Any, Any] = {
        model: _lists(model) for model in (InferCall, RolloutInferRequest, Message, ScoreCall, UpdateWeightsCall)
    }
    wanted: dict[Any, Any] = {
        InferCall: {"infer_requests": RolloutInferRequest},
        RolloutInferRequest: {"messages": Message},
        Message: {"content": ContentPart},
        ScoreCall: {"items": ScoreItem},
        UpdateWeightsCall: {"buckets": Bucket, "canary": ScoreItem},
    }
    assert found == wanted
    assert [*_lists(Bucket).values()] == [TensorSpec]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (
            {"infer_requests": [REQUEST, {**REQUEST, "messages": [*MESSAGES, {"role": "x"}]}]},
            "infer_requests.1.messages.2.",
        ),
        ({"infer_requests": [{**REQUEST, "images": [1]}]}, "infer_requests.0.images.0"),
        ({"infer_requests": [REQUEST], "metrics": [1]}, "metrics"),
        ({"infer_requests": [{"messages": [MESSAGES[1]] * (MAX_PARTS + 1)}]}, "infer_requests.0.messages"),
        ({"infer_requests": [{"messages": [{"role": "user", "content": [PARTS[1]] * (MAX_PARTS + 1)}]}]}, "content"),
        ([], "the body"),
    ],
)
def test_a_mistake_is_named_by_its_field(value: Any, field: str) -> None:
    for build in (in_turns, lambda model, value: _built(model, value, "")):
        with pytest.raises(_WrongError, match=field):
            build(InferCall, value)
