"""The server takes what the schema of its calls allows and refuses what it does not (R13, R16).

The schema is OpenAPI, made of the models in `shared/wire.py`; schemathesis draws bodies that fit it and bodies that do
not. Each goes to a server of its own, over a fake engine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from schemathesis import GenerationMode

from shared.wire import (
    CloseCommunicatorCall,
    ExpectScoresCall,
    InferCall,
    InitCommunicatorCall,
    ScoreCall,
    UpdateWeightsCall,
)
from tests.unit.rollout_server.test_fuzz import check, send

CALLS: dict[str, type[BaseModel]] = {
    "/infer/": InferCall,
    "/score/": ScoreCall,
    "/init_communicator/": InitCommunicatorCall,
    "/update_weights/": UpdateWeightsCall,
    "/expect_scores/": ExpectScoresCall,
    "/close_communicator/": CloseCommunicatorCall,
}
QUICK = settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))


def openapi() -> dict[str, Any]:
    place = "#/components/schemas/{model}"
    bodies, definitions = models_json_schema([(model, "validation") for model in CALLS.values()], ref_template=place)
    paths = {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": bodies[model, "validation"]}},
                },
                "responses": {"200": {"description": "done"}},
            }
        }
        for path, model in CALLS.items()
    }
    info = {"title": "rollout server", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": definitions["$defs"]}}


SCHEMA = schemathesis.openapi.from_dict(openapi())


def bodies(path: str, mode: GenerationMode) -> st.SearchStrategy[bytes]:
    cases = SCHEMA[path]["POST"].as_strategy(generation_mode=mode)
    return cases.map(lambda case: case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode())


@pytest.mark.parametrize("path", CALLS)
@given(data=st.data())
@QUICK
def test_r13_what_fits_the_schema_is_understood(path: str, data: st.DataObject) -> None:
    """It may still be refused for what it says (an image that is not there), never for its form."""
    reply = send("POST", path, data.draw(bodies(path, GenerationMode.POSITIVE)))
    check(reply)
    assert "malformed body" not in reply.text


@pytest.mark.parametrize("path", CALLS)
@given(data=st.data())
@QUICK
def test_r16_what_does_not_fit_is_refused(path: str, data: st.DataObject) -> None:
    """A number that is written as text or as a boolean aside, which pydantic reads as the number."""
    content = data.draw(bodies(path, GenerationMode.NEGATIVE))
    reply = send("POST", path, content)
    check(reply)
    if "malformed body" in reply.text:
        assert reply.status_code == 400
    else:
        read = CALLS[path].model_validate_json(content).model_dump(mode="json")
        assert has_all_of(read, json.loads(content))


def has_all_of(read: Any, sent: Any) -> bool:
    """Whether nothing that was sent is gone: every key, every item, every plain value where there was one."""
    if sent is None:  # as good as not sent
        return True
    if isinstance(sent, dict):
        return isinstance(read, dict) and all(key in read and has_all_of(read[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return isinstance(read, list) and len(read) == len(sent) and all(map(has_all_of, read, sent))
    return not isinstance(read, dict | list)


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)
