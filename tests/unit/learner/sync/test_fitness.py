"""Servers that do not fit a run are refused before a sync overwrites their weights (R16)."""

from __future__ import annotations

import pytest

from learner.config.sections.vllm import VllmConfig
from learner.sync.fitness import check_quantization
from shared.errors import ServerMismatchError
from shared.wire import ServerStatus

STATUS = ServerStatus(
    server_id="s",
    model="m",
    vocab_size=10,
    max_model_len=10,
    gate="serving",
    ver=0,
    world_size=1,
    in_flight=0,
    waiting=0,
    versions={},
)


@pytest.mark.parametrize(
    ("key", "served", "wanted"),
    [
        ("quantization", "none", "fp8"),
        ("quantization", "fp8", "none"),
        ("kv_cache_dtype", "auto", "fp8"),
        ("kv_cache_dtype", "fp8", "auto"),
    ],
)
def test_both_sides_name_the_same_quantization(key: str, served: str, wanted: str) -> None:
    """The canary is scored, and its tolerance chosen, with what the configuration says."""
    keys = VllmConfig.model_validate({key: wanted})
    check_quantization("http://there", STATUS.model_copy(update={key: wanted}), keys)
    with pytest.raises(ServerMismatchError, match="http://there") as refused:
        check_quantization("http://there", STATUS.model_copy(update={key: served}), keys)
    assert f"{key}: {served}" in refused.value.found
    assert f"{key}: {wanted}" in refused.value.wanted


def test_a_server_that_does_not_say_has_none() -> None:
    check_quantization("http://there", STATUS, VllmConfig())
