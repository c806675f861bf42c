"""Servers that do not fit a run are refused before a sync overwrites their weights (R16)."""

from __future__ import annotations

import pytest

from learner.sync.fitness import check_quantization
from shared.errors import ServerMismatchError
from shared.quantization import Quantization
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


@pytest.mark.parametrize(("served", "wanted"), [("none", "fp8"), ("fp8", "none")])
def test_both_sides_name_the_same_quantization(served: Quantization, wanted: Quantization) -> None:
    """The canary is scored with what the configuration says."""
    check_quantization("http://there", STATUS.model_copy(update={"quantization": wanted}), wanted)
    with pytest.raises(ServerMismatchError, match="http://there") as refused:
        check_quantization("http://there", STATUS.model_copy(update={"quantization": served}), wanted)
    assert f"quantization: {served}" in refused.value.found
    assert f"quantization: {wanted}" in refused.value.wanted


def test_a_server_that_does_not_say_has_none() -> None:
    check_quantization("http://there", STATUS, "none")
