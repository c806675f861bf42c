"""Another model, or another reading of the prompt, is found before anything is sent (R03, R16)."""

from __future__ import annotations

import pytest

from learner.sync.servers import check_architecture, check_prompt
from shared.errors import PromptMismatchError, ServerMismatchError
from shared.wire import ScoreReply, ServerStatus
from tests.unit.learner.sync.fakes import PROMPT_IDS, canary_items

URL = "http://a.test"
STATUS = ServerStatus(
    server_id="x",
    model="some/model",
    architecture={"model_type": "qwen3", "hidden_size": "64"},
    vocab_size=9,
    max_model_len=9,
    gate="serving",
    ver=0,
    world_size=1,
    in_flight=0,
    waiting=0,
    versions={},
)


def test_another_architecture_names_server_and_size() -> None:
    check_architecture(URL, STATUS, {"model_type": "qwen3", "num_heads": "4"})
    with pytest.raises(ServerMismatchError, match=r"http://a\.test.*hidden_size 64, not 128.*some/model") as caught:
        check_architecture(URL, STATUS, {"model_type": "qwen3", "hidden_size": "128"})
    assert caught.value.exit_code == 2


def test_another_prompt_names_server_and_sample() -> None:
    (item,) = canary_items(1)
    check_prompt(URL, item, ScoreReply(ver=0, logprobs=[[0.0]], prompt_token_ids=[list(PROMPT_IDS)]))
    with pytest.raises(PromptMismatchError, match=r"http://a\.test.*from token 1 on"):
        check_prompt(URL, item, ScoreReply(ver=0, logprobs=[[0.0]], prompt_token_ids=[[PROMPT_IDS[0], 99]]))
