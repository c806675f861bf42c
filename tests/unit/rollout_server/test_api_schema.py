"""The server does what its own OpenAPI document says (R13, R16): it takes what the schema of a call allows, refuses
what it does not, and answers in the form that the document gives.

schemathesis draws the bodies from `/openapi.json`. Each goes to a server of its own, over a fake engine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import GenerationMode

from rollout_server.openai_api import ChatCall, CompletionCall
from shared.wire import (
    CloseCommunicatorCall,
    ExpectScoresCall,
    InferCall,
    InitCommunicatorCall,
    ScoreCall,
    UpdateWeightsCall,
)
from tests.unit.rollout_server.test_fuzz import GETS, RIGHT, check, send

pytestmark = pytest.mark.slow

CALLS: dict[str, type[BaseModel]] = {
    "/infer/": InferCall,
    "/score/": ScoreCall,
    "/init_communicator/": InitCommunicatorCall,
    "/update_weights/": UpdateWeightsCall,
    "/expect_scores/": ExpectScoresCall,
    "/close_communicator/": CloseCommunicatorCall,
    "/v1/chat/completions": ChatCall,
    "/v1/completions": CompletionCall,
}
QUICK = settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _no_vllm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_server.service._versions", dict)
        yield


@pytest.fixture(scope="module")
def api(_no_vllm: None) -> Any:
    return schemathesis.openapi.from_dict(send("GET", "/openapi.json").json())


def bodies(api: Any, path: str, mode: GenerationMode) -> st.SearchStrategy[bytes]:
    cases = api[path]["POST"].as_strategy(generation_mode=mode)
    return cases.map(lambda case: case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode())


@pytest.mark.parametrize("path", CALLS)
@given(data=st.data())
@QUICK
def test_r13_what_fits_the_schema_is_understood(api: Any, path: str, data: st.DataObject) -> None:
    """It may still be refused for what it says (an image that is not there), never for its form."""
    reply = send("POST", path, data.draw(bodies(api, path, GenerationMode.POSITIVE)))
    check(reply)
    assert "malformed body" not in reply.text


@pytest.mark.parametrize("path", CALLS)
@given(data=st.data())
@QUICK
def test_r16_what_does_not_fit_is_refused(api: Any, path: str, data: st.DataObject) -> None:
    """A number that is written as text or as a boolean aside, which pydantic reads as the number."""
    content = data.draw(bodies(api, path, GenerationMode.NEGATIVE))
    reply = send("POST", path, content)
    check(reply)
    if "malformed body" in reply.text:
        assert reply.status_code == 400
    else:
        read = CALLS[path].model_validate_json(content).model_dump(mode="json")
        assert has_all_of(read, json.loads(content))


def has_all_of(read: Any, sent: Any) -> bool:
    """Return whether nothing that was sent is gone: every key, every item, every plain value where there was one."""
    if sent is None:  # None is as good as not sent
        return True
    if isinstance(sent, dict):
        return isinstance(read, dict) and all(
            value is None or (key in read and has_all_of(read[key], value)) for key, value in sent.items()
        )
    if isinstance(sent, list):
        return isinstance(read, list) and len(read) == len(sent) and all(map(has_all_of, read, sent))
    return not isinstance(read, dict | list)


REPLIES = [("GET", path) for path in (*GETS, "/v1/models")]
REPLIES += [("POST", path) for path in (*RIGHT, "/v1/chat/completions", "/v1/completions")]
OPENAI: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
}


@pytest.mark.parametrize(("method", "path"), REPLIES)
def test_answers_have_the_documented_form(api: Any, method: str, path: str) -> None:
    """Successes and refusals; every endpoint is in the document."""
    right, wrong = {**RIGHT, **OPENAI}.get(path), {"typo": 1}
    for body in (right, wrong) if method == "POST" else (None,):
        reply = send(method, path, None if body is None else json.dumps(body).encode())
        api[path][method].validate_response(reply)
        if body is right and path in {"/infer/", "/score/", "/reset_prefix_cache/", *OPENAI}:
            assert reply.status_code == 200, reply.text


def test_every_endpoint_is_documented(api: Any) -> None:
    documented = {(method.upper(), path) for path, methods in api.raw_schema["paths"].items() for method in methods}
    assert documented == set(REPLIES)
